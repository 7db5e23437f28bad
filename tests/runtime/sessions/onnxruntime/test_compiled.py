"""Compiled graphs compute the same bits, are used only where they fit, and are never needed."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from llmc.bundle import Compiled, Manifest, read_bundle, version, write_manifest
from llmc.errors import BundleError, ResourceError, UsageError
from llmc.optimize.build import build
from llmc.optimize.recipe import Request
from llmc.publish import file_entries
from llmc.runtime import load
from llmc.runtime.runner.prefill import SingleRunner
from llmc.runtime.sessions import Phase, open_session
from llmc.runtime.sessions.onnxruntime import compiled
from llmc.runtime.sessions.onnxruntime import cpu as sessions

IDS = list(range(5, 45))
# Since this version ONNX Runtime compares packed weights with what it would pack, and refuses others.
ENGINE_COMPARES = (1, 32)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def foreign(compiled_bundle: Path, tmp_path: Path) -> Path:
    """The bundle as a machine of another kind built it."""
    folder = Path(shutil.copytree(compiled_bundle, tmp_path / "foreign"))
    change(folder, lambda manifest: replace(manifest, compiled=elsewhere(manifest)))
    return folder


def elsewhere(manifest: Manifest) -> Compiled:
    assert manifest.compiled is not None
    return replace(manifest.compiled, environment="f" * 32)


def change(folder: Path, edit: Callable[[Manifest], Manifest]) -> None:
    write_manifest(edit(read_bundle(folder)), folder)


def plain(folder: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that was built without compiled graphs."""
    copy = Path(shutil.copytree(folder, tmp_path / "plain"))
    change(copy, lambda manifest: replace(manifest, compiled=None))
    return copy


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which graphs loading the bundle opens."""
    paths: list[Path] = []
    original = sessions._opened

    def watched(runtime: object, files: dict[str, Path], *how: object) -> dict[str, object]:
        paths.extend(files.values())
        return original(runtime, files, *how)

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_opened", watched)
        open_session(folder, read_bundle(folder), 1).close()
    return paths


def logits(folder: Path) -> list[np.ndarray]:
    manifest = read_bundle(folder)
    runner = SingleRunner(open_session(folder, manifest, 1), manifest.limits.max_context, 16)
    return [runner.logits(IDS, phase) for phase in Phase]


def entries(root: Path) -> list[Path]:
    return sorted((root / "compiled").iterdir()) if (root / "compiled").exists() else []


# ---------------------------------------------------------------------------------------------------------- the bits


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_compiled_graphs_compute_the_bits_of_the_plain_ones(
    tiny_export: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
):
    built = build(tiny_export, tmp_path / "built", precision=precision, recipe=Request(compiled=True)).output
    assert all(path.name.startswith("compiled-") and path.parent == built for path in opened(built, monkeypatch))
    for ours, theirs in zip(logits(built), logits(plain(built, tmp_path)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_packed_weights_that_were_changed_are_found(
    compiled_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The planted error: were packed weights not used, or not compared, nothing would show."""
    copy = Path(shutil.copytree(compiled_bundle, tmp_path / "copy"))
    spoil_packed_weights(copy)
    pairs = list(zip(logits(copy), logits(compiled_bundle), strict=True))
    if version(pytest.importorskip("onnxruntime").__version__) >= ENGINE_COMPARES:
        assert not any(path.name.startswith("compiled-") for path in opened(copy, monkeypatch)[-2:])
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours, theirs)
        return
    assert all(not np.array_equal(ours, theirs) for ours, theirs in pairs)
    with pytest.raises(BundleError, match="logits differ"):
        load(copy, self_test=True)


def spoil_packed_weights(folder: Path) -> None:
    """Zero every weight that was packed for a kernel of either phase."""
    weights = folder / "weights.bin"
    content = bytearray(weights.read_bytes())
    places = [place for name in ("prefill", "decode") for place in packed_places(folder / f"compiled-{name}.onnx")]
    assert places
    for offset, length in places:
        content[offset : offset + length] = bytes(length)
    weights.write_bytes(content)
    files = file_entries(folder, ["weights.bin"])
    change(folder, lambda manifest: replace(manifest, files=manifest.files | files))


def packed_places(graph: Path) -> list[tuple[int, int]]:
    """Offset and length of all that is packed for kernels, in the file of weights."""
    onnx = pytest.importorskip("onnx")
    places = []
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked"):
                numbers = [int(number) for number in entry.value.rpartition("|")[2].split(";")]
                places += list(zip(numbers[::3], numbers[1::3], strict=True))
    return places


# ----------------------------------------------------------------------------------------------------------- sharing


def test_every_content_is_in_the_file_once(compiled_bundle: Path):
    """The tied embedding is in both plain and both compiled graphs, and packed in both of those."""
    onnx = pytest.importorskip("onnx")
    places: dict[tuple[int, int], bytes] = {}
    weights = (compiled_bundle / "weights.bin").read_bytes()
    for name in ("prefill", "decode", "compiled-prefill", "compiled-decode"):
        for offset, length in packed_places(compiled_bundle / f"{name}.onnx"):
            places[offset, length] = weights[offset : offset + length]
        for tensor in onnx.load(compiled_bundle / f"{name}.onnx", load_external_data=False).graph.initializer:
            at = {entry.key: entry.value for entry in tensor.external_data}
            if at:
                assert at["location"] == "weights.bin"
                offset, length = int(at["offset"]), int(at["length"])
                places[offset, length] = weights[offset : offset + length]
    assert len(set(places.values())) == len(places) > 20


