"""``llmc adapter add``, and answers of an adapter on the command line."""

import shutil

from llmc.bundle import ADAPTERS_FOLDER


def test_an_adapter_is_added_answers_and_is_verified(llmc, adapter_bundles, tmp_path):
    bundle = shutil.copytree(
        adapter_bundles / "fp32", tmp_path / "bundle", ignore=lambda *_: [ADAPTERS_FOLDER], copy_function=shutil.copy
    )
    added = llmc("adapter", "add", bundle, adapter_bundles / "sql", "--name", "sql")
    assert (added.code, added.out) == (0, f"wrote {bundle / ADAPTERS_FOLDER / 'sql'}\n")
    ask = ("run", bundle, "-p", "the", "--max-tokens", "8", "--temperature", "0")
    plain, own = llmc(*ask), llmc(*ask, "--adapter", "sql")
    assert plain.code == own.code == 0 and plain.out != own.out
    assert "2 adapters of rank 8" in llmc("inspect", bundle).out
    checked = llmc("verify", bundle)
    assert checked.code == 0 and ADAPTERS_FOLDER not in checked.out + checked.err
    (bundle / ADAPTERS_FOLDER / "sql" / "factors.npy").write_bytes(b"x")
    damaged = llmc("verify", bundle)
    assert damaged.code == 1 and "factors.npy or the version of adapter.json changed; add it again" in damaged.err


def test_what_is_wrong_is_one_sentence(llmc, adapter_bundles):
    taken = llmc("adapter", "add", adapter_bundles / "fp32", adapter_bundles / "sql", "--name", "more")
    assert taken.code == 2 and "has 2 adapters, and was built for 2; remove a folder of adapters" in taken.err
    unknown = llmc("run", adapter_bundles / "fp32", "-p", "the", "--adapter", "more")
    assert unknown.code == 1 and "there is no adapter 'more'; loaded are law, sql" in unknown.err
