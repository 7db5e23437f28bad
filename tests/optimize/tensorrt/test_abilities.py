"""What each recorded version of TensorRT can do, found out without naming it."""

from dataclasses import asdict
from typing import Any

import pytest
from doubles.recorded import VERSIONS, RecordedLibrary

from llmc.optimize.tensorrt.abilities import abilities
from llmc.runtime.host.probe_steps import NATIVE


@pytest.mark.parametrize(
    ("version", "forms"),
    [
        ("10.3", ("primitives",)),
        ("10.13", ("primitives",)),
        ("10.16", ("native", "primitives")),
        ("11.4", ("native", "primitives")),
    ],
)
def test_forms_follow_the_interface(version: str, forms: tuple[str, ...]):
    assert abilities(RecordedLibrary(version)).forms == forms


def test_tensorrt_rtx_knows_all_forms_and_builds_for_gpus_by_name(rtx: Any):
    can = abilities(rtx)
    assert can.forms == ("native", "primitives")
    assert can.compute_capabilities
    assert not can.timing_cache


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_keeps_times_and_builds_for_its_own_gpu(version: str):
    can = abilities(RecordedLibrary(version))
    assert can.timing_cache
    assert not can.compute_capabilities


def test_what_came_later_is_missing_before():
    found = {version: asdict(abilities(RecordedLibrary(version))) for version in VERSIONS}
    since = {
        ability: next(version for version in VERSIONS if found[version][ability])
        for ability in ("stream_writer", "initializer_streaming")
    }
    assert since == {
        "stream_writer": "10.13",
        "initializer_streaming": "10.13",
    }


@pytest.mark.parametrize("part", NATIVE)
def test_one_missing_layer_leaves_primitives(part: str, monkeypatch: pytest.MonkeyPatch):
    library = RecordedLibrary("11.4")
    monkeypatch.delattr(library.INetworkDefinition, part)
    assert abilities(library).forms == ("primitives",)
