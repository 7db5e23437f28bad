"""Finding TensorRT and TensorRT-RTX, and listening to what they log."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from doubles.recorded import RecordedLibrary, replaced

from llmc.errors import GpuError, MissingExtraError
from llmc.runtime.sessions.tensorrt.library import Message, load_library, logger, make_object

BROKEN = r"tensorrt is installed and cannot be loaded \(.*\): uninstall all packages of that library, .* install it: on"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module where ``import tensorrt`` finds it."""

    def install(library: Any, name: str = "tensorrt") -> None:
        monkeypatch.setitem(sys.modules, name, library)

    return install


@pytest.mark.parametrize(
    ("engine", "module", "advice"),
    [
        ("tensorrt", "tensorrt", r"on a Jetson it comes with JetPack .*elsewhere pip install --extra-index-url"),
        ("tensorrt-rtx", "tensorrt_rtx", r"pip install 'tensorrt-rtx>=1.7' 'cuda-bindings"),
    ],
)
def test_a_missing_library_says_what_to_install(engine, module, advice, monkeypatch):
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    without = (
        "without it llmc verify, run and eval --emulate compute on the CPU, and llmc build of an export --deferred"
    )
    with pytest.raises(MissingExtraError, match=f"{module} is not installed: {advice}.*; {without}"):
        load_library(engine)


@pytest.mark.parametrize("version", ["10.3.0", "10.14.1.48", "8.6.1"])
def test_a_library_too_old_is_refused(version, installed):
    old = ModuleType("tensorrt")
    old.__version__ = version
    installed(old)
    said = rf"tensorrt {version} is installed, llmc needs 10\.15 or later: .*JetPack 7.*; or build for the target cpu"
    with pytest.raises(GpuError, match=said):
        load_library("tensorrt")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libnvonnxparser.so.11: cannot open shared object file"),
        ModuleNotFoundError("No module named 'tensorrt.tensorrt'", name="tensorrt.tensorrt"),
        RuntimeError("CUDA is not what it was"),
    ],
)
def test_a_broken_installation_is_told_from_a_missing_one(error, monkeypatch):
    def broken(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(GpuError, match=BROKEN):
        load_library("tensorrt")


def test_warnings_and_errors_are_collected_until_the_block_ends():
    library = RecordedLibrary()
    severity, native = library.ILogger.Severity, logger(library)
    native.native.log(severity.ERROR, "before")
    with native.collect_messages() as outer:
        native.native.log(severity.WARNING, "odd")
        with native.collect_messages() as inner:
            native.native.log(severity.INTERNAL_ERROR, "broken")
            native.native.log(severity.INFO, "by the way")
            native.native.log(severity.VERBOSE, "in detail")
        native.native.log(severity.ERROR, "after")
    native.native.log(severity.ERROR, "too late")
    assert outer == [Message("WARNING", "odd"), Message("INTERNAL_ERROR", "broken"), Message("ERROR", "after")]
    assert inner == [Message("INTERNAL_ERROR", "broken")]
    assert [message.is_error for message in outer] == [False, True, True]


def test_the_real_library_logs_to_us():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    library = load_library("tensorrt-rtx")
    with logger(library).collect_messages() as messages:
        builder = make_object(library, library.Builder)
        network = builder.create_network(0)  # the parser does not keep it alive
        parser = library.OnnxParser(network, logger(library).native)
        assert not parser.parse(b"no graph")
    assert any(message.is_error for message in messages)


@pytest.mark.parametrize("owner", ["Builder", "Runtime"])
def test_without_a_driver_the_library_says_why(owner, monkeypatch):
    def fail(library: RecordedLibrary, self: Any, native: Any) -> None:
        native.log(library.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    replaced(monkeypatch, owner, "__init__", fail)
    with pytest.raises(GpuError, match=r"tensorrt 10.16\S* cannot use a GPU here \(CUDA .* error: 35\); install"):
        library = RecordedLibrary()
        make_object(library, getattr(library, owner))
