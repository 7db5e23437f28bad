"""Who may import whom: import-linter's contracts hold and can fail, and no engine is imported before it is needed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("bundle", "cli", "export", "optimize", "runtime", "sources")
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# Module that breaks a contract, the line it gets, the contract that must report it. All are planted at once.
HOUSE, RUNTIME, OPTIMIZER, SERVER = "the house:", "the runtime:", "the optimizer:", "the server:"
BREACHES = [
    ("errors.py", "import llmc.bundle", HOUSE),
    ("bundle/manifest.py", "import llmc.runtime", HOUSE),
    ("publish.py", "import llmc.runtime", HOUSE),
    ("runtime/__init__.py", "import llmc.optimize", HOUSE),
    ("optimize/__init__.py", "import llmc.cli", HOUSE),
    ("optimize/__init__.py", "import llmc.export", HOUSE),
    ("export/__init__.py", "import llmc.optimize", HOUSE),
    ("runtime/selftest/values.py", "import llmc.runtime.loading", RUNTIME),
    ("runtime/loading.py", "import llmc.runtime.diagnose.doctor", RUNTIME),
    ("runtime/engine/branch.py", "import llmc.runtime.loading", RUNTIME),
    ("runtime/speculation/control.py", "import llmc.runtime.engine.scheduler", RUNTIME),
    ("runtime/speculation/control.py", "import llmc.runtime.search.beam", RUNTIME),
    ("runtime/search/beam.py", "import llmc.runtime.engine.branch", RUNTIME),
    ("runtime/runner/costs.py", "import llmc.runtime.engine.branch", RUNTIME),
    ("runtime/api/request.py", "import llmc.runtime.runner.costs", RUNTIME),
    ("runtime/observe/metrics.py", "import llmc.runtime.api.results", RUNTIME),
    ("runtime/sessions/base.py", "import llmc.runtime.observe.metrics", RUNTIME),
    ("runtime/kv/cache_file.py", "import llmc.runtime.sessions.base", RUNTIME),
    ("runtime/guided/gbnf.py", "import llmc.runtime.kv.rows", RUNTIME),
    ("runtime/sampling/draws.py", "import llmc.runtime.guided.gbnf", RUNTIME),
    ("runtime/text/tokenizer.py", "import llmc.runtime.sampling.draws", RUNTIME),
    ("runtime/host/machine.py", "import llmc.runtime.text.tokenizer", RUNTIME),
    ("runtime/vision/tower.py", "import llmc.runtime.text.tokenizer", RUNTIME),
    ("runtime/vision/rows.py", "import llmc.runtime.kv.rows", RUNTIME),
    ("optimize/lower/rewrite.py", "import llmc.optimize.calibrate.text", OPTIMIZER),
    ("optimize/quantize/grid.py", "import llmc.optimize.weights.store", OPTIMIZER),
    ("runtime/engine/branch.py", "import llmc.runtime.engine.scheduler", "no cycle"),
    ("bundle/manifest.py", "import numpy", "folders need the standard library only"),
    ("runtime/server/config.py", "import llmc.runtime.server.http.errors", SERVER),
    ("runtime/server/models/pool.py", "import llmc.runtime.server.dialects.openai_chat", SERVER),
    ("export/__init__.py", "import onnxruntime", "export imports no runtime"),
    ("export/__init__.py", "import llmc.runtime", "export imports no runtime"),
    ("optimize/lower/__init__.py", "import torch", "optimize imports torch only to calibrate"),
    ("runtime/sessions/__init__.py", "import onnx", "runtime imports nothing that a device lacks"),
    ("runtime/__init__.py", "def late():\n    import torch", "runtime imports nothing that a device lacks"),
    ("export/__init__.py", "import rich", "only the command line prints"),
]


def lint(folder: Path, pythonpath: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "10000", **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def copied(folder: Path) -> Path:
    """The package's modules, to be changed."""
    package = folder / "llmc"
    package.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, package)
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def test_import_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_planted_breach_and_a_room_without_a_layer_are_caught(tmp_path: Path):
    package = copied(tmp_path)
    for module, line, _ in BREACHES:
        with (package / module).open("a") as file:
            file.write(f"\n{line}\n")
    (package / "runtime" / "attic.py").write_text('"""A room that no layer lists."""\n')
    result = lint(package, pythonpath=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    reports = re.split(r"\n(?=.+\n-{9,}\n)", result.stdout)
    for module, line, contract in BREACHES:
        importer = "llmc." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        [report] = [text for text in reports if text.startswith(contract) and "\n-----" in text]
        imported = line.split()[-1]
        ends = importer.rpartition(".")[2], imported.rpartition(".")[2]
        cycle = {f".{one} -> .{other} (" for one, other in (ends, ends[::-1])}  # told by one of its imports
        assert f"{importer} -> {imported} (l." in report or any(edge in report for edge in cycle), report
        assert contract != RUNTIME or "attic" in report, report


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


def test_command_line_and_help_pull_in_no_engine_and_not_even_numpy():
    absent = {*HEAVY, "numpy", "rich", "tokenizers", "jinja2", "prompt_toolkit", "httptools", "uvloop"}
    verbs = ("", "export", "build", "run", "chat", "serve", "bench", "inspect", "verify", "doctor")
    code = f"""
import sys
from llmc.cli.main import main
for verb in {verbs}:
    try:
        main([*verb.split(), "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    assert not (loaded := {absent} & set(sys.modules)), f"help of {{verb!r}} loads {{loaded}}"
"""
    assert imported_by(code).isdisjoint(absent)
