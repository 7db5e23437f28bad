"""What TensorRT's builder measured is kept for the next build, against the recorded interface of 10.16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.engines import build_decoder, spec_of
from doubles.plans import PLAN
from doubles.recorded import TIMED, TIMED_ELSEWHERE, RecordedLibrary

from llmc.bundle import EngineConfig
from llmc.errors import BuildError
from llmc.optimize.tensorrt import timings as module
from llmc.runtime.host.probe import Device
from llmc.runtime.sessions.tensorrt.library import logger

NANO = Device(0, "Orin Nano", "8.7", 8 << 30, None, True)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / module.KIND


def begun_with(decoder: Path, config: EngineConfig, **library: Any) -> list[bytes]:
    """The timings that a build begins with: those of earlier builds, then those of none where these are refused."""
    recorded = RecordedLibrary(**library)
    build_decoder(recorded, decoder, config)
    return [content for (content,) in recorded.arguments("IBuilderConfig", "create_timing_cache")]


def test_a_build_begins_with_the_timings_of_earlier_ones(decoder, config):
    assert begun_with(decoder, config) == [b""]
    assert begun_with(decoder, config) == [TIMED + b"."]
    assert begun_with(decoder, config) == [TIMED + b".."]


def test_a_build_that_fails_leaves_its_timings(decoder, config):
    with pytest.raises(BuildError):
        begun_with(decoder, config, builds=False)
    assert begun_with(decoder, config) == [TIMED + b"."]


@pytest.mark.parametrize("content", [b"\0" * 100, TIMED_ELSEWHERE])
def test_timings_that_are_damaged_or_of_another_gpu_are_ignored_and_replaced(decoder, config, kept, caplog, content):
    begun_with(decoder, config)
    (file,) = kept.glob("*/*")
    assert "ignored" not in caplog.text
    file.write_bytes(content)
    with caplog.at_level("INFO", logger=module.__name__):
        assert begun_with(decoder, config)[0] == content
    assert f"{file} is damaged, or not for this GPU and driver: it is ignored" in caplog.text
    assert file.read_bytes() == TIMED + b"."


def test_timings_belong_to_a_version_a_platform_and_a_gpu():
    spec = replace(spec_of(RecordedLibrary(), PLAN), gpu=NANO)
    others = [
        replace(spec, version="10.17.0"),
        replace(spec, config=replace(PLAN, platform="linux-aarch64")),
        replace(spec, gpu=replace(NANO, name="Orin NX")),
        replace(spec, gpu=replace(NANO, compute_capability="11.0")),
        replace(spec, gpu=None),
    ]
    assert len({module.timings_file(each) for each in (spec, *others)}) == 1 + len(others)
    assert module.timings_file(replace(spec, gpu=replace(NANO, total_memory=1))) == module.timings_file(spec)


def test_tensorrt_rtx_which_measures_nothing_is_given_none(rtx, decoder, config, kept):
    native = rtx.Builder(logger(rtx).native).create_builder_config()
    with pytest.warns(DeprecationWarning, match="Timing cache operations are no-ops"):
        native.get_timing_cache()
    build_decoder(rtx, decoder, config)
    assert not kept.exists()
