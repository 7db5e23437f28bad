"""A build that fails says why in a sentence, leaves the old bundle as it was and nothing of the new one behind."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import DECODER_FILE, WEIGHTS_FILE, write_manifest
from llmc.errors import BuildError, BundleError, CheckpointError, LlmcError, ResourceError, UsageError
from llmc.optimize.build import build
from llmc.optimize.weights import WeightFile

SHARDS = "model.safetensors"


@pytest.fixture
def source(exported, tmp_path):
    """A copy of an export, to be broken."""
    return Path(shutil.copytree(exported("llama-biases").export, tmp_path / "in" / "export"))


@pytest.fixture
def output(tmp_path):
    """Where a bundle is to go: a folder that holds nothing else."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


@pytest.fixture(params=[False, True], ids=["nothing there", "an old bundle there"])
def old(request, source, output):
    """The output with an old bundle or nothing; afterwards it is compared with what it was."""
    if request.param:
        output.mkdir()
        (output / "llmc.json").write_text("the old one")
        (output / "decode.onnx").write_text("its graph")
    before = contents(output.parent)
    yield output
    assert contents(output.parent) == before


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files included."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# --------------------------------------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "tpu"}, "target 'tpu' is unknown; expected one of cpu"),
        ({"precision": "int3"}, "precision is 'int3', expected one of fp32, int8, int4"),
        ({"max_context": 129}, "max_context is 129, expected "),
        ({"max_context": -5}, "max_context is -5, expected "),
        ({"max_batch": 0}, "max_batch is 0, expected 1 ... 1024"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(source, old, options, sentence):
    with pytest.raises(UsageError) as refused:
        build(source, old, force=True, **options)
    assert sentence in str(refused.value)


def test_a_recipe_that_makes_no_sense_is_refused(source, old, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("block = 64\n")
    with pytest.raises(UsageError, match=r"mine\.toml: unknown key 'block'; did you mean 'block_size'"):
        build(source, old, force=True, recipe=recipe)


def test_an_output_that_exists_is_refused_without_force(source, output):
    for content in ("llmc.json", "something.else"):
        output.mkdir(exist_ok=True)
        (output / content).write_text("kept")
        before = contents(output.parent)
        with pytest.raises(UsageError, match=r"bundle exists; choose another output folder, or pass --force"):
            build(source, output)
        assert contents(output.parent) == before


def test_a_folder_of_somebody_else_is_refused_even_with_force(source, output):
    output.mkdir()
    (output / "thesis.tex").write_text("kept")
    with pytest.raises(UsageError, match="is not llmc's, so --force does not replace it"):
        build(source, output, force=True)
    assert contents(output.parent) == {"bundle": None, "bundle/thesis.tex": b"kept"}


def test_the_export_itself_is_no_output(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    for same in (source, tmp_path / "link"):
        with pytest.raises(UsageError, match="is the export itself; choose another output folder"):
            build(source, same, force=True)
    assert contents(source) == before


# --------------------------------------------------------------------------------------------------------- the export


def test_a_folder_that_is_no_export_is_refused(old, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "empty", tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(BundleError, match=f"{folder.name}: no export.json here, not written by llmc; make it with"):
            build(folder, old, force=True)


def change_manifest(source: Path, **changes: object) -> None:
    manifest = json.loads((source / "export.json").read_text())
    (source / "export.json").write_text(json.dumps(manifest | changes))


def test_an_export_of_a_newer_llmc_is_refused(source, old):
    change_manifest(source, schema_version=99, llmc_version="9.9")
    with pytest.raises(BundleError, match=r"schema version 99, written by llmc 9\.9; this llmc reads up to 1: upgrade"):
        build(source, old, force=True)


def test_an_export_of_another_graph_contract_is_refused(source, old):
    change_manifest(source, graph_contract=2)
    with pytest.raises(BundleError, match="follows graph contract 2, not 1; make it again with: llmc export"):
        build(source, old, force=True)


def test_a_corrupt_manifest_is_refused(source, old):
    (source / "export.json").write_text((source / "export.json").read_text()[:-20])
    with pytest.raises(BundleError, match=r"export\.json is corrupt"):
        build(source, old, force=True)


def set_weight(source: Path, name: str, value: float) -> None:
    """Write one weight of the export's checkpoint."""
    tensor = ir.load(source / DECODER_FILE).graph.initializers[name].const_value
    with (source / tensor.location).open("r+b") as file:
        file.seek(tensor.offset + 40)
        file.write(np.float32(value).tobytes())


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_weight_that_is_no_number_is_refused_by_name(source, old, name, precision):
    set_weight(source, name, float("nan"))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite weights"):
        build(source, old, precision=precision, force=True)


def test_a_truncated_shard_is_refused(source, old):
    os.truncate(source / SHARDS, (source / SHARDS).stat().st_size - 100)
    with pytest.raises(CheckpointError, match="the file is truncated, copy it again"):
        build(source, old, force=True)


@pytest.mark.parametrize("name", [SHARDS, DECODER_FILE, "tokenizer.json"])
def test_a_missing_file_is_refused_by_name(source, old, name):
    (source / name).unlink()
    with pytest.raises(LlmcError) as refused:
        build(source, old, force=True)
    assert name in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"not a graph", None], ids=["empty", "garbage", "half"])
def test_a_corrupt_graph_is_refused_by_name(source, old, content):
    whole = (source / DECODER_FILE).read_bytes()
    (source / DECODER_FILE).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(LlmcError) as refused:
        build(source, old, force=True)
    assert DECODER_FILE in str(refused.value)


def test_a_graph_of_other_shapes_than_the_manifest_is_refused(source, old):
    geometry = json.loads((source / "export.json").read_text())["geometry"]
    change_manifest(source, geometry=geometry | {"layers": 3, "windows": [0, 0, 0]})
    with pytest.raises(BuildError, match="pass 'raise linears' applied 15 times"):
        build(source, old, force=True)


# --------------------------------------------------------------------------------------------------- on the way


STEPS = ["lowering and quantizing the prefill", "lowering and quantizing the decode", "hashing", "running the golden"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom"), MemoryError()], ids=lambda error: type(error).__name__)
def test_an_interruption_at_any_step_leaves_what_was_there(source, old, step, error):
    def interrupt(name: str, fraction: float | None = None) -> None:
        if name.startswith(step):
            assert any(path.name.endswith(".staging") for path in old.parent.iterdir())
            raise error

    with pytest.raises(type(error)):
        build(source, old, force=True, progress=interrupt)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullDisk(io.FileIO):
    """A file on a disk that has room for 100,000 bytes."""

    def write(self, data: bytes) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > 100_000:
            full()
        return super().write(data)


def fill_weight_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = WeightFile.__init__

    def small(self: WeightFile, folder: Path) -> None:
        before(self, folder)
        self._file.close()
        self._file = FullDisk(folder / WEIGHTS_FILE, "wb")

    monkeypatch.setattr(WeightFile, "__init__", small)


FULL = {
    "weights": fill_weight_file,
    "graph": lambda monkeypatch: monkeypatch.setattr(ir, "save", full),
    "tokenizer": lambda monkeypatch: monkeypatch.setattr(shutil, "copyfile", full),
    "manifest": lambda monkeypatch: monkeypatch.setattr("llmc.optimize.build.write_manifest", full),
    "flush": lambda monkeypatch: monkeypatch.setattr(os, "fsync", full),
}


@pytest.mark.parametrize("plant", FULL.values(), ids=FULL)
def test_a_full_disk_is_said_and_leaves_what_was_there(source, old, monkeypatch, plant):
    with monkeypatch.context() as patched:
        plant(patched)
        with pytest.raises(ResourceError, match="the disk is full; free some space and run again"):
            build(source, old, force=True)


def test_a_manifest_that_cannot_be_written_whole_is_never_published(source, old, monkeypatch):
    """The first one is for the self-test only; the second one, with its results, fails."""
    calls = []

    def second_fails(manifest, folder):
        calls.append(folder)
        write_manifest(manifest, folder) if len(calls) == 1 else full()

    monkeypatch.setattr("llmc.optimize.build.write_manifest", second_fails)
    with pytest.raises(ResourceError):
        build(source, old, force=True)
    assert len(calls) == 2
