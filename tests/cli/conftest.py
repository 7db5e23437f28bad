"""Running the command line inside the test, as a user would see it, on the library or on one that takes notes."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

from llmc.bundle import FileEntry, Manifest
from llmc.cli.main import main
from llmc.runtime.selftest.values import VerifyReport

if TYPE_CHECKING:
    from llmc.optimize.build import BuildReport
    from llmc.optimize.recipe import BuildRequest


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """What a user pipes into the command, or types on a terminal."""

    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def llmc(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run ``llmc`` with arguments, and bytes on stdin; stdout is no terminal, stdin is one if asked for."""

    def run(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> Ran:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin, terminal))
        with create_pipe_input() as keys, create_app_session(input=keys):
            keys.send_bytes(stdin + b"\x04" if terminal else b"")  # a pipe holds 64 KiB
            with pytest.raises(SystemExit) as stopped:
                main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ran(int(stopped.value.code or 0), out, err)

    return run


class FakeLibrary:
    """``build``, ``rebuild``, ``export`` and ``verify`` that only take notes."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = replace(manifest, files={"decode.onnx": FileEntry(5_000_000, "0" * 64)})
        self.built: list[dict[str, Any]] = []
        self.rebuilt: list[dict[str, Any]] = []
        self.verified: list[dict[str, Any]] = []
        self.exported: list[tuple[Path, Path]] = []

    def build(self, request: "BuildRequest", progress: Any) -> "BuildReport":
        progress("lowering")
        self.built.append({"there": request.source.is_dir(), **vars(request)})
        return self._report(request.output)

    def rebuild(self, source: Path, output: Path, *, progress: Any, **options: Any) -> "BuildReport":
        progress("building the engine", 0.5)
        self.rebuilt.append({"source": source, "output": output, **options})
        return self._report(output)

    def _report(self, output: Path) -> "BuildReport":
        from llmc.optimize.build import BuildReport

        return BuildReport(output, self.manifest, 2.5)

    def export(self, checkpoint: Path, output: Path, *, progress: Any) -> SimpleNamespace:
        progress("exporting the graph")
        self.exported.append((checkpoint, output))
        output.mkdir()
        return SimpleNamespace(output=output)

    def verify(self, bundle: Path, *, progress: Any, **options: Any) -> VerifyReport:
        self.verified.append({"bundle": bundle, **options})
        return VerifyReport(6, 4, 64, 64, 0.001)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, manifest: Manifest) -> FakeLibrary:
    fake = FakeLibrary(manifest)
    monkeypatch.setattr("llmc.optimize.build.build", fake.build)
    monkeypatch.setattr("llmc.optimize.rebuild.rebuild", fake.rebuild)
    monkeypatch.setattr("llmc.export.export", fake.export)
    monkeypatch.setattr("llmc.runtime.loading.verify", fake.verify)
    return fake


@pytest.fixture
def export_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "export.json").write_text("{}")
    return folder
