"""The kit for a GPU: its dry run returns every item, bad items are recorded, and parts are whole or named."""

import io
import json
import shutil
import struct
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from doubles.shared import shared

KIT = Path(__file__).parents[2] / "recipes" / "gpu_kit"
CONTEXT = 512  # of the one bundle; golden prompts go beyond the cache's first size
BENCHMARKS = KIT.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script of the kit; afterwards the modules are forgotten, and what they changed is as before."""
    from llmc.runtime.host import cuda as host
    from llmc.runtime.sessions.onnxruntime import cuda, cuda_provider
    from llmc.runtime.sessions.tensorrt import library

    rooms = [module for name, module in list(sys.modules.items()) if name.startswith("llmc.")]
    holders = [module for module in rooms if getattr(module, "lists_gpu", None) is library.lists_gpu]
    changed = [(host, "open_driver"), (cuda, "open_driver"), (cuda, "require"), (cuda, "MOST_RECORDINGS")]
    changed += [(cuda_provider, "ATTENTION_KERNELS"), *((module, "lists_gpu") for module in holders)]
    for module, name in changed:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sys, "path", [str(KIT), str(BENCHMARKS), *sys.path])
    names = [path.stem for folder in (KIT, BENCHMARKS) for path in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def kit(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("kit")


@pytest.fixture
def work(layer_export: Path, script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit's folder of work, in which one small bundle stands for all."""

    def make(folder: Path) -> None:
        kit, maker = script("kit"), script("make_bundles")
        (folder / "tiny").mkdir()
        (folder / "speed").mkdir()
        maker.build_unjudged(layer_export, folder / "bundle", "fp16", CONTEXT)
        maker.write_golden(folder / "bundle", CONTEXT, steps=3)
        shutil.copytree(folder / "bundle", folder / "graph")
        maker.strip(folder / "graph")
        (folder / "export").symlink_to(layer_export)
        for name in kit.GOLDENS:
            (folder / "tiny" / name).symlink_to(folder / "bundle")
            (folder / "tiny" / f"{name}.npz").symlink_to(folder / "bundle.npz")
        for name, _ in kit.SPEEDS:
            if not (folder / "speed" / name).exists():
                (folder / "speed" / name).symlink_to(folder / "graph")

    return shared(tmp_path_factory, "gpu kit", make)


def run_with(command: list[str], **_: object) -> "CompletedProcess[str]":
    """What the programs that items start would print; the whole dry run of the kit's page starts them."""
    if "nvidia-smi" in command[0]:
        raise FileNotFoundError(command[0])
    return CompletedProcess(command, 0, "2 passed\ntarget cuda          ready\n", "")


@pytest.fixture
def here(kit, script, work, monkeypatch, tmp_path) -> list[str]:
    """Items run in this process, which has imported what each of theirs would; arguments of a dry run."""
    options = ["--target", "cpu", "--fake-device", "--work", str(work), "--parts", str(tmp_path / "none")]
    options += ["--out", str(tmp_path)]
    for name, value in kit.environment(kit.parse(["A", *options])).items():
        if name.startswith("GPU_KIT"):
            monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "nxrt_ep_cuda", SimpleNamespace(get_library_path=lambda: "nowhere.so"))  # type: ignore[misc]
    monkeypatch.setattr("subprocess.run", run_with)
    monkeypatch.setattr("torch.compile", lambda step, **_: step)  # takes seconds, and is torch's own

    def run(item: object, asked: Namespace, limit: float) -> tuple[str, str]:
        name, *arguments = item.command  # type: ignore[attr-defined]
        common, module = script("common"), script(name.removesuffix(".py"))
        common.problems.clear()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with redirect_stdout(io.StringIO()) as out:
            common.main(module.ITEMS)
        return "ok", out.getvalue()

    monkeypatch.setattr(kit, "run", run)
    return options


def test_a_dry_run_returns_every_item_as_json_and_in_a_short_table(kit, here, tmp_path, capsys):
    assert kit.main(["A", "B", "C", *here]) == 0
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["item"] for result in results] == [item.name for item in kit.ITEMS]
    assert [result["item"] for result in results if result["state"] != "ok" or not result["result"]] == []
    assert all(result["s"] < item.limit for result, item in zip(results, kit.ITEMS, strict=True))
    table = capsys.readouterr().out
    assert len(table.splitlines()) <= 60 and len(table) < 12_000
    goldens = [result["result"] for result in results if result["item"].startswith("golden")]
    assert all({"plain", "recorded", "chunks", "rows", "growth", "equal_bits"} <= golden.keys() for golden in goldens)


