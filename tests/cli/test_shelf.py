"""``llmc list`` and ``llmc rm``, and what ``llmc run`` builds on first use."""

import os
from pathlib import Path

import pytest
from doubles.ggufs import write_gguf

from llmc.bundle import BUNDLE_MANIFEST
from llmc.runtime import load
from llmc.sources.shelf import list_bundles, remove_bundle, shelf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kept(tiny_bundle: Path, cache: Path) -> Path:
    """A real bundle in the cache."""
    folder = cache / "bundles" / "tiny-0123456789abcdef"
    folder.mkdir(parents=True)
    for file in tiny_bundle.iterdir():
        os.link(file, folder / file.name)
    return folder


def test_bundles_are_listed_with_size_quality_and_last_use(llmc, kept: Path):
    (kept.parent / "old-fedcba9876543210").mkdir()
    (kept.parent / "old-fedcba9876543210" / BUNDLE_MANIFEST).write_text('{"schema_version": 1}')
    old, bundle = list_bundles()
    assert (old.name, old.precision) == ("old-fedcba9876543210", None)
    assert bundle.size == sum(file.stat().st_size for file in kept.iterdir())
    assert bundle.precision == "int8" and bundle.mean_kl is not None and bundle.used > 0
    rows = llmc("list").out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [[old.name, "unknown"], [kept.name, "int8"]]
    assert f'"name": "{kept.name}"' in llmc("list", "--json").out


@pytest.mark.parametrize("name", ["../tiny", "/etc", ".", "..", "", "tiny", ".tiny-0123456789abcdef.lock"])
def test_only_what_is_listed_can_be_removed(llmc, kept: Path, tmp_path: Path, name: str):
    (tmp_path / "cache" / "tiny").mkdir()
    ran = llmc("rm", name)
    assert (ran.code, ran.out) == (2, "") and "llmc list" in ran.err
    assert kept.exists() and (tmp_path / "cache" / "tiny").exists()


def test_a_removed_bundle_leaves_nothing_and_whoever_has_loaded_it_goes_on(kept: Path):
    kept.with_name(f".{kept.name}.lock").touch()
    with load(kept, self_test=False) as model:
        assert remove_bundle(kept.name) == kept
        assert model.generate([1, 2], max_tokens=1).token_ids
    assert list(kept.parent.iterdir()) == []


@pytest.mark.slow
def test_a_quantized_gguf_file_is_run_with_its_own_weights(llmc, one_layer: Path, tmp_path: Path):
    model = write_gguf(one_layer, tmp_path / "small.gguf", "Q8_0")
    order = ["run", model, "-p", "ab", "--max-tokens", "2"]
    first, second = llmc(*order), llmc(*order)
    assert (first.code, second.code) == (0, 0), first.err
    assert "built with its weights as they are" in first.err and second.err == ""
    assert first.out == second.out
    [bundle] = list_bundles()
    assert (bundle.model, bundle.precision) == ("small", "source") and bundle.mean_kl is not None
    assert not list(shelf().glob(".*.work"))
