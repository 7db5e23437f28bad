"""The steps that need a GPU, on doubles of CUDA, ONNX Runtime's CUDA provider and TensorRT: each, and a whole run."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles import gpu
from doubles.cuda import SERVER, FakeDriver
from doubles.tensorrt import ComputeCapability

from llmc.bundle import read_bundle

SCRIPT = Path(__file__).parent / "doubled.py"
ROWS, CONTEXT = 8, 512
BUNDLE = "tensorrt-tiny-fp32"
Part = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def made(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model's export, and its bundle for TensorRT, in float32."""
    work = tmp_path_factory.mktemp("work")
    (work / "exports").mkdir()
    (work / "exports" / "tiny").symlink_to(tiny_export)
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch.setattr)
        from llmc.optimize import build

        limits: dict[str, Any] = {"max_context": CONTEXT, "max_batch": ROWS}
        build.build(tiny_export, work / BUNDLE, target="tensorrt", precision="fp32", **limits)
    return work


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Every driver that is opened, in order."""
    return gpu.install(monkeypatch.setattr)


@pytest.fixture
def asked(part: Part, made: Path, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a step about TensorRT is given; nothing takes long."""
    for module, name, value in [
        ("measure", "PROMPTS", (8, 40)),
        ("measure", "NEW_TOKENS", 4),
        ("measure", "STEPS", 2),
        ("measure", "ROUNDS", 2),
        ("correctness", "NEW_TOKENS", 4),
        ("correctness", "LONG_PROMPT", 40),
    ]:
        monkeypatch.setattr(part(module), name, value)
    return "tensorrt", "tiny", "fp32", part("steps").Options(made, None)


def test_an_engine_is_verified(part: Part, asked: tuple[Any, ...], drivers: list[FakeDriver]):
    found = part("correctness").verify(*asked)
    assert found["problems"] == [] and found["golden"]["equal_tokens"] == found["golden"]["tokens"] > 0
    assert found["engine_version"] == gpu.VERSION
    assert found["reference"].keys() == {"prefill", "decode"} and 0 < found["reference"]["decode"] < found["limit"]
    assert drivers[-1].calls["launch"] > 0 and all(driver.leaks == [] for driver in drivers)


def test_captured_steps_are_compared_with_plain_ones(
    part: Part, asked: tuple[Any, ...], drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
):
    determinism, launched = part("correctness"), []
    compare = determinism.graphs_apart

    def counted(*arguments: Any) -> Any:
        found = compare(*arguments)
        launched.append(drivers[-1].calls["launch"])
        return found

    monkeypatch.setattr(determinism, "graphs_apart", counted)
    found = determinism.determinism(*asked)
    assert found["problems"] == []
    assert [found["apart"][name] for name in ("graph A", "graph B", "graph A again", "prefill again")] == [0.0] * 4
    # Of the steps of one row and of all rows the first is run plainly, by what the session promises.
    assert determinism.STEPS < launched[0] <= 3 * determinism.STEPS - 2


def test_an_engine_is_timed_alone_in_a_batch_and_without_graphs(
    part: Part, asked: tuple[Any, ...], drivers: list[FakeDriver]
):
    found = part("measure").measure(*asked)
    assert [entry["prompt"] for entry in found["alone"]] == [8, 40]
    assert found["batch"]["rows"] == ROWS and found["weight_bytes"] > found["cache_bytes_per_position"] > 0
    assert found["captures"] >= 2 and found["step"]["p95_s"] >= found["step"]["p50_s"] >= found["step"]["best_s"] > 0
    assert found["device_bytes"] == {"loaded": 0, "after_runs": 0}  # each double has a memory of its own
    *_, with_graphs, _, without = drivers
    assert with_graphs.calls["launch"] > 0 and without.calls["launch"] == without.calls["begin_capture"] == 0
    assert found["step_without_graphs"]["p50_s"] > 0
    assert found["load_again_s"] > 0 and found["calls_again_s"].keys() == found["first_calls_s"].keys()
    assert all(driver.closed and driver.leaks == [] for driver in drivers)


def test_an_engine_is_timed_by_bucket(part: Part, asked: tuple[Any, ...], made: Path):
    found, engine = part("measure").buckets(*asked), read_bundle(made / BUNDLE).engine
    assert engine is not None and len(engine.buckets) > 1
    assert [step["positions"] for step in found["steps"]] == list(engine.buckets)
    low, high = (step["p50_s"] for step in (found["steps"][0], found["steps"][-1]))
    assert found["s_per_position"] == pytest.approx((high - low) / (engine.buckets[-1] - engine.buckets[0]))


