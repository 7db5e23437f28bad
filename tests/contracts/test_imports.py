"""Who may import whom: import-linter's contracts hold and can fail, and no engine is imported before it is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "export", "optimize", "runtime")
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# module that breaks a contract, the line it gets, the contract that must notice
BREACHES = [
    ("errors.py", "import llmc.bundle", "errors imports nothing"),
    ("bundle.py", "import llmc.runtime", "bundle imports only errors"),
    ("bundle.py", "import numpy", "bundle imports only errors"),
    ("publish.py", "import llmc.runtime", "publish imports only bundle"),
    ("export/__init__.py", "import llmc.optimize", "export imports no sibling"),
    ("export/__init__.py", "import onnxruntime", "export imports no sibling"),
    ("optimize/__init__.py", "import llmc.export", "optimize may call runtime"),
    ("optimize/lower/__init__.py", "import torch", "optimize imports torch only to calibrate"),
    ("runtime/__init__.py", "import llmc.optimize", "runtime imports no sibling"),
    ("runtime/sessions/__init__.py", "import onnx", "runtime imports no sibling"),
    ("runtime/__init__.py", "def late():\n    import torch", "runtime imports no sibling"),
    ("export/__init__.py", "import rich", "only the command line prints"),
]


def lint(folder: Path, pythonpath: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_import_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"), BREACHES, ids=[f"{m}: {line[-20:]}" for m, line, _ in BREACHES]
)
def test_a_planted_breach_is_caught(tmp_path: Path, module: str, line: str, contract: str):
    package = tmp_path / "llmc"
    package.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, package)
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(package, pythonpath=tmp_path)
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(row.startswith(contract) for row in broken), result.stdout


HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "transformers",
    "safetensors",
    "tensorrt",
    "tensorrt_rtx",
)


def imported_by(code: str) -> set[str]:
    """Top-level names of the modules that are loaded once ``code`` has run in a fresh interpreter."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(result.stdout.splitlines()[-1].split())


def test_runtime_pulls_in_nothing_that_a_device_lacks():
    assert imported_by("from llmc.runtime import *").isdisjoint(HEAVY)


def test_command_line_pulls_in_no_engine_and_not_even_numpy():
    assert imported_by("import llmc.cli.main").isdisjoint({*HEAVY, "numpy", "rich", "tokenizers", "jinja2"})


@pytest.mark.parametrize("verb", ["", "export", "build", "run", "chat", "bench", "inspect", "verify", "doctor"])
def test_help_imports_no_engine(verb: str):
    arguments = [verb, "--help"] if verb else ["--help"]
    code = f"""
from llmc.cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert stop.code == 0
"""
    assert imported_by(code).isdisjoint({*HEAVY, "numpy", "rich", "tokenizers", "jinja2"})
