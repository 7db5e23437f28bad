"""The command line and bundles for GPUs: flags reach the library, contradictions do not, and numbers are shown."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from doubles.machines import NO_GPU, RTX_4090
from doubles.plans import FULL, plan_of

from llmc.bundle import EngineConfig, Manifest, Profile, Target, write_manifest
from llmc.cli.build import build_command
from llmc.errors import GpuError
from llmc.optimize.recipe.engine import EngineRequest
from llmc.publish import file_entries
from llmc.runtime.host.machine import Available

MB = 1_000_000
NOT_BUILT = {"file": ""}
MEMORY = plan_of(context=400 * MB, weights=50 * MB, workspace=30 * MB, cache_per_token=1 * MB, logits=2 * MB)
PLAN = dataclasses.replace(FULL, decode=Profile(4, 1, 1))


@pytest.fixture
def save(tmp_path: Path, manifest: Manifest) -> Callable[..., Path]:
    """Writes a bundle for TensorRT whose files hold nothing of use; changes are of the engine's plan."""

    def write(engine: EngineConfig | None = PLAN, target: str = "tensorrt", **changes: Any) -> Path:
        folder = tmp_path / "bundle"
        folder.mkdir()
        plan = dataclasses.replace(engine, **changes) if engine is not None else None
        names = ["decode.onnx"]
        names += [plan.file] if plan and plan.file else []
        for name in names:
            (folder / name).write_bytes(b"x" * 1000)
        there = Target(target, target, "10.16.1", "10.15")
        made = dataclasses.replace(
            manifest,
            target=there,
            engine=plan,
            device=MEMORY,
            files=file_entries(folder, names),
            limits=dataclasses.replace(manifest.limits, max_batch=4),
        )
        write_manifest(made, folder)
        return folder

    return write


# --------------------------------------------------------------------------------------------------------------- build


@pytest.mark.parametrize(("target", "precision"), [("cuda", "fp16"), ("tensorrt", "bf16"), ("tensorrt-rtx", "int8")])
def test_target_and_precision_reach_the_library(
    llmc: Any, library: Any, export_folder: Path, target: str, precision: str
):
    assert llmc("build", export_folder, "-o", "out", "--target", target, f"--{precision}").code == 0
    [built] = library.built
    assert (built["target"], built["precision"], built["engine"]) == (target, precision, None)