# --------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.vnni
def test_a_foreign_bundle_is_compiled_once(foreign: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    first = opened(foreign, monkeypatch)
    (entry,) = entries(root)
    assert first == [entry / "compiled-decode.onnx", entry / "compiled-prefill.onnx"]
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    assert opened(foreign, monkeypatch) == first


@pytest.mark.parametrize("file", ["weights.bin", "decode.onnx"])
def test_other_weights_or_graphs_are_compiled_anew(foreign: Path, root: Path, file: str):
    open_session(foreign, read_bundle(foreign), 1).close()
    manifest = read_bundle(foreign)
    if file == "weights.bin":
        with (foreign / file).open("ab") as end:
            end.write(b"other")
    else:
        graph = onnx.load(foreign / file, load_external_data=False)
        graph.doc_string = "other"
        onnx.save(graph, foreign / file)
    other = replace(manifest, files=manifest.files | file_entries(foreign, [file]))
    open_session(foreign, other, 1).close()
    assert len(entries(root)) == 2


def test_the_cache_is_bounded(foreign: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    old = root / "compiled" / "old"
    old.mkdir(parents=True)
    (old / "weights.bin").write_bytes(bytes(100))
    os.utime(old, (0, 0))
    monkeypatch.setenv("LLMC_CACHE_BYTES", "1")
    open_session(foreign, read_bundle(foreign), 1).close()
    assert not old.exists()
    assert len(entries(root)) == 1
    monkeypatch.setenv("LLMC_CACHE_BYTES", "8 GB")
    shutil.rmtree(root / "compiled")
    with pytest.raises(UsageError, match="LLMC_CACHE_BYTES is '8 GB', expected a number of bytes"):
        open_session(foreign, read_bundle(foreign), 1)


# ----------------------------------------------------------------------------------------------------- without it all


def refusing(runtime: object, graph: str, options: object) -> object:
    raise RuntimeError("Error in execution: graph.cc:5511 ToGraphProtoWithExternalInitializers")


def test_a_disk_that_fills_while_graphs_are_compiled_is_called_full(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The engine only says in which of its lines it failed."""
    monkeypatch.setattr(compiled, "inference_session", refusing)
    needed = round(compiled.COPIES * (foreign / "weights.bin").stat().st_size)
    copy = Path(shutil.copytree(foreign, tmp_path / "copy"))
    full = rf"the disk at /\S* is full: compiling decode\.onnx writes about {needed:,} bytes, {needed - 1:,} are free"
    other = r"compiling failed in ONNX Runtime \(.*graph\.cc:5511"
    for free, error, words in ((needed - 1, ResourceError, full), (needed, BundleError, other)):
        monkeypatch.setattr(compiled.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(error, match=words):
            compiled.compile_bundle(sessions.import_onnxruntime("1.23"), copy, ["decode.onnx"])
    monkeypatch.setattr(compiled.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(BundleError, match="loading failed in ONNX Runtime"):  # of the plain graphs, after all
        open_session(foreign, read_bundle(foreign), 1)
    assert "cannot be compiled (the disk at " in caplog.text


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit of an operator's name, so that the engine quotes what is no UTF-8."""
    content = bytearray(path.read_bytes())
    content[content.index(b"MatMul")] ^= 0x80
    path.write_bytes(content)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "this CPU lacks" not in message]


@pytest.mark.parametrize(
    ("spoiled", "spoil"),
    [
        ("compiled-decode.onnx", flip),
        ("compiled-decode.onnx", cut),
        ("weights.bin", cut),
        ("files.json", cut),
        ("files.json", Path.unlink),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_entry_is_thrown_away_and_made_anew_and_the_log_says_so_once(
    foreign: Path,
    root: Path,
    spoiled: str,
    spoil: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    good = opened(foreign, monkeypatch)
    (entry,) = entries(root)
    whole = (entry / spoiled).read_bytes()
    spoil(entry / spoiled)
    caplog.clear()
    assert opened(foreign, monkeypatch) == opened(foreign, monkeypatch) == good
    assert said(caplog) == [f"{entry / spoiled} is damaged; compiling the graphs for this machine, once"]
    assert (entry / spoiled).read_bytes() == whole


@pytest.mark.parametrize("spoil", [flip, cut])
def test_a_damaged_compiled_graph_in_the_bundle_is_made_anew_in_the_cache(
    compiled_bundle: Path,
    tmp_path: Path,
    root: Path,
    spoil: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    copy = Path(shutil.copytree(compiled_bundle, tmp_path / "copy"))
    path, manifest = copy / "compiled-decode.onnx", read_bundle(copy)
    spoil(path)
    monkeypatch.setattr(sys.modules[__name__], "read_bundle", lambda folder: manifest)  # it looked before that happened
    for _ in range(2):
        assert {graph.parent.parent.name for graph in opened(copy, monkeypatch)} == {"compiled"}
    assert said(caplog) == [f"{path} is damaged; compiling the graphs for this machine, once"]
    with pytest.raises(BundleError, match=r"compiled-decode.onnx (is corrupt|has)"):
        from llmc.runtime.model import verify

        verify(copy)
