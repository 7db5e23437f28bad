"""The error tree, its exit codes, and the sentence for a missing extra."""

import importlib.metadata
from pathlib import Path

import pytest

from llmc import errors

LEAVES = [
    errors.UsageError,
    errors.CheckpointError,
    errors.BuildError,
    errors.BundleError,
    errors.RequestError,
    errors.CancelledError,
    errors.DeadlineError,
    errors.QueueFullError,
    errors.EngineClosedError,
    errors.ContextError,
    errors.ProcessorError,
    errors.GrammarError,
    errors.NonFiniteError,
    errors.DraftError,
    errors.ResourceError,
    errors.GpuError,
    errors.MissingExtraError,
]


def test_docstring_draws_every_error():
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    assert found == drawn == {"LlmcError", *(leaf.__name__ for leaf in LEAVES)}


@pytest.mark.parametrize("leaf", LEAVES)
def test_only_usage_errors_exit_with_two(leaf):
    assert issubclass(leaf, errors.LlmcError)
    assert leaf.exit_code == (2 if leaf is errors.UsageError else 1)


@pytest.mark.threat("terminal-escapes")
def test_a_message_is_text_whatever_names_are_in_it():
    """Escape sequences, turned directions and halves of characters; ends of lines and letters stay."""
    error = errors.GpuError("no \x1b[31mfile\u202e \udcff\x9b\r\n\tGröße 大")
    assert str(error) == "no \\x1b[31mfile\\u202e \\udcff\\x9b\\r\n\tGröße 大"
    assert errors.printable(str(error)) == str(error)


@pytest.mark.parametrize("module", ["no_such_engine", "no_such_engine.parts"])
def test_require_names_the_pip_command(module):
    with pytest.raises(errors.MissingExtraError, match=r"no_such_engine.* pip install 'onnxruntime>="):
        errors.require(module, "cpu")


def test_the_pip_command_names_what_an_extra_and_the_extras_in_it_bring(monkeypatch):
    declared = [
        "numpy>=1.26",
        'onnxruntime>=1.23; extra == "cpu"',
        'onnx>=1.23; extra == "build"',
        'llmc-deploy[build]; extra == "export"',
        'torch>=2.13; extra == "export"',
        'llmc-deploy[cpu,build]; extra == "both"',
        'uvloop>=1; sys_platform != "win32" and extra == "both"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared if name == "llmc-deploy" else [])
    assert errors.install_command("cpu") == "pip install 'onnxruntime>=1.23'"
    cpu = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert errors.install_command("export") == f"pip install {cpu} 'onnx>=1.23' 'torch>=2.13'"
    both = """pip install 'onnxruntime>=1.23' 'onnx>=1.23' 'uvloop>=1; sys_platform != "win32"'"""
    assert errors.install_command("both") == both


def test_the_pip_command_names_the_folder_where_nothing_is_installed(monkeypatch):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    folder = Path(errors.__file__).parent
    assert errors.install_command("cpu") == f"pip install '{folder}[cpu]'"


def test_require_does_not_blame_the_extra_for_a_module_broken_inside(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_part_that_is_missing"):
        errors.require("broken_engine", "cpu")


@pytest.mark.parametrize("missing", ["parts", "parts.of_it"])
def test_require_takes_a_package_that_lacks_the_module_for_one_that_is_not_installed(missing, tmp_path, monkeypatch):
    """As an empty folder is, which an uninstalled package left behind."""
    (tmp_path / "hollow_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.MissingExtraError, match=rf"hollow_engine\.{missing} is not installed"):
        errors.require(f"hollow_engine.{missing}", "cpu")


def test_require_names_the_folder_that_an_uninstalled_package_left_behind(tmp_path, monkeypatch):
    (tmp_path / "left_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.MissingExtraError, match=rf"only the folder {tmp_path}/left_engine is there: remove it;"):
        errors.require("left_engine", "cpu")


class MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError(), "ValueError"),
        (MuteError(), "MuteError"),
    ],
    ids=["message", "exit", "empty", "mute"],
)
def test_text_of_names_the_type_and_the_message_if_it_has_one(error, text):
    assert errors.text_of(error) == text


class Evil:
    def __repr__(self) -> str:
        raise SystemError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, "1"),
        (-1.5, "-1.5"),
        (True, "True"),
        ("it's", '"it\'s"'),
        (((1, 101.0), (2, 0.5)), "[[1, 101.0], [2, 0.5]]"),
        (10**39, str(10**39)),
        (10**5000, "an integer of about 5001 digits"),
        ((-(10**5000),), "[an integer of about 5001 digits]"),
        (Evil(), "Evil"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_written_as_python_does_as_far_as_somebody_reads_them(value, shown):
    assert errors.format_value(value) == shown


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 500] * 10**5, b"x" * 10**6, dict.fromkeys(range(99), "x" * 99)])
def test_long_values_are_cut(value):
    assert 50 < len(errors.format_value(value)) < 320