def test_logits_of_the_position_before_are_beyond_the_limit(script, work):
    common, logits = script("common"), np.load(work / "bundle.npz")["logits"]
    assert common.distance(logits, logits) == 0
    assert common.distance(logits[1:], logits[:-1]) > 10 * common.LIMIT
    assert not common.distance(np.full_like(logits, np.nan), logits) <= common.LIMIT


BAD = {
    "hangs": ("import time; print('{\"first\": 1}', flush=True); time.sleep(60)", "no end after 1 s"),
    "crashes": ("import os; os.abort()", "ended with -6"),
    "raises": ("raise ValueError('why')", "ended with 1: ValueError: why"),
    "garbage": ("print('{ no json'); print('\\x00\\xff{')", "printed no result"),
    "not finite": ('print(\'{"problems": [], "value": NaN}\')', "ok"),
    "kernels": ("print('{\"a\": 1}'); print('Operator=GroupQueryAttention SdpaKernel=XQA NumSplits=2')", "ok"),
    "problem": ('print(\'{"problems": ["wrong"]}\')', "wrong"),
    "leaves a child": ("import subprocess; subprocess.Popen(['sleep', '60']); print('{\"a\": 1}')", "ok"),
}


def test_an_item_that_hangs_crashes_or_prints_garbage_is_recorded_and_the_rest_goes_on(kit, tmp_path, monkeypatch):
    items = []
    for name, (code, _) in BAD.items():
        (tmp_path / f"{name}.py").write_text(code)
        limit = 1 if name == "hangs" else 30
        items.append(kit.Item("A", name, limit, (str(tmp_path / f"{name}.py"),)))
    monkeypatch.setattr(kit, "ITEMS", items)
    assert kit.main(["A", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 1
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    results = {result["item"]: result for result in map(json.loads, lines)}
    assert {name: result["state"] for name, result in results.items()} == {
        name: state for name, (_, state) in BAD.items()
    }
    assert results["hangs"]["result"] == {"first": 1}
    assert results["kernels"]["result"] == {"a": 1, "attention": ["XQA"]}
    assert results["not finite"]["result"] == {"value": "NaN"}


def test_no_item_begins_that_may_end_after_the_deadline(kit, tmp_path):
    out = ["--out", str(tmp_path / "out"), "--work", str(tmp_path), "--only", "torch*"]
    assert kit.main(["A", "--deadline", "50", *out]) == 1
    states = [json.loads(line)["state"] for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert states == ["not begun: 50 s are left, its limit is 80 s", "not begun: 50 s are left, its limit is 60 s"]


def test_an_item_is_a_process_of_its_own(kit, work, tmp_path):
    out = ["--out", str(tmp_path), "--work", str(work), "--only", "driver errors"]
    assert kit.main(["A", "--target", "cpu", "--fake-device", *out]) == 0
    assert "ResourceError" in json.loads((tmp_path / "results.jsonl").read_text())["result"]["memory"]


def test_the_table_stays_short_whatever_items_print(kit):
    long = {
        "call": "A",
        "item": "an item",
        "state": "wrong\n" * 99,
        "s": 1.0,
        "result": {"a|b": "x" * 999, "c": [1, 2]},
    }
    table = kit.format_table([long] * 99)
    assert len(table.splitlines()) == 60 and len(table) < 12_000


@pytest.fixture
def archives(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three archives of random bytes: what is needed first is small."""
    parts = script("make_parts")
    monkeypatch.setattr(parts, "DICTIONARY", 1 << 16)  # a large one takes gigabytes
    made = []
    for name, size in (("kit", 3000), ("ort", 9000), ("rtx", 5000)):
        (tmp_path / "made" / name).mkdir(parents=True)
        (tmp_path / "made" / name / "file").write_bytes(np.random.default_rng(size).bytes(size))
        made.append(parts.pack(tmp_path / "made", name, (name,)))
    return made


def test_parts_fit_carry_their_sums_and_assemble_to_what_was_packed(script, archives, tmp_path, monkeypatch):
    parts, assemble = script("make_parts"), script("assemble")
    room = 7000
    parts.cut(archives, tmp_path, room)
    monkeypatch.setattr(assemble, "PARTS", tmp_path)
    monkeypatch.setattr(assemble, "WORK", tmp_path / "work")
    for call, whole in (("A", ["kit"]), ("B", ["kit", "ort"]), ("C", ["kit", "ort", "rtx"])):
        files = [file for file in (tmp_path / call).iterdir() if file.name != assemble.SUMS]
        assert sum(file.stat().st_size for file in files) <= room
        assert assemble.check_sums(tmp_path / call) == []
        assemble.assemble(call)
        for name in whole:
            assert (tmp_path / "work" / name / "file").read_bytes() == (tmp_path / "made" / name / "file").read_bytes()
        assert sorted(path.name for path in (tmp_path / "work").iterdir()) == sorted([*whole, "parts"])


def test_a_damaged_or_missing_piece_is_named(script, archives, tmp_path):
    script("make_parts").cut(archives, tmp_path, 7000)
    pieces = sorted(file for file in (tmp_path / "B").iterdir() if file.name != "SHA256SUMS")
    pieces[0].write_bytes(pieces[0].read_bytes()[:-1] + b"?")
    pieces[1].unlink()
    assert script("assemble").check_sums(tmp_path / "B") == [piece.name for piece in pieces]


def test_a_machine_that_did_not_get_the_parts_before_is_told_so(script, archives, tmp_path, monkeypatch):
    script("make_parts").cut(archives, tmp_path, 7000)
    assemble, common = script("assemble"), script("common")
    monkeypatch.setattr(assemble, "PARTS", tmp_path)
    monkeypatch.setattr(assemble, "WORK", tmp_path / "work")
    assemble.assemble("B")
    assert common.problems == ["ort.tar.xz lacks its first pieces: carry the parts before, too"]


def test_what_a_call_cannot_carry_is_refused(script, archives, tmp_path):
    with pytest.raises(SystemExit, match=r"ort.tar.xz is [\d,]+ bytes too large to be carried by call B"):
        script("make_parts").cut(archives, tmp_path, 4000)


def fake_library(payloads: dict[int, bytes]) -> bytearray:
    """An ELF file with one section of machine code for GPUs, a payload for each architecture."""
    entries = b"".join(
        struct.pack("<HHIQ12xI32x", 2, 1, 64, len(code), architecture) + code for architecture, code in payloads.items()
    )
    code = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.names\0"
    place = 64 + len(code) + len(names)
    header = b"\x7fELF\2\1\1".ljust(0x28, b"\0") + struct.pack("<Q", place) + bytes(10) + struct.pack("<HHH", 64, 2, 1)
    tables = [(1, 1, 0, 0, 64, len(code)), (12, 3, 0, 0, 64 + len(code), len(names))]
    return bytearray(header + code + names + b"".join(struct.pack("<IIQQQQ24x", *table) for table in tables))


def test_trimming_keeps_one_architecture_and_every_size(script):
    trim, codes = script("trim"), {80: b"eighty.." * 4, 90: b"ninety.." * 6}
    library = fake_library(codes)
    assert trim.trim(library, {90}) == {80: 32, 90: 48}
    assert library == fake_library({80: bytes(32), 90: codes[90]})
    with pytest.raises(ValueError, match="no code for sm_120; expected one of"):
        trim.trim(library, {120})


def test_weights_that_are_written_have_the_places_types_and_spread_of_the_real_ones(script, work, tmp_path):
    weights = script("weights")
    shutil.copytree(work / "graph", tmp_path / "graph", ignore=shutil.ignore_patterns("weights.bin*"))
    weights.write_weights(tmp_path / "graph")
    real, written = (
        np.fromfile(folder / "weights.bin", np.float16) for folder in (work / "bundle", tmp_path / "graph")
    )
    assert len(real) == len(written)
    spread = [values.astype(np.float32).std() for values in (real, written)]
    assert spread[0] == pytest.approx(spread[1], rel=0.05)  # drawn from a normal distribution of the same deviation
    with pytest.raises(ValueError, match="has the type INT64, expected codes or floats"):
        weights.random_values({"name": "x", "type": "INT64"}, 8)
