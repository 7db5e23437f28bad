"""A stripped engine gets its weights back: the calls against the recorded interface."""

from pathlib import Path
from typing import Any

import pytest
from doubles.recorded import RecordedLibrary, replaced

from llmc.errors import BundleError, GpuError
from llmc.runtime.sessions.tensorrt.refit import refit

GRAPH = Path("bundle/decoder.onnx")


@pytest.fixture
def engine() -> Any:
    """Anything: the library alone looks into it."""
    return object()


def test_it_takes_our_calls(engine: Any):
    library = RecordedLibrary()
    refit(library, engine, GRAPH)
    assert library.arguments("OnnxParserRefitter", "refit_from_file") == [(str(GRAPH),)]
    assert library.names("Refitter") == ["__init__", "get_missing_weights", "refit_cuda_engine"]
    ((given, _),) = library.arguments("Refitter", "__init__")
    assert given is engine


def test_a_graph_that_does_not_fit_is_refused_with_the_reason(engine: Any, monkeypatch: pytest.MonkeyPatch):
    def refused(library: RecordedLibrary, self: Any, path: str) -> bool:
        self.__dict__["_errors"] = [("", "", "no weights called q_proj")]
        return False

    replaced(monkeypatch, "OnnxParserRefitter", "refit_from_file", refused)
    replaced(monkeypatch, "OnnxParserRefitter", "get_error", lambda library, self, i: _error(library, self._errors[i]))
    with pytest.raises(BundleError, match=r"decoder.onnx does not fit the engine \(no weights called q_proj\)"):
        refit(RecordedLibrary(), engine, GRAPH)


def _error(library: RecordedLibrary, parts: tuple[str, str, str]) -> Any:
    return library.make("ParserError", _error=parts)


def test_weights_that_are_still_missing_are_named(engine: Any, monkeypatch: pytest.MonkeyPatch):
    replaced(monkeypatch, "Refitter", "get_missing_weights", lambda library, self: ["k_proj", "v_proj"])
    library = RecordedLibrary()
    with pytest.raises(BundleError, match=r"decoder.onnx lacks 2 weights of the engine, as k_proj"):
        refit(library, engine, GRAPH)
    assert "refit_cuda_engine" not in library.names("Refitter")


def test_an_engine_that_takes_no_weights_says_what_was_logged(engine: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(library: RecordedLibrary, self: Any) -> bool:
        library.native_logger.log(library.ILogger.Severity.ERROR, "out of memory")
        return False

    def start(library: RecordedLibrary, self: Any, engine: Any, native: Any) -> None:
        library.native_logger = native

    replaced(monkeypatch, "Refitter", "__init__", start)
    replaced(monkeypatch, "Refitter", "refit_cuda_engine", fail)
    with pytest.raises(GpuError, match=r"weights cannot be set \(out of memory\)"):
        refit(RecordedLibrary(), engine, GRAPH)
