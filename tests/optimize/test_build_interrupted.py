"""A build that calibrates: stopped anywhere it publishes nothing, and the next one goes on and ends the same."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.refusals import about

from llmc.errors import ResourceError, UsageError
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import BuildReport, build
from llmc.optimize.progress import Progress, silent
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.weights.store import Store

RECIPE = Request(
    precision="int4",
    scheme="gptq",
    block_size=32,
    symmetric=False,
    head="int8",
    smoothing=0.5,
    layers={"*.v_proj": "int8"},
    max_context=64,
)

# Bytes of an archive of two arrays that hold next to nothing; the activations of this text take 39,000.
A_STATE_WITHOUT_ACTIVATIONS = 1000


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Reads(StreamedDecoder):
    """Notes which layers are read."""

    layers: list[int] = []  # noqa: RUF012

    def layer(self, index: int) -> Any:
        self.layers.append(index)
        return super().layer(index)


@pytest.fixture
def reads() -> list[int]:
    """Layers that were read by any decoder since the test began."""
    Reads.layers.clear()
    return Reads.layers


@pytest.fixture
def start(tiny_export, tiny_checkpoint, tmp_path):
    """Builds the small model with calibration."""
    text = tiny_checkpoint.parent / "validation.txt"

    def run(recipe: Request = RECIPE, progress: Progress = silent, name: str = "bundle") -> BuildReport:
        calibration = {"decoder": Reads, "calibration": text, "samples": 2, "length": 32}
        return build(BuildRequest(tiny_export, tmp_path / "out" / name, recipe=recipe, **calibration), progress)

    return run


def interrupting(step: str, at: float) -> Progress:
    def progress(name: str, fraction: float | None = None, /) -> None:
        if name.startswith(step) and (fraction is None or fraction >= at):
            raise KeyboardInterrupt

    return progress


def test_a_build_that_is_stopped_publishes_nothing_and_the_next_one_goes_on(start, reads, tmp_path, own_cache):
    layers = 0
    for step, at in [("calibrating", 0.5), ("lowering", 0.5), ("hashing", 0)]:
        with pytest.raises(KeyboardInterrupt):
            start(progress=interrupting(step, at))
        assert not (tmp_path / "out").exists()
        assert reads == list(range(len(reads)))  # no layer is decided twice
        assert len(reads) >= layers
        layers = len(reads)
    resumed = start(name="resumed")
    assert reads == list(range(resumed.manifest.geometry.layers))
    [state] = (own_cache / "calibration").glob("*/state.npz")
    assert state.stat().st_size < A_STATE_WITHOUT_ACTIVATIONS
    Reads.layers.clear()
    again = start(name="again")
    assert reads == []
    assert again.manifest.files == resumed.manifest.files
    assert again.manifest.recipe.calibration == resumed.manifest.recipe.calibration
    assert resumed.manifest.recipe.calibration.text == "validation.txt"
    assert not resumed.manifest.recipe.calibration.default


def test_a_full_disk_in_calibration_is_said_and_publishes_nothing(start, reads, monkeypatch, tmp_path):
    write = Store.write

    def full(store: Store, part: str, arrays: Any) -> None:
        if part == "layer-001":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(store, part, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", full)
        with pytest.raises(ResourceError, match="the disk of the cache is full; free some"):
            start()
    assert not (tmp_path / "out").exists()
    reads.clear()
    start()
    assert reads[0] == 1


def test_a_pattern_that_matches_nothing_is_refused_before_calibration(start, reads, tmp_path):
    with pytest.raises(UsageError, check=about("layers.*.w_proj")):
        start(replace(RECIPE, layers={"*.w_proj": "int8"}))
    assert reads == []
    assert not (tmp_path / "out").exists()
