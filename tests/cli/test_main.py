"""The frame around every verb: exit codes, one sentence per error, and laziness."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from llmc import errors
from llmc.cli import main as frame

VERBS = (
    "export",
    "plan",
    "build",
    "adapter",
    "run",
    "chat",
    "embed",
    "rank",
    "serve",
    "bench",
    "eval",
    "inspect",
    "list",
    "rm",
    "verify",
    "doctor",
)


def failing(error: BaseException) -> click.Command:
    """A verb that fails with ``error``."""

    @click.command("inspect")
    @frame.debug_option
    def command() -> None:
        raise error

    return command


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def plant(error: BaseException) -> None:
        monkeypatch.setattr("llmc.cli.inspect.inspect_command", failing(error))

    return plant


# ------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_verb_in_the_order_of_use_each_in_a_sentence_on_a_line(llmc, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = llmc("--help")
    lines = [line for line in ran.out.partition("Commands:")[2].splitlines() if line.strip()]
    assert (ran.code, [line.split()[0] for line in lines]) == (0, list(VERBS))
    assert [line for line in lines if not re.fullmatch(r"  \w+ +[A-Z].*[^.]\.", line) or len(line) > 80] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(llmc, verb: str):
    ran = llmc(*([verb, "add"] if verb == "adapter" else [verb]), "-h")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: llmc {verb}")
    assert "--debug" in ran.out
    # Two print nothing else.
    assert ("\n  --json " in ran.out) == (verb not in ("adapter", "chat", "embed", "rank", "serve", "rm"))


@pytest.mark.parametrize(
    ("verb", "rare"), [("run", "--presence-penalty"), ("chat", "--draft"), ("serve", "--max-queue-s")]
)
def test_rare_options_are_in_the_longer_help(llmc, verb: str, rare: str):
    short, whole = llmc(verb, "--help"), llmc(verb, "--help-all")
    assert (short.code, whole.code) == (0, 0)
    assert rare not in short.out and "--help-all" in short.out
    assert f" {rare} " in whole.out and len(short.out.splitlines()) < 90


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bake"], "llmc: error: No such command 'bake'"),
        (["export"], "llmc: error: Missing argument 'CHECKPOINT'; see llmc export --help"),
        (["inspect", "--nonsense"], "llmc: error: No such option"),
        (["plan", "--max-batch", "0", "."], "llmc: error: Invalid value for '--max-batch'"),
        *(
            ([place if word == "PATH" else word for word in verb.split()], said)
            for verb in (
                *("inspect PATH", "plan PATH", "export PATH -o out", "build PATH -o out", "run PATH", "chat PATH"),
                *("verify PATH", "bench PATH", "eval PATH", "serve PATH", "embed PATH", "rank PATH query"),
                *("adapter add PATH . --name a", "doctor PATH"),
            )
            for place, said in (
                (".", ". has none of llmc.json"),
                (__file__, f"{__file__} has none of llmc.json"),
                ("/no/such", "/no/such does not exist"),
                ("", "is empty" if verb != "serve PATH" else "names no model"),
            )
        ),
    ],
)
def test_wrong_usage_is_one_sentence_and_exits_with_two(llmc, arguments: list[str], sentence: str):
    ran = llmc(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("llmc: error: ") and sentence in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("top_p", "is out of range"), 2),
        (errors.CheckpointError("broken"), 1),
        (errors.BundleError("corrupt"), 1),
        (errors.ResourceError("too large"), 1),
        (errors.MissingExtraError("pip install 'onnxruntime>=1.23'"), 1),
    ],
)
def test_an_error_of_llmcs_is_its_sentence_and_its_exit_code(llmc, fail_with, error: errors.LlmcError, code: int):
    fail_with(error)
    ran = llmc("inspect")
    assert (ran.code, ran.out, ran.err) == (code, "", f"llmc: error: {error}\n")


def test_an_error_of_the_system_names_the_file(llmc, fail_with):
    fail_with(OSError(errno.EACCES, "Permission denied", "weights.bin"))
    ran = llmc("inspect")
    assert (ran.code, ran.err) == (1, "llmc: error: [Errno 13] Permission denied: 'weights.bin'\n")


def test_a_bug_of_ours_is_one_line_without_a_traceback(llmc, fail_with):
    fail_with(ZeroDivisionError("first line\nsecond line"))
    ran = llmc("inspect")
    assert ran.code == 1
    assert ran.err == (
        "llmc: error: ZeroDivisionError: first line (a bug of llmc: please report it with the output of --debug)\n"
    )


@pytest.mark.parametrize("arguments", [["--debug", "inspect"], ["inspect", "--debug"]])
def test_debug_shows_the_traceback_before_the_sentence(llmc, fail_with, arguments: list[str]):
    fail_with(errors.BundleError("corrupt"))
    ran = llmc(*arguments)
    assert ran.code == 1
    assert ran.err.startswith("Traceback")
    assert ran.err.endswith("llmc: error: corrupt\n")


# ------------------------------------------------------------------------------------------------- being interrupted


def test_ctrl_c_says_so_and_exits_with_130(llmc, fail_with):
    fail_with(KeyboardInterrupt())
    ran = llmc("inspect")
    assert (ran.code, ran.err.strip()) == (130, "interrupted")


def test_a_broken_pipe_is_quiet():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "llmc.cli", "--help"]
    with os.fdopen(writing, "wb") as closed:
        ran = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_an_output_that_knows_no_emoji_gets_an_escape():
    code = "import click; from llmc.cli import main, inspect;"
    code += "inspect.inspect_command = click.Command('inspect', callback=lambda: click.echo('snake 🐍'));"
    code += "main.main(['inspect'])"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert ran.stdout == b"snake \\U0001f40d\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--api-key", "k"], "there is no --api-key, did you mean --keys-file?"),
        (["serve", "--max-model-len", "4"], "there is no --max-model-len, did you mean --max-context?"),
        (["run", "--ctx-size", "4"], "there is no --ctx-size, did you mean --max-context?"),
        (["run", "--max-new-tokens=4"], "there is no --max-new-tokens, did you mean --max-tokens?"),
        (["plan", "--context", "4"], "there is no --context, did you mean --max-context?"),
        (["run", "-c", "4"], "there is no -c, did you mean --max-context?"),
        (["run", "-m", "x"], "there is no -m: the model is an argument without a flag, as llmc run BUNDLE"),
    ],
)
def test_what_other_programs_take_is_told_by_llmcs_name(llmc, arguments: list[str], sentence: str):
    ran = llmc(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err and ran.err.count("\n") == 1
