"""The diagnosis of recorded machines: what each target would do there, why not, and what mends a bundle."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.machines import GB, GB10, H200, MISSING, NO_GPU, ORIN, RTX_4090, RTX_5090, THOR
from doubles.plans import PLAN

from llmc import bundle
from llmc.bundle import DeviceMemory, EngineConfig
from llmc.optimize.targets import TARGETS
from llmc.publish import file_entries
from llmc.runtime.diagnose.doctor import Machine, diagnose
from llmc.runtime.diagnose.targets import NEEDS, Outlook, outlook
from llmc.runtime.host.machine import Available
from llmc.runtime.host.probe import Probe
from llmc.runtime.host.probe_steps import Driver, Library

MACHINE = Machine("A processor", ("vnni",), 4, Available(16 * GB, "machine"))


def states(probe: Probe) -> dict[str, str]:
    return {target: outlook(target, probe).state for target in NEEDS}


def found(given: Outlook) -> str:
    return " | ".join(f"{obstacle.found}: {obstacle.remedy}" for obstacle in given.obstacles)


def with_library(probe: Probe, name: str, library: Library) -> Probe:
    return replace(probe, libraries=probe.libraries | {name: library})


# ------------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize(
    ("probe", "cpu", "cuda", "tensorrt", "tensorrt_rtx"),
    [
        (NO_GPU, "ready", "can build, not run", "can build with --deferred", "can build, not run"),
        (H200, "ready", "ready", "ready", "can build, not run"),
        (RTX_4090, "ready", "ready", "ready", "ready"),
        (RTX_5090, "ready", "ready", "ready", "ready"),
        (GB10, "ready", "can build, not run", "ready", "ready"),
        (ORIN, "can run, not build", "not possible", "not possible", "not possible"),
        (THOR, "ready", "can build, not run", "ready", "can build with --deferred"),
    ],
    ids=["no GPU", "H200", "RTX 4090", "RTX 5090", "GB10", "Orin", "Thor"],
)
def test_each_machine_has_its_targets(probe: Probe, cpu: str, cuda: str, tensorrt: str, tensorrt_rtx: str):
    assert states(probe) == {"cpu": cpu, "cuda": cuda, "tensorrt": tensorrt, "tensorrt-rtx": tensorrt_rtx}


def test_every_target_of_the_compiler_is_judged_by_the_same_minimum():
    assert {name: min(target.caches.values()) for name, target in TARGETS.items()} == {
        name: needs.minimum for name, needs in NEEDS.items()
    }


# -------------------------------------------------------------------------------------------------------------- drivers


def test_a_driver_too_old_for_a_library_is_told_with_both_versions():
    old = replace(H200, kernel_module="535.183.01", driver=replace(H200.driver, version="12.2"))
    assert (
        "tensorrt 11.4.0.106 is for CUDA 13, the driver (driver 535.183.01) serves 12.2: install the driver 580 or"
    ) in found(outlook("tensorrt", old))
    assert "cuda-bindings 13.5.0 is for CUDA 13, the driver serves CUDA 12.2: pip install 'cuda-bindings<13'" in (
        found(outlook("tensorrt", old))
    )


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("cuInit: CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"),
        ("cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "restart the machine"),
        ("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)", "end what fills the GPU's memory"),
        ("cuInit: CUDA_ERROR_UNKNOWN (999)", "restart the machine, then see that nvidia-smi works"),
    ],
)
def test_a_failing_driver_comes_with_what_to_do(problem: str, remedy: str):
    given = outlook("tensorrt", replace(H200, driver=Driver("failed", problem)))
    assert given.state == "can build with --deferred"
    assert f"the CUDA driver failed: {problem}: " in found(given) and remedy in found(given)


def test_a_container_without_its_gpus_is_recognised():
    inside = replace(H200, driver=NO_GPU.driver)
    expected = "there is NVIDIA's module 580.95.05, but no libcuda.so.1: start the container with --runtime nvidia"
    assert expected in found(outlook("cuda", inside))
    board = replace(ORIN, driver=NO_GPU.driver, kernel_module=None)
    assert "there is a Jetson, but no libcuda.so.1" in found(outlook("tensorrt", board))


def test_cuda_bindings_that_cannot_start_are_an_obstacle():
    broken = with_library(H200, "cuda-bindings", Library("ok", "cuInit: CUDA_ERROR_UNKNOWN", "13.5.0", "13", ()))
    assert "cuda-bindings cannot be used: cuInit: CUDA_ERROR_UNKNOWN" in found(outlook("tensorrt", broken))
    absent = with_library(H200, "cuda-bindings", MISSING)
    assert "cuda-bindings is not installed: pip install 'tensorrt-rtx>=" in found(outlook("tensorrt-rtx", absent))


# ------------------------------------------------------------------------------------------------------------ libraries


def test_the_package_without_cuda_is_to_be_exchanged():
    given = outlook("cuda", with_library(H200, "onnxruntime", NO_GPU.libraries["onnxruntime"]))
    assert (
        "onnxruntime 1.31.1 is the package without CUDA: pip uninstall -y onnxruntime; pip install 'onnxruntime-gpu>="
        in (found(given))
    )
    assert given.state == "can build, not run"


def test_a_cuda_provider_that_does_not_load_is_told_with_its_reason():
    library = Library("ok", "libcublasLt.so.13 is missing", "1.31.1", "13", ("CUDAExecutionProvider",))
    given = outlook("cuda", with_library(H200, "onnxruntime", library))
    assert "ONNX Runtime cannot load its CUDA provider: libcublasLt.so.13 is missing" in found(given)


@pytest.mark.parametrize(
    ("target", "library", "command"),
    [
        ("cpu", "onnxruntime", "pip install 'onnxruntime>="),
        ("cuda", "onnxruntime", "pip install 'onnxruntime-gpu>="),
        ("tensorrt-rtx", "tensorrt-rtx", "pip install 'tensorrt-rtx>="),
        ("tensorrt", "tensorrt", "tensorrt-cu13"),
    ],
)
def test_a_missing_library_comes_with_its_command(target: str, library: str, command: str):
    given = outlook(target, with_library(H200, library, MISSING))
    assert given.obstacles[0].found == f"{library} is not installed"
    assert command in given.obstacles[0].remedy


@pytest.mark.parametrize("state", ["failed", "crashed", "hung"])
def test_a_broken_library_blocks_its_target_only(state: str):
    broken = with_library(H200, "tensorrt", Library(state, "ended by SIGSEGV"))
    assert states(broken) == states(H200) | {"tensorrt": "can build with --deferred"}
    assert f"tensorrt {state}: ended by SIGSEGV: uninstall it, then pip install" in found(outlook("tensorrt", broken))


def test_a_library_that_is_too_old_is_told_with_the_oldest():
    old = with_library(H200, "tensorrt", Library("ok", "", "10.0.1", "12", ("runtime", "builder")))
    assert "tensorrt is 10.0.1, 10.15 is the oldest for this target: pip install -U" in found(outlook("tensorrt", old))
    jetson = with_library(ORIN, "tensorrt", Library("ok", "", "8.6.2", "", ("runtime", "builder")))
    assert "JetPack 7.2 or newer" in found(outlook("tensorrt", jetson))


@pytest.mark.parametrize("target", ["cpu", "tensorrt", "tensorrt-rtx"])
def test_what_judges_is_installed_where_it_can_be(target: str):
    bare = with_library(NO_GPU, "onnxruntime", MISSING)
    assert "which judges; none is installed: pip install 'onnxruntime>=" in found(outlook(target, bare))
    old = replace(bare, python="3.10.12")
    assert "which judges; none is installed: pip" not in found(outlook(target, old))


# -------------------------------------------------------------------------------------------------------------- Jetsons


def test_a_jetson_hears_that_tensorrt_is_its_systems():
    hidden = with_library(THOR, "tensorrt", MISSING)
    assert "JetPack 7.2 or newer" in outlook("tensorrt", hidden).obstacles[0].remedy


# -------------------------------------------------------------------------------------------------------------- bundles

MEMORY = DeviceMemory(context=400, weights=1000, workspace=64, cache_per_token=16, logits=30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine.plan").write_bytes(b"engine")
    (tmp_path / "decode.onnx").write_bytes(b"graph")
    return tmp_path


def write(folder: Path, manifest: bundle.Manifest, plan: EngineConfig | None = PLAN, **changes: object) -> Path:
    """A bundle for TensorRT 11.4 on an RTX 4090, with ``changes`` to its manifest."""
    made = dataclasses.replace(
        manifest,
        files=file_entries(folder, ["engine.plan", "decode.onnx"]),
        target=bundle.Target("tensorrt", "tensorrt", "11.4.0.106", "10.15"),
        engine=plan,
        device=MEMORY,
        cache="float16",
    )
    bundle.write_manifest(dataclasses.replace(made, **changes), folder)  # type: ignore[arg-type]
    return folder


def judged(folder: Path, probe: Probe = RTX_4090) -> tuple[str, str]:
    """Reasons and remedy."""
    given = diagnose(probe, MACHINE, folder).bundle
    assert given is not None
    return " | ".join(given.reasons), given.remedy


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (RTX_5090, "its engine is for compute capability 8.9, NVIDIA GeForce RTX 5090 has 12.0"),
        (
            with_library(RTX_4090, "tensorrt", replace(H200.libraries["tensorrt"], version="11.3.0.99")),
            "its engine was built by tensorrt 11.4.0.106, 11.3.0.99 is installed",
        ),
        (replace(RTX_4090, platform="linux-aarch64"), "its engine was built for linux-x86_64, this is linux-aarch64"),
    ],
)
def test_an_engine_of_another_machine_is_rebuilt(folder: Path, manifest: bundle.Manifest, probe: Probe, reason: str):
    reasons, remedy = judged(write(folder, manifest), probe)
    assert reasons == f"{reason}: llmc build --rebuild {folder}"
    assert remedy == f"llmc build --rebuild {folder}"


def test_too_little_memory_on_the_gpu_is_told(folder: Path, manifest: bundle.Manifest):
    heavy = replace(MEMORY, weights=30 * GB)
    reasons, _ = judged(write(folder, manifest, device=heavy))
    assert "it needs 30000 MB of the GPU's memory for one row of 512 positions, 24000 MB of NVIDIA GeForce" in reasons


def test_an_engine_library_that_is_too_old_for_the_bundle_is_told(folder: Path, manifest: bundle.Manifest):
    later = bundle.Target("tensorrt", "tensorrt", "11.4.0.106", "12.0")
    reasons, remedy = judged(write(folder, manifest, target=later))
    assert "it needs tensorrt 12.0, 11.4.0.106 is installed" in reasons
    assert remedy.startswith("pip install -U")


def test_a_bundle_for_the_cpu_is_judged_by_its_features(
    folder: Path, manifest: bundle.Manifest, monkeypatch: pytest.MonkeyPatch
):
    cpu = bundle.Target("cpu", "onnxruntime", "1.31.1", "1.23")
    write(folder, manifest, None, target=cpu, device=None, cache="float32")
    monkeypatch.setattr("llmc.runtime.host.machine.cpu_features", lambda: frozenset({"vnni"}))
    assert judged(folder, NO_GPU) == ("", "")
    monkeypatch.setattr("llmc.runtime.host.machine.cpu_features", frozenset)
    reasons, _ = judged(folder, NO_GPU)
    assert "vnni" in reasons


def test_a_corrupt_bundle_is_a_reason_and_no_failure(folder: Path, manifest: bundle.Manifest):
    write(folder, manifest)
    (folder / "engine.plan").write_bytes(b"short")
    reasons, remedy = judged(folder)
    assert "engine.plan has 5 bytes, 6 expected" in reasons
    assert remedy == f"llmc build --rebuild {folder}"
    (folder / "decode.onnx").write_bytes(b"no")
    reasons, remedy = judged(folder)
    assert remedy == "llmc build CHECKPOINT -o BUNDLE"


def test_whatever_judging_a_bundle_raises_is_a_reason(
    folder: Path, manifest: bundle.Manifest, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> None:
        raise OverflowError("int too large")

    monkeypatch.setattr("llmc.runtime.diagnose.doctor.check_load", fail)
    assert judged(write(folder, manifest)) == ("OverflowError: int too large", "llmc build CHECKPOINT -o BUNDLE")


def test_a_bundle_that_cannot_run_here_can_be_emulated(folder: Path, manifest: bundle.Manifest):
    write(folder, manifest)
    given = [diagnose(probe, MACHINE, folder).bundle for probe in (NO_GPU, ORIN, RTX_4090)]
    assert given[0] is not None and given[0].instead.startswith(f"llmc run {folder} --emulate, which")
    assert [each is not None and each.instead for each in given[1:]] == ["", ""]  # an old ONNX Runtime; it runs