def test_every_choice_of_the_engine_reaches_the_library(llmc: Any, library: Any, export_folder: Path):
    options = ["--compute-capabilities", "8.6,8.9", "--deferred"]
    assert llmc("build", export_folder, "-o", "out", "--target", "tensorrt-rtx", *options).code == 0
    assert library.built[0]["engine"] == EngineRequest(compute_capabilities="8.6,8.9", deferred=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bf16", "--int8"], "--bf16 and --int8 contradict each other"),
        (["--target", "gpu"], "--target is 'gpu', expected one of cpu, cuda, tensorrt, tensorrt-rtx"),
        (
            ["--target", "tensorrt-rtx", "--deferred", "--compute-capabilities", "8.9"],
            "a deferred engine is for the GPU",
        ),
    ],
)
def test_contradictions_exit_with_2_and_one_sentence(
    llmc: Any, tiny_export: Path, tmp_path: Path, arguments: list[str], message: str
):
    ran = llmc("build", tiny_export, "-o", tmp_path / "out", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- rebuild


@pytest.mark.parametrize(
    ("arguments", "output", "force"),
    [([], None, True), (["-o", "elsewhere"], "elsewhere", False), (["-o", "elsewhere", "--force"], "elsewhere", True)],
    ids=["in place", "elsewhere", "over something"],
)
def test_a_rebuild_is_in_place_unless_it_is_told_where(
    llmc: Any, library: Any, export_folder: Path, arguments: list[str], output: str | None, force: bool
):
    ran = llmc("build", "--rebuild", export_folder, *arguments)
    there = Path(output) if output else export_folder
    assert (ran.code, ran.err) == (0, "")
    assert library.rebuilt == [{"source": export_folder, "output": there, "force": force}]
    assert library.built == []
    assert f"wrote {there}" in ran.out


VALUES = {"text": "notes.txt", "calibration": "notes.txt"}
LOOKED_AT = {"source", "output", "rebuild", "force", "as_json", "debug", "help"}


@pytest.mark.parametrize("option", [p for p in build_command.params if p.name not in LOOKED_AT], ids=lambda p: p.name)
def test_choices_that_a_rebuild_does_not_look_at_are_refused(
    llmc: Any, library: Any, export_folder: Path, tmp_path: Path, option: click.Option
):
    (tmp_path / "notes.txt").write_text("words")
    value = tmp_path / VALUES[option.name] if option.name in VALUES else "2"
    value = export_folder if option.name == "draft_head" else value
    flag = option.opts[-1]
    ran = llmc("build", "--rebuild", export_folder, flag, *([] if option.is_flag else [value]))
    assert (ran.code, library.rebuilt) == (2, [])
    assert f"{flag} means nothing to --rebuild, whose graph and options are the bundle's" in ran.err


# ------------------------------------------------------------------------------------------------------------- emulate


@pytest.mark.parametrize("flags", [[], ["--emulate"]], ids=["on its GPU", "emulated"])
def test_verify_says_what_it_was_verified_on(llmc: Any, library: Any, save: Callable[..., Path], flags: list[str]):
    folder = save()
    ran = llmc("verify", folder, *flags)
    assert library.verified == [{"bundle": folder, "threads": None, "emulate": bool(flags)}]
    assert ran.code == 0
    assert ("as far as the CPU can tell: the GPU was not used" in ran.out) == bool(flags)


@pytest.mark.parametrize("command", [["run", "-p", "Hello"], ["eval"]], ids=lambda c: c[0])
@pytest.mark.parametrize("flags", [[], ["--emulate"]], ids=["on its GPU", "emulated"])
def test_emulation_reaches_the_loader(
    llmc: Any, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, command: list[str], flags: list[str]
):
    asked = []

    def load(bundle: Path, **options: Any) -> None:
        asked.append(options["emulate"])
        raise GpuError("no NVIDIA driver was found")

    monkeypatch.setattr("llmc.runtime.load", load)
    verb, *rest = command
    ran = llmc(verb, save(), *rest, *flags)
    assert (ran.code, ran.err) == (1, "llmc: error: no NVIDIA driver was found\n")
    assert asked == [bool(flags)]


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setattr("llmc.runtime.bench.phases.memory_here", lambda: Available(64_000 * MB, "cgroup"))
    return lambda probe: monkeypatch.setattr("llmc.runtime.host.probe.probe_driver", lambda: probe.driver)


def gpu_stage(out: str) -> dict[str, Any]:
    found: dict[str, Any] = {phase["phase"]: phase for phase in json.loads(out)["phases"]}
    return dict(found["run on the GPU"])


@pytest.mark.parametrize("target", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_a_plan_for_a_gpu_has_a_stage_on_it(llmc: Any, tiny_export: Path, probed: Callable[[Any], None], target: str):
    probed(RTX_4090)
    ran = llmc("plan", tiny_export, "--target", target, "--max-context", 1024, "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert [phase["phase"] for phase in report["phases"]] == ["build", "run", "run on the GPU"]
    assert report["gpu"] == {"bytes": 24_000 * MB, "source": "NVIDIA GeForce RTX 4090"}
    parts = gpu_stage(ran.out)["parts"]
    assert parts["cache"] == 2 * 6 * 4 * 32 * 1024 * 2, "keys and values of 16 bits"
    assert parts["context"] == 500 * MB


def test_without_a_gpu_the_plan_says_so_and_fits(llmc: Any, tiny_export: Path, probed: Callable[[Any], None]):
    probed(NO_GPU)
    ran = llmc("plan", tiny_export, "--target", "tensorrt")
    assert (ran.code, ran.err) == (0, "")
    assert "run on the GPU 2048 tokens x 1" in ran.out
    assert ran.out.endswith("GPU: none can be asked here; say with --gpu-memory what the one has that it is for\n")
    assert json.loads(llmc("plan", tiny_export, "--target", "tensorrt", "--json").out)["gpu"] is None


def test_a_gpu_that_is_too_small_exits_with_1_and_numbers(llmc: Any, tiny_export: Path, probed: Callable[[Any], None]):
    probed(RTX_4090)
    order = ("plan", tiny_export, "--target", "tensorrt", "--fp16")
    needed = gpu_stage(llmc(*order, "--gpu-memory", "8GB", "--json").out)["total"]
    assert needed < gpu_stage(llmc(*order, "--json").out)["total"], "a large GPU has longer chunks"
    assert llmc(*order, "--gpu-memory", needed).code == 0
    ran = llmc(*order, "--gpu-memory", needed - 1, "--json")
    stage = gpu_stage(ran.out)
    assert (ran.code, stage["fits"], stage["missing"]) == (1, False, 1)
    assert stage["largest_context"] == 2047
    assert f"to run on the GPU it needs {-(-needed // MB)} MB" in ran.err
    assert "a context of 2047 tokens fits with a batch of 1" in ran.err
    assert f"GPU: {(needed - 1) / MB:.1f} MB (--gpu-memory)" in llmc(*order, "--gpu-memory", needed - 1).out


def test_a_bundles_plan_has_the_cache_that_its_engine_takes(
    llmc: Any, save: Callable[..., Path], probed: Callable[[Any], None]
):
    probed(NO_GPU)
    folder = save()
    stage = gpu_stage(llmc("plan", folder, "--max-context", 100, "--max-batch", 2, "--json").out)
    assert stage["context"] == 512, "the engine was built for one capacity"
    assert stage["parts"] == MEMORY.parts(512, 2)
    short = gpu_stage(llmc("plan", folder, "--gpu-memory", "800MB", "--json").out)
    assert (short["fits"], short["largest_context"], short["largest_batch"]) == (False, 0, 0)


# ------------------------------------------------------------------------------------------------------------- inspect


def rows(out: str) -> dict[str, str]:
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in out.splitlines()}


def test_inspect_shows_the_engine_in_words(llmc: Any, save: Callable[..., Path]):
    shown = rows(llmc("inspect", save()).out)
    assert shown["target"] == "tensorrt, tensorrt 10.16.1 (needs 10.15 or newer)"
    assert shown["engine"] == "engine.plan"
    assert shown["engine runs on"] == "linux-aarch64, compute capability 8.7"
    assert shown["computes in"] == "float16"
    assert shown["buckets"] == "256, 512 positions"
    assert shown["calls"] == "decode of 4 rows, prefill of 128 tokens with logits of 32"
    assert shown["verified"] == "its graph on the CPU; the engine itself has not been run"
    assert shown["GPU memory at 512 tokens x 1"] == (
        "994.0 MB = 400.0 MB context + 50.0 MB weights + 512.0 MB cache + 30.0 MB workspace + 2.0 MB logits"
    )
    assert {"compiler flags", "engine attention"}.isdisjoint(shown)
