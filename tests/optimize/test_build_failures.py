"""A build that fails on the way says why in a sentence, leaves the old bundle alone and nothing of the new one."""

import errno
import io
import os
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import DECODER_FILE, WEIGHTS_FILE, write_manifest
from llmc.errors import BundleError, CheckpointError, LlmcError, ResourceError
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.weights.file import WeightFile

SHARD = "model.safetensors"


def set_weight(source: Path, name: str, value: float) -> None:
    """Write one weight of the export's checkpoint."""
    tensor = ir.load(source / DECODER_FILE).graph.initializers[name].const_value
    with (source / tensor.location).open("r+b") as file:
        file.seek(tensor.offset + 40)
        file.write(np.float32(value).tobytes())


def test_keys_beyond_float16_are_refused_with_the_cache_that_holds_them(source, untouched):
    set_weight(source, "model.layers.0.self_attn.k_proj.bias", 1e5)
    with pytest.raises(BundleError, match=r"NaN or infinite logits, .* build again, with cache = 'float32'"):
        build(BuildRequest(source, untouched, force=True))
    build(BuildRequest(source, source.parent / "exact", recipe=Request(cache="float32")))


@pytest.mark.parametrize("name", [SHARD, DECODER_FILE, "tokenizer.json"])
def test_a_missing_file_is_refused_by_name(source, untouched, name):
    (source / name).unlink()
    with pytest.raises(LlmcError) as refused:
        build(BuildRequest(source, untouched, force=True))
    assert name in str(refused.value)


@pytest.mark.threat("checkpoint-links")
def test_a_file_that_links_out_of_the_export_is_refused(source, untouched):
    (source / "chat_template.jinja").symlink_to(source.parent / "outside")
    (source.parent / "outside").write_text("PRIVATE KEY")
    with pytest.raises(CheckpointError, match=r"is a link to .*outside, outside its folder"):
        build(BuildRequest(source, untouched, force=True))


@pytest.mark.threat("weights-overwritten")
def test_weights_that_were_overwritten_in_the_checkpoint_are_refused(source, untouched):
    os.link(source / SHARD, source.parent / "of the checkpoint")
    set_weight(source, "model.norm.weight", 3.0)
    with pytest.raises(CheckpointError, match="were overwritten after the export"):
        build(BuildRequest(source, untouched, force=True))


STEPS = ["lowering and quantizing the prefill", "lowering and quantizing the decode", "hashing", "running the golden"]


@pytest.mark.parametrize("untouched", [False, True], ids=["nothing there", "an old bundle there"], indirect=True)
@pytest.mark.parametrize(
    ("step", "error"),
    [*((step, KeyboardInterrupt) for step in STEPS), (STEPS[0], MemoryError), (STEPS[3], RuntimeError)],
)
def test_an_interruption_at_any_step_leaves_what_was_there(source, untouched, step, error):
    def interrupt(name: str, fraction: float | None = None) -> None:
        if name.startswith(step):
            assert any(path.name.endswith(".work") for path in untouched.parent.iterdir())
            raise error

    with pytest.raises(error):
        build(BuildRequest(source, untouched, recipe=Request(phases="split"), force=True), interrupt)


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
    "manifest": lambda monkeypatch: monkeypatch.setattr("llmc.optimize.judge.finished.write_manifest", full),
    "flush": lambda monkeypatch: monkeypatch.setattr(os, "fsync", full),
}


@pytest.mark.parametrize("plant", FULL.values(), ids=FULL)
def test_a_full_disk_is_said_and_leaves_what_was_there(source, untouched, monkeypatch, plant):
    with monkeypatch.context() as patched:
        plant(patched)
        with pytest.raises(ResourceError, match="the disk is full; free some space and run again"):
            build(BuildRequest(source, untouched, force=True))


def test_a_manifest_that_cannot_be_written_whole_is_never_published(source, untouched, monkeypatch):
    """The first one is for the self-test only; the second one, with its results, fails."""
    calls = []

    def second_fails(manifest, folder):
        calls.append(folder)
        write_manifest(manifest, folder) if len(calls) == 1 else full()

    monkeypatch.setattr("llmc.optimize.judge.finished.write_manifest", second_fails)
    with pytest.raises(ResourceError):
        build(BuildRequest(source, untouched, force=True))
    assert len(calls) == 2