def test_a_gpu_that_is_accepted_and_one_that_is_refused_are_both_a_result(
    part: Part, asked: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    from llmc.runtime.sessions.tensorrt import library as tensorrt

    found = part("kernels").refusal(*asked)
    assert (found["listed"], found["accepted"]) == (True, True)
    monkeypatch.setattr(tensorrt.load_library("tensorrt"), "refuses", "another version")
    found = part("kernels").refusal(*asked)
    assert (found["listed"], found["accepted"]) == (True, False) and "another version" in found["said"]


def test_of_a_gpu_that_it_does_not_list_the_library_itself_is_asked(
    part: Part, asked: tuple[Any, ...], made: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else the refusal would be llmc's own, and known before."""
    from llmc.runtime.sessions.tensorrt import library as tensorrt

    monkeypatch.setattr(tensorrt.load_library("tensorrt"), "ComputeCapability", ComputeCapability, raising=False)
    h200 = replace(SERVER, name="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(gpu, "FakeDriver", lambda: FakeDriver(h200))
    manifest = read_bundle(made / BUNDLE)
    assert manifest.engine is not None
    for_many = replace(manifest, engine=replace(manifest.engine, compute_capabilities=()))
    monkeypatch.setattr("llmc.runtime.model.read_bundle", lambda *_, **__: for_many)
    found = part("kernels").refusal(*asked)
    assert (found["listed"], found["accepted"]) == (False, False)
    assert "The engine cannot run on this GPU, which has compute capability 9.0" in found["said"]


# ------------------------------------------------------------------------------------------------------------ a driver


@pytest.fixture
def small(part: Part, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the step about the driver with small buffers."""
    monkeypatch.setattr(part("machine"), "COPY_BYTES", 1 << 16)
    return lambda: part("machine").driver(None)


def test_a_driver_copies_resizes_and_replays(small: Any, drivers: list[FakeDriver]):
    found = small()
    assert found["problems"] == [] and found["device"]["name"] == "NVIDIA L4" and found["buffer_bytes"] == 1 << 16
    rates = [found[name]["bytes_per_s"] for name in ("host_to_device", "on_device", "device_to_host", "resize")]
    assert min(rates) > 0 and len(found["launches_s"]) == 3
    assert drivers[0].calls["launch"] == 3 and drivers[0].closed and drivers[0].leaks == []
    assert drivers[0].copied["device", "host"] == 3 * 6 // 3 * (1 << 16) * 2  # six rounds of two copies


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("copy", "what came down differs"),
        ("copy_2d", "rows of the cache are not what they were"),
        ("launch", "recorded copies, launched as A, B, A"),
    ],
)
def test_a_driver_that_forgets_work_is_found_out(small: Any, monkeypatch: pytest.MonkeyPatch, broken: str, words: str):
    whole = FakeDriver.copy_2d
    if broken == "copy":  # which is made of the other
        monkeypatch.setattr(FakeDriver, "copy", lambda self, target, source, size, stream: whole(
            self, target, size, source, size, size - 1, 1, stream))  # fmt: skip
    else:
        if broken == "copy_2d":
            monkeypatch.setattr(FakeDriver, "copy", lambda self, target, source, size, stream: whole(
                self, target, size, source, size, size, 1, stream))  # fmt: skip
        monkeypatch.setattr(FakeDriver, broken, lambda self, *arguments: None)
    assert any(problem.startswith(words) for problem in small()["problems"])


def test_without_a_gpu_steps_that_need_one_are_not_run(part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from llmc.errors import GpuError
    from llmc.runtime.host import cuda

    def refuse() -> None:
        raise GpuError("no driver")

    monkeypatch.setattr(cuda, "open_driver", refuse)
    options = part("steps").Options(tmp_path, None)
    with pytest.raises(part("steps").NotHereError, match="no driver"):
        part("machine").driver(options)
    with pytest.raises(part("steps").NotHereError, match="no driver"):
        part("measure").measure("tensorrt-rtx", "tiny", "fp16", options)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------- a whole run


# All but the steps about one bundle and about one that does not build, and what needs no bundle.
LEFT_OUT = ["*/tensorrt/*", "*/1b/*", "*/tiny/int?", "*/0.5b/fp16", "*/0.5b/int4", "reference/*", "refusal/*"]
LEFT_OUT += ["baseline/[!1]*", *(f"{kind}/*/0.5b/*" for kind in ("verify", "determinism", "buckets", "kernels"))]
FEW_MINUTES = 0.2


@pytest.fixture(scope="module")
def runs(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path, Any]:
    """The file after each of two runs, of which the first ends in the middle; its path; how the second one ended."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(tiny_export)
    (folder / "models" / "0.5b").mkdir()
    (folder / "models" / "0.5b" / "export.json").write_text("{}")
    command = [sys.executable, str(SCRIPT), "--out", "x.json", "--models", "models"]
    command += [f"--skip={pattern}" for pattern in LEFT_OUT]
    files = []
    for minutes in ([f"--minutes={FEW_MINUTES}"], []):
        done = subprocess.run([*command, *minutes], capture_output=True, text=True, cwd=folder)
        files.append(json.loads((folder / "x.json").read_text()))
    return files, folder / "x.json", done


@pytest.fixture(scope="module")
def finished(runs: tuple[list[Any], Path, Any]) -> tuple[Path, Any]:
    """The file and the run that came to the end."""
    return runs[1:]


@pytest.mark.slow
def test_a_run_that_ends_in_the_middle_is_gone_on_with(runs: tuple[list[Any], Path, Any]):
    before, after = (document["steps"] for document in runs[0])
    assert before.keys() == after.keys()
    left = [name for name, step in before.items() if step["state"] == "not run"]
    assert left and any("time was" in before[name]["message"] for name in left)
    assert {name: step for name, step in before.items() if step["state"] == "done"}.items() <= after.items()
    assert [name for name in left if "time was" in after[name]["message"]] == []
    wrong = {name: after[name]["state"] for name in ("hang", "die", "rubbish")}
    assert wrong == {"hang": "timed out", "die": "crashed", "rubbish": "failed"}


@pytest.mark.slow
def test_a_whole_run_records_what_it_promises(finished: tuple[Path, Any]):
    steps = json.loads(finished[0].read_text())["steps"]
    tiny = {name: step for name, step in steps.items() if name.endswith("cuda/tiny/fp16")}
    assert {step["state"] for step in tiny.values()} == {"done"} and len(tiny) == 6
    results = {name.partition("/")[0]: step["result"] for name, step in tiny.items()}
    assert results["build"]["bytes"] > 5_000_000 and results["build"]["quality"]
    assert results["measure"]["captures"] > 0 and results["measure"]["step_without_graphs"]["p50_s"] > 0
    assert results["determinism"]["tokens"]["equal_again"] == 8
    assert results["kernels"].keys() == {"xqa", "without_xqa"}
    for found in results["kernels"].values():
        assert found["step"]["p50_s"] > 0 and found["operators"]["GroupQueryAttention"]["host_us"] > 0
    assert steps["driver"]["result"]["problems"] == []
    assert steps["baseline/1b"]["state"] == "not run"


@pytest.mark.slow
def test_what_fails_leaves_the_rest_of_a_whole_run_alone(finished: tuple[Path, Any]):
    steps, done = json.loads(finished[0].read_text())["steps"], finished[1]
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert steps["build/cuda/0.5b/int8"]["state"] == "failed"
    assert "export.json" in steps["build/cuda/0.5b/int8"]["message"]
    later = steps["measure/cuda/0.5b/int8"]  # which does not wait for the same again
    assert later["state"] == "not run" and later["message"].startswith("no bundle: ")


@pytest.mark.slow
def test_the_table_of_a_whole_run_follows_from_its_steps(
    finished: tuple[Path, Any], part: Part, monkeypatch: pytest.MonkeyPatch
):
    report = part("report")
    monkeypatch.setattr(report, "UNASKED", report.UNASKED - {"tiny"})  # as in that run
    document = json.loads(finished[0].read_text())
    lines = finished[1].stdout.splitlines()
    assert lines == report.markdown(document).splitlines() and lines[0].startswith("NVIDIA L4 ")
    row = next(line for line in lines if line.startswith("| cuda/tiny/fp16 | yes |"))
    step = document["steps"]["measure/cuda/tiny/fp16"]["result"]["step"]["p50_s"]
    assert f"| {step * 1e3:.2f} ms |" in row
