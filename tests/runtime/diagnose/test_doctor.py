"""The diagnosis: each target is tried in a process of its own, whose crash is a finding; and so is a bundle."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.errors import GpuError
from llmc.optimize.targets import TARGETS
from llmc.runtime.diagnose import attempts
from llmc.runtime.diagnose.doctor import Attempt, judge_bundle, judge_target, read_release, try_apart
from llmc.runtime.host.apart import command
from llmc.runtime.host.cuda import DeviceInfo

# A machine busy with other tests may take this long for a process.
PATIENCE_S = 120.0
HERE, LACKS = Attempt(True, "here"), Attempt(False, "it is missing; install it")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Modules that the attempts import in place of the installed ones."""

    def write(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return write


def attempt(name: str) -> Attempt:
    return try_apart({name: command("llmc.runtime.diagnose.attempts:attempt", name)}, PATIENCE_S)[name]


def test_a_library_that_crashes_or_lacks_a_part_of_itself_is_told(modules):
    modules(
        tensorrt=f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})",
        tensorrt_rtx="print('banner', flush=True)\nraise ImportError('libnvonnxparser.so.11: cannot open')",
    )
    assert attempt("tensorrt builder") == Attempt(False, "ended by SIGSEGV")
    broken = attempt("tensorrt-rtx builder")
    assert not broken.works and "is installed and cannot be loaded" in broken.message
    assert "libnvonnxparser.so.11" in broken.message and "banner" not in broken.message


def test_attempts_import_nothing_from_the_folder_that_the_command_runs_in(tmp_path, monkeypatch):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    assert "a file of the user" not in attempt("tensorrt builder").message


def test_a_builder_of_tensorrt_rtx_needs_no_gpu():
    library = pytest.importorskip("tensorrt_rtx")
    assert attempt("tensorrt-rtx builder") == Attempt(True, f"tensorrt-rtx {library.__version__}")


def test_the_graph_that_is_tried_is_one():
    import onnxruntime

    options = {"providers": ["CPUExecutionProvider"]}
    assert onnxruntime.InferenceSession(attempts.IDENTITY, **options).run(None, {"x": [1.0]})[0].tolist() == [1.0]


def test_a_gpu_that_the_library_does_not_list_and_precisions_that_it_lacks_are_named(monkeypatch):
    class Opened:
        device = DeviceInfo("Tesla T4", "7.5", 8, True, "13.2")

    monkeypatch.setattr(attempts, "open_driver", Opened)
    library = type("Library", (), {"__version__": "10.16", "Runtime": None})
    monkeypatch.setattr(attempts, "load_library", lambda target: library)
    monkeypatch.setattr(attempts, "make_object", lambda library, make: None)
    assert attempts.open_engine("tensorrt").endswith(
        "Tesla T4 (7.5), driver for CUDA 13.2; no bf16 (from 8.0 on), int4 (from 8.0 on)"
    )
    monkeypatch.setattr(attempts, "lists_gpu", lambda library, capability: False)
    with pytest.raises(GpuError, match=r"tensorrt 10\.16 does not list the GPU Tesla T4"):
        attempts.open_engine("tensorrt")


@pytest.mark.parametrize(
    ("run", "lowering", "builder", "cpu", "tensorrt"),
    [
        (HERE, HERE, HERE, "ready", "ready"),
        (LACKS, HERE, HERE, "can build, not run", "can build, not run"),
        (LACKS, HERE, LACKS, "can build, not run", "can build with --deferred"),
        (HERE, HERE, LACKS, "ready", "can run, and build with --deferred"),
        (HERE, LACKS, HERE, "can run, not build", "can run, not build"),
        (LACKS, LACKS, LACKS, "not possible", "not possible"),
    ],
)
def test_each_target_has_a_state(run, lowering, builder, cpu, tensorrt):
    found = {"cpu": run, "tensorrt": run, "lowering": lowering, "tensorrt builder": builder}
    assert (judge_target("cpu", found).state, judge_target("tensorrt", found).state) == (cpu, tensorrt)


def test_every_target_of_the_compiler_is_judged_by_the_same_minimum():
    assert {name: min(TARGETS[name].caches.values()) for name in attempts.MINIMUM} == attempts.MINIMUM


def test_a_jetson_is_known_by_its_release(tmp_path):
    file = tmp_path / "nv_tegra_release"
    assert read_release(file) == ""
    file.write_text("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n")
    assert read_release(file) == "36.4.3"


def test_a_bundle_is_loaded_and_what_refuses_it_is_told(tiny_bundle, tmp_path):
    assert judge_bundle(tiny_bundle).works
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in tiny_bundle.iterdir():
        os.link(file, copy / file.name)
    weights = next(copy.glob("*.bin"))
    weights.unlink()
    refused = judge_bundle(copy)
    assert not refused.works and f"{weights.name} is missing" in refused.message
