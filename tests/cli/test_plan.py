"""``llmc plan``: every stage that lies ahead, what is missing, and what would fit."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.machines import NO_GPU, ORIN, RTX_4090, Probe

from llmc.runtime.bench.phases import ONE_MEMORY, Memories, find_memories
from llmc.runtime.host.machine import Available

MB = 1_000_000
# Norms, graphs and manifests are not counted; of a model with a small vocabulary they are the most.
DISK_TOLERANCE = 0.1


def stages(out: str) -> dict[str, dict]:
    return {phase["phase"]: phase for phase in json.loads(out)["phases"]}


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.bench.phases.memory_here", lambda: Available(64_000 * MB, "cgroup"))


@pytest.mark.usefixtures("roomy")
def test_a_checkpoint_has_three_stages_ahead_an_export_two_a_bundle_one(
    llmc, tiny_checkpoint: Path, tiny_export: Path, tiny_bundle: Path
):
    assert list(stages(llmc("plan", tiny_checkpoint, "--json").out)) == ["export", "build", "run"]
    assert list(stages(llmc("plan", tiny_export, "--json").out)) == ["build", "run"]
    assert list(stages(llmc("plan", tiny_bundle, "--json").out)) == ["run"]


@pytest.mark.usefixtures("roomy")
def test_a_bundles_plan_is_the_one_its_export_was_promised(llmc, tiny_export: Path, tiny_bundle: Path):
    promised = stages(llmc("plan", tiny_export, "--json", "--int8").out)["run"]
    built = stages(llmc("plan", tiny_bundle, "--json").out)["run"]
    assert built["parts"] == promised["parts"]
    assert built["total"] == sum(built["parts"].values())


@pytest.mark.usefixtures("roomy")
def test_bytes_on_disk_are_told_before_they_are_written(
    llmc, tiny_checkpoint: Path, tiny_export: Path, tiny_bundle: Path
):
    found = stages(llmc("plan", tiny_checkpoint, "--json", "--int8").out)
    written = sum(path.stat().st_size for path in tiny_bundle.iterdir())
    assert found["build"]["writes"] == pytest.approx(written, rel=DISK_TOLERANCE)
    assert found["build"]["precision"] == "int8"
    files = [path for path in tiny_export.iterdir() if path.suffix != ".safetensors"]
    small = sum(path.stat().st_size for path in files) - (tiny_export / "decoder.onnx").stat().st_size
    assert found["export"]["writes"] == pytest.approx(small, rel=DISK_TOLERANCE)
    out = llmc("plan", tiny_checkpoint).out
    assert re.search(r"^writes: export [\d.]+ [kM]B, bundle [\d.]+ [kM]B, precision int8$", out, re.M)
    assert "writes" not in llmc("plan", tiny_bundle).out


def test_a_bundle_with_an_engine_holds_its_weights_twice(llmc, tiny_export: Path):
    plans = [llmc("plan", tiny_export, "--json", "--fp16", "--target", name).out for name in ("cuda", "tensorrt")]
    once, twice = (stages(out)["build"]["writes"] - (tiny_export / "tokenizer.json").stat().st_size for out in plans)
    assert twice == 2 * once > 0


@pytest.mark.usefixtures("roomy")
def test_too_little_memory_is_told_before_the_export(llmc, tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("llmc.export.export", lambda *args, **options: pytest.fail("exported"))
    monkeypatch.setattr("llmc.runtime.bench.phases.EXPORTER", 1)  # so that less is enough than to build
    for memory, stage in (("5MB", "export"), ("100MB", "build")):
        ran = llmc("build", tiny_checkpoint, "-o", tmp_path / "bundle", "--memory", memory)
        assert (ran.code, list(tmp_path.iterdir())) == (1, [])
        assert ran.err.startswith(f"llmc: error: {tiny_checkpoint}: to {stage} it needs ")


@pytest.mark.usefixtures("roomy")
def test_the_table_shows_parts_peak_and_where_the_limit_comes_from(llmc, tiny_bundle: Path):
    ran = llmc("plan", tiny_bundle)
    assert (ran.code, ran.err) == (0, "")
    assert "run 2048 tokens x 1" in ran.out
    assert all(
        part in ran.out for part in ("engine", "tokenizer", "weights", "embedding", "cache", "workspace", "fits")
    )
    assert ran.out.endswith("available: 64.00 GB (cgroup)\n")
    assert llmc("plan", tiny_bundle, "--memory", "2GB").out.endswith("available: 2.00 GB (--memory)\n")


@pytest.mark.usefixtures("roomy")
def test_stages_are_planned_for_a_box_each(llmc, tiny_export: Path, tiny_bundle: Path):
    found = stages(llmc("plan", tiny_export, "--json", "--stages", "2").out)
    assert list(found) == ["build", "run stage 0", "run stage 1"]
    whole = stages(llmc("plan", tiny_export, "--json").out)["run"]
    weights = [found[f"run stage {number}"]["parts"]["weights"] for number in range(2)]
    assert [found[f"run stage {number}"]["layers"] for number in range(2)] == [[0, 3], [4, 5]]
    assert "run stage 1: layers 4 to 5, 2048 tokens x 1" in llmc("plan", tiny_export, "--stages", "2").out
    assert max(weights) < whole["parts"]["weights"] <= sum(weights)
    tight = found["run stage 0"]["total"]
    assert llmc("plan", tiny_export, "--stages", f"{tight},2GB").code == 0
    for boxes, code, said in ((f"{tight},1MB", 1, "one is larger than its box"), ("1GB", 2, "expected 2 to 6")):
        refused = llmc("plan", tiny_export, "--stages", boxes)
        assert refused.code == code and said in refused.err
    assert "is built already; precision, small, recipe, target and" in llmc("plan", tiny_bundle, "--stages", "2").err


def test_what_does_not_fit_exits_with_1_and_says_what_would(llmc, tiny_bundle: Path):
    needed = stages(llmc("plan", tiny_bundle, "--json", "--memory", "64GB").out)["run"]["total"]
    assert llmc("plan", tiny_bundle, "--memory", needed).code == 0
    ran = llmc("plan", tiny_bundle, "--json", "--memory", needed - 1)
    verdict = stages(ran.out)["run"]
    assert (ran.code, verdict["fits"], verdict["missing"]) == (1, False, 1)
    assert verdict["largest_context"] == 2047  # one position less
    assert ran.err.startswith(f"llmc: error: {tiny_bundle}: to run it needs ")
    assert "MB are missing. Advice: a context of 2047 tokens fits with a batch of 1: lower" in ran.err


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("options", [["--recipe", "int8-fast"], ["--int4"]], ids=str)
def test_a_plan_compares_two_graphs_with_one_where_that_is_a_choice(llmc, tiny_export: Path, options: list[str]):
    twice, once = (stages(llmc("plan", tiny_export, "--json", *options, *more).out) for more in ((), ("--small",)))
    sizes = [{"disk": it["build"]["writes"], "memory": it["run"]["total"]} for it in (twice, once)]
    assert twice["run"]["graphs"] == once["run"]["graphs"] == {"two graphs": sizes[0], "one graph": sizes[1]}
    assert sizes[1]["disk"] < sizes[0]["disk"] and sizes[1]["memory"] < sizes[0]["memory"]
    shown = llmc("plan", tiny_export, *options).out
    assert re.search(r"on disk +at its peak\ntwo graphs .*\none graph .*\n", shown)
    advice = "build with --small, which holds the weights once and takes "
    assert advice in llmc("plan", tiny_export, *options, "--memory", sizes[1]["memory"]).err
    assert advice not in llmc("plan", tiny_export, *options, "--memory", sizes[1]["memory"] - 1).err


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("options", [["--fp32"], ["--recipe", "int8-exact"]], ids=str)
def test_a_plan_of_what_has_one_graph_alone_compares_nothing(llmc, tiny_export: Path, options: list[str]):
    assert "graphs" not in stages(llmc("plan", tiny_export, "--json", *options).out)["run"]


def test_every_stage_that_does_not_fit_is_named(llmc, tiny_checkpoint: Path):
    ran = llmc("plan", tiny_checkpoint, "--memory", "1MB")
    assert ran.code == 1
    assert all(f"to {stage} it needs" in ran.err for stage in ("export", "build", "run"))
    advice = "no context or batch is small enough: free memory or use a smaller precision or model"
    assert ran.err.endswith(
        f"Advice to export: free memory or export on a larger machine; to build and to run: {advice}\n"
    )
    assert ran.err.count(advice) == 1


@pytest.mark.parametrize("size", ["", "0", "-1", "2ZB", "GB", "1e9", "1,5GB", "nan", "many", "1.GB"])
def test_a_size_that_is_none_is_wrong_usage(llmc, tiny_checkpoint: Path, size: str):
    ran = llmc("plan", tiny_checkpoint, f"--memory={size}")
    assert (ran.code, ran.out) == (2, "")
    assert "is no size, expected for example 2GB, 1.5GiB or 800MB" in ran.err


def test_more_than_a_bundle_was_built_for_is_wrong_usage(llmc, tiny_bundle: Path):
    for arguments, sentence in (
        (["--max-context", 2049], "--max-context is 2049, the bundle was built for 2048; build with a larger one"),
        (["--max-batch", 9], "--max-batch is 9, the bundle was built for 8; build with a larger one"),
        (["--int4"], "is built already; precision, small, recipe, target and stages are for an export or a checkpoint"),
    ):
        ran = llmc("plan", tiny_bundle, *arguments)
        assert ran.code == 2
        assert sentence in ran.err


@pytest.mark.parametrize("context", [1, 2049])
def test_more_than_the_checkpoint_allows_is_named_by_its_option(llmc, tiny_export: Path, tmp_path: Path, context: int):
    limit = f"{context}, expected 2 ... 2048, the max_position_embeddings of the checkpoint"
    planned = llmc("plan", tiny_export, "--max-context", context)
    assert (planned.code, planned.err) == (2, f"llmc: error: --max-context is {limit}\n")
    built = llmc("build", tiny_export, "-o", tmp_path / "out", "--max-context", context)
    assert (built.code, list(tmp_path.iterdir())) == (2, [])
    assert f"--max-context is {limit}; change it, or max_context in the recipe" in built.err


def test_a_bundle_is_planned_without_what_builds(tiny_bundle: Path):
    code = "import sys; sys.modules['onnx_ir'] = None; from llmc.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "plan", str(tiny_bundle), "--memory", "64GB", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(stages(ran.stdout)) == ["run"]


def test_an_export_that_does_not_fit_is_refused_before_it_begins(
    llmc, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmc.runtime.kv.budget.available_memory", lambda: 100 * MB)
    ran = llmc("export", tiny_checkpoint, "-o", tmp_path / "out")
    assert (ran.code, list(tmp_path.iterdir())) == (1, [])
    assert "to export it needs" in ran.err
    assert "MB are missing. Advice: free memory or export on a larger machine" in ran.err
    assert "precision" not in ran.err, "it does not shrink the exporter"


# ---------------------------------------------- GPUs that share the machine's memory: what CPU and GPU take is one sum

FREE = Available(5_000 * MB, "machine")
ORIN_FREE = Available(6_000 * MB, "Orin")
RTX_FREE = Available(24_000 * MB, "NVIDIA GeForce RTX 4090")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this a machine as a probe found it, with so much free memory."""

    def become(probe: Probe, free: Available = FREE) -> None:
        monkeypatch.setattr("llmc.runtime.bench.phases.memory_here", lambda: free)
        monkeypatch.setattr("llmc.runtime.host.probe.probe_driver", lambda: probe.driver)

    return become


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
    # More than building takes.
    order = ("plan", tiny_export, "--target", "tensorrt", "--fp16", "--max-batch", 32, "--json")
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
        assert "memory is for a GPU, and none is planned for; leave it out, or give a --target" in ran.err


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
