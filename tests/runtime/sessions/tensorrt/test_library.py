"""Finding TensorRT and TensorRT-RTX, and listening to what they log."""

import builtins
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles.cuda import FakeDriver
from doubles.recorded import VERSIONS, RecordedLibrary, replaced
from doubles.tensorrt import FakeTensorRT

from llmc.errors import GpuError, MissingExtraError, UsageError
from llmc.runtime.host.probe_steps import Library
from llmc.runtime.sessions.tensorrt import library as engine_library
from llmc.runtime.sessions.tensorrt.library import (
    Log,
    Message,
    library_version,
    load_library,
    logger,
    made,
)

TOO_OLD = r"llmc needs 10\.3 or later"
BROKEN = r"tensorrt is installed and cannot be loaded \(.*\): uninstall all packages of that library, .* install it: on"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module where ``import tensorrt`` finds it."""

    def install(library: Any, name: str = "tensorrt") -> None:
        monkeypatch.setitem(sys.modules, name, library)

    return install


@pytest.fixture
def fresh() -> Iterator[None]:
    """``import tensorrt`` looks for a file, whether or not it was imported before."""
    before = sys.modules.pop("tensorrt", None)
    yield
    sys.modules.pop("tensorrt", None)
    if before is not None:
        sys.modules["tensorrt"] = before


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_version_is_new_enough(version: str, installed: Callable[..., None]):
    library = RecordedLibrary(version)
    installed(library)
    assert load_library("tensorrt") is library
    assert library_version(library).startswith(version)


def test_an_engine_without_a_library_is_refused():
    with pytest.raises(UsageError, match=r"'onnxruntime' has no library .*; expected tensorrt or tensorrt-rtx"):
        load_library("onnxruntime")


@pytest.mark.parametrize(
    ("engine", "module", "advice"),
    [
        ("tensorrt", "tensorrt", r"on a Jetson it comes with JetPack .*elsewhere pip install --extra-index-url"),
        ("tensorrt-rtx", "tensorrt_rtx", r"pip install 'tensorrt-rtx>=1.7' 'cuda-bindings"),
    ],
)
def test_a_missing_library_says_what_to_install(engine: str, module: str, advice: str, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    without = (
        "without it llmc verify, run and eval --emulate compute on the CPU, and llmc build of an export --deferred"
    )
    with pytest.raises(MissingExtraError, match=f"{module} is not installed: {advice}.*; {without}"):
        load_library(engine)


@pytest.mark.parametrize(
    ("engine", "module", "version"), [("tensorrt", "tensorrt", "10.2.0"), ("tensorrt", "tensorrt", "8.6.1")]
)
def test_a_library_too_old_is_refused(engine: str, module: str, version: str, installed: Callable[..., None]):
    old = ModuleType(module)
    old.__version__ = version
    installed(old, module)
    with pytest.raises(GpuError, match=rf"{module} {version} is installed, llmc needs 10\.3 or later: .*JetPack"):
        load_library(engine)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libnvonnxparser.so.11: cannot open shared object file"),
        ModuleNotFoundError("No module named 'tensorrt_libs'", name="tensorrt_libs"),
        OSError("libcudart.so.13: cannot open shared object file"),
        ModuleNotFoundError("No module named 'tensorrt.tensorrt'", name="tensorrt.tensorrt"),
        RuntimeError("CUDA is not what it was"),
    ],
)
def test_a_broken_installation_is_told_from_a_missing_one(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(GpuError, match=BROKEN):
        load_library("tensorrt")


def test_a_folder_that_an_uninstalled_library_left_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
):
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GpuError, match=BROKEN) as caught:
        load_library("tensorrt")
    assert f"({tmp_path}/tensorrt holds no code)" in str(caught.value)


def test_a_library_that_lacks_a_part_is_broken(installed: Callable[..., None]):
    library = RecordedLibrary("10.3")
    del library.HardwareCompatibilityLevel
    installed(library)
    with pytest.raises(GpuError, match=r"\(it has no HardwareCompatibilityLevel\): uninstall"):
        load_library("tensorrt")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"\(importing it crashed: ended by SIGSEGV\)"),
        ("import time; time.sleep(600)", r"\(importing it hung: no answer within 0\.5 s\)"),
        ("raise SystemExit(3)", r"\(importing it crashed: ended with exit code 3\)"),
        ("raise RuntimeError('broken')", r"\(RuntimeError: broken\)"),
    ],
    ids=["crash", "hang", "exit", "error"],
)
def test_what_importing_a_broken_library_does_is_an_error_and_no_more(
    source: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
):
    (tmp_path / "tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in source:
        monkeypatch.setattr(engine_library, "TIMEOUT_S", 0.5)
    for _ in range(2):  # nothing is remembered of it
        with pytest.raises(GpuError, match=match):
            load_library("tensorrt")


def test_a_library_is_tried_apart_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None):
    tried: list[str] = []

    def watched(module: str, timeout_s: float) -> Library:
        tried.append(module)
        return Library("ok", "")

    monkeypatch.setattr(engine_library, "try_import", watched)
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tensorrt.py"
    for version, times in (("8.6", 3), ("9.0.1", 2)):
        file.write_text(f"__version__ = {version!r}")
        monkeypatch.syspath_prepend(tmp_path)
        for _ in range(times):
            with pytest.raises(GpuError, match=TOO_OLD):
                load_library("tensorrt")
            sys.modules.pop("tensorrt")
    assert tried == ["tensorrt", "tensorrt"]


def test_a_cache_that_cannot_be_written_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    (tmp_path / "tensorrt.py").write_text("__version__ = '8.6'")
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GpuError, match=TOO_OLD):
        load_library("tensorrt")


# ------------------------------------------------------------------------------------------------------- logging


def test_a_library_has_one_logger():
    library = RecordedLibrary("10.3")
    assert logger(library) is logger(library)
    assert logger(library) is not logger(RecordedLibrary("10.3"))


def test_warnings_and_errors_are_collected_until_the_block_ends():
    library = RecordedLibrary("11.4")
    severity, native = library.ILogger.Severity, logger(library)
    native.native.log(severity.ERROR, "before")
    with native.collected() as outer:
        native.native.log(severity.WARNING, "odd")
        with native.collected() as inner:
            native.native.log(severity.INTERNAL_ERROR, "broken")
            native.native.log(severity.INFO, "by the way")
            native.native.log(severity.VERBOSE, "in detail")
        native.native.log(severity.ERROR, "after")
    native.native.log(severity.ERROR, "too late")
    assert outer == [Message("WARNING", "odd"), Message("INTERNAL_ERROR", "broken"), Message("ERROR", "after")]
    assert inner == [Message("INTERNAL_ERROR", "broken")]
    assert [message.is_error for message in outer] == [False, True, True]


def test_equal_lists_are_told_apart():
    native = Log(RecordedLibrary("11.4"))
    with native.collected() as outer:
        with native.collected():
            pass
        native.receive("ERROR", "still heard")
    assert [message.text for message in outer] == ["still heard"]


def test_messages_of_other_threads_are_collected():
    native = Log(RecordedLibrary("11.4"))
    with native.collected() as messages:
        threads = [threading.Thread(target=native.receive, args=("WARNING", str(i))) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(message.text for message in messages) == [str(i) for i in range(8)]


def test_details_go_to_the_debug_log_only(caplog: pytest.LogCaptureFixture):
    native = Log(RecordedLibrary("11.4"))
    with caplog.at_level(logging.INFO, "llmc.runtime.sessions.tensorrt.library"):
        native.receive("VERBOSE", "a tactic")
        native.receive("WARNING", "a doubt")
    assert caplog.messages == ["warning: a doubt"]


def test_the_real_library_logs_to_us():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    library = load_library("tensorrt-rtx")
    with logger(library).collected() as messages:
        builder = made(library, library.Builder)
        network = builder.create_network(0)  # the parser does not keep it alive
        parser = library.OnnxParser(network, logger(library).native)
        assert not parser.parse(b"no graph")
    assert any(message.is_error for message in messages)


# ------------------------------------------------------------------------------------------------------- no driver


@pytest.mark.parametrize("owner", ["Builder", "Runtime"])
def test_without_a_driver_the_library_says_why(owner: str, monkeypatch: pytest.MonkeyPatch):
    def fail(library: RecordedLibrary, self: Any, native: Any) -> None:
        native.log(library.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    replaced(monkeypatch, owner, "__init__", fail)
    with pytest.raises(GpuError, match=r"tensorrt 10.3\S* cannot use a GPU here \(CUDA .* error: 35\); install"):
        library = RecordedLibrary("10.3")
        made(library, getattr(library, owner))


def test_importing_it_loads_no_engine(monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []
    real = builtins.__import__

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        loaded.append(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watched)
    monkeypatch.setattr(
        "llmc.runtime.sessions.tensorrt.library", engine_library
    )  # so that the package gets it back afterwards
    monkeypatch.delitem(sys.modules, "llmc.runtime.sessions.tensorrt.library")
    import llmc.runtime.sessions.tensorrt.library  # noqa: F401

    assert not [name for name in loaded if name.startswith("tensorrt")]


@pytest.mark.parametrize(
    ("capability", "listed"),
    [("7.5", True), ("8.0", True), ("8.7", False), ("9.0", False), ("10.0", False), ("12.1", True), ("12.3", True)],
)
def test_a_library_that_names_its_gpus_runs_on_those_and_on_later_ones(capability: str, listed: bool):
    assert engine_library.lists_gpu(FakeTensorRT(FakeDriver(), compiles=True), capability) == listed
    assert engine_library.lists_gpu(FakeTensorRT(FakeDriver()), capability), "one that names none is for all"
