"""``llmc plan`` for GPUs that share the machine's memory: what CPU and GPU take is held against it together."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.machines import NO_GPU, ORIN, RTX_4090, Probe

from llmc.runtime.bench.stages import ONE_MEMORY, Memories, find_memories
from llmc.runtime.host.machine import Available

MB = 1_000_000
FREE = Available(5_000 * MB, "machine")
ORIN_FREE = Available(6_000 * MB, "Orin")
RTX_FREE = Available(24_000 * MB, "NVIDIA GeForce RTX 4090")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this a machine as a probe found it, with so much free memory."""

    def become(probe: Probe, free: Available = FREE) -> None:
        monkeypatch.setattr("llmc.runtime.bench.stages.memory_here", lambda: free)
        monkeypatch.setattr("llmc.runtime.host.probe.probe_driver", lambda: probe.driver)

    return become


def stages(out: str) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in json.loads(out)["stages"]}


def unknown(probe: Probe) -> Probe:
    """The same machine, whose driver does not say what is free."""
    [device] = probe.driver.devices
    driver = dataclasses.replace(probe.driver, devices=(dataclasses.replace(device, free_memory=None),))
    return dataclasses.replace(probe, driver=driver)


# ------------------------------------------------------------------------------------------------ one memory, or two


@pytest.mark.parametrize(
    ("probe", "given", "expected"),
    [
        (RTX_4090, (None, None, None), Memories(FREE, RTX_FREE, False)),
        (NO_GPU, (None, None, None), Memories(FREE, None, False)),
        (ORIN, (None, None, None), Memories(ORIN_FREE, ORIN_FREE, True)),
        (unknown(ORIN), (None, None, None), Memories(FREE, FREE, True)),
        (ORIN, (None, None, False), Memories(FREE, ORIN_FREE, False)),
        (NO_GPU, (None, None, True), Memories(FREE, FREE, True)),
        (RTX_4090, (None, None, True), Memories(FREE, FREE, True)),
    ],
)
def test_whether_memory_is_one_is_asked_of_the_gpu_unless_it_is_said(
    probed: Callable[..., None], probe: Probe, given: tuple[Any, Any, Any], expected: Memories
):
    probed(probe)
    assert find_memories(True, *given) == expected


# ----------------------------------------------------------------------------------------------------------- the sum


def test_a_sum_that_does_not_fit_is_refused_where_each_part_would(
    llmc: Any, tiny_export: Path, probed: Callable[..., None]
):
    probed(ORIN)
    order = (
        "plan",
        tiny_export,
        "--target",
        "tensorrt",
        "--fp16",
        "--max-batch",
        32,
        "--json",
    )  # more than building takes
    needed = stages(llmc(*order).out)[ONE_MEMORY]["total"]
    assert llmc(*order, "--gpu-memory", needed, "--unified-memory").code == 0
    ran = llmc(*order, "--gpu-memory", needed - 1, "--unified-memory")
    stage = stages(ran.out)[ONE_MEMORY]
    assert (ran.code, stage["fits"], stage["missing"]) == (1, False, 1)
    assert (stage["largest_context"], stage["largest_batch"]) == (2047, 31)
    assert f"to run in one memory it needs {-(-needed // MB)} MB" in ran.err
    assert "1 MB are missing" in ran.err
    assert "a context of 2047 tokens fits with a batch of 32" in ran.err
    assert "a batch of 31 fits with a context of 2048" in ran.err
    apart = stages(llmc(*order, "--memory", needed - 1, "--gpu-memory", needed - 1).out)
    assert apart["run"]["fits"]
    assert apart["run on the GPU"]["fits"]


@pytest.mark.parametrize("flags", [["--unified-memory"], ["--separate-memory"], ["--gpu-memory", "8GB"]])
def test_what_is_said_of_a_gpu_is_refused_where_none_is_planned_for(
    llmc: Any, tiny_export: Path, tiny_bundle: Path, flags: list[str]
):
    for path in (tiny_export, tiny_bundle):
        ran = llmc("plan", path, *flags)
        assert (ran.code, ran.out) == (2, "")
        assert f"{flags[0]} is for a GPU, and none is planned for; leave it out, or give a --target" in ran.err


def test_of_a_gpu_that_nobody_knows_nothing_is_said_to_fit(llmc: Any, tiny_export: Path, probed: Callable[..., None]):
    probed(NO_GPU)
    order = ("plan", tiny_export, "--target", "tensorrt", "--max-batch", 8)
    ran = llmc(*order, "--json")
    stage = stages(ran.out)["run on the GPU"]
    verdict = ("fits", "missing", "largest_context", "largest_batch")
    assert (ran.code, json.loads(ran.out)["gpu"], [stage[name] for name in verdict]) == (0, None, [None] * 4)
    assert stages(ran.out)["run"]["fits"]
    table = llmc(*order).out
    assert table.partition("run on the GPU")[2].count("not known whether it fits") == 1
    known = stages(llmc(*order, "--json", "--gpu-memory", "8GB").out)["run on the GPU"]
    assert (known["fits"], known["missing"], known["largest_context"], known["largest_batch"]) == (True, 0, 2048, 1024)
