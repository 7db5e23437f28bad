"""``llmc run``: where the prompt comes from, what the library is asked, what is streamed where."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from doubles.talking import RESULT, FakeModel, failing

from llmc.cli import options
from llmc.cli.chat import chat_command
from llmc.cli.run import run_command
from llmc.errors import RequestError
from llmc.runtime import Generator, Output, SamplingParams

SEVERAL = dataclasses.replace(RESULT, outputs=(*RESULT.outputs, Output(1, "cd", (3, 4), "length", None, -1.25)))
FIELDS = {field.name: field for field in dataclasses.fields(SamplingParams)}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr("llmc.runtime.load", fake.load)
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    limits = SimpleNamespace(limits=SimpleNamespace(max_context=128))
    monkeypatch.setattr("llmc.cli.run.read_bundle", lambda bundle: limits)
    return fake


def test_text_goes_to_stdout_and_nothing_else_anywhere(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err) == (0, "ab\n", "")
    assert (model.asked, model.sampling) == (["Once"], [{}])
    unset = dict.fromkeys(("threads", "max_context", "self_test", "verify", "memory"))
    assert model.loaded == {
        "bundle": tmp_path,
        **unset,
        "emulate": False,
        "device": 0,
        "draft": "auto",
        "kind": Generator,
    }
    assert model.closed


def test_images_stand_before_the_prompt_and_are_answered_as_a_chat(llmc, model: FakeModel, tmp_path: Path):
    files = [tmp_path / "cat.png", tmp_path / "dog.jpg"]
    for file in files:
        file.touch()
    ran = llmc("run", tmp_path, "-p", "Which?", "--image", files[0], "--image", files[1])
    assert (ran.code, ran.out) == (0, "ab\n")
    parts = [{"type": "image", "image": str(file)} for file in files]
    assert model.asked == [[{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]]


# A value of each kind as it is typed, and what the library must be given.
VALUES: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["5"], 5),
    "temperature": (["0.5"], 0.5),
    "seed": (["18446744073709551615"], 2**64 - 1),
    "stop": (["\n\n", "END"], ("\n\n", "END")),
    "json_schema": (['{"type": "object"}'], '{"type": "object"}'),
    "on_overflow": (["sink"], "sink"),
    "stop_token_ids": (["2, 13"], (2, 13)),
    "ignore_eos": ([], True),
    "logit_bias": (["13=-5,198=2.5"], ((13, -5.0), (198, 2.5))),
    "early_stopping": (["never"], "never"),
    "grammar": (["start: /a/"], "start: /a/"),
}


def typed(name: str) -> list[str]:
    values = VALUES[name][0]
    flag = f"--{name.replace('_', '-')}"
    return [part for value in values for part in (flag, value)] if values else [flag]


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_parameter_is_an_option_and_reaches_the_library_under_its_own_name(
    llmc, model: FakeModel, tmp_path: Path, name: str
):
    ran = llmc("run", tmp_path, "-p", "Once", "--json", *typed(name))
    assert (ran.code, ran.err) == (0, "")
    (sampling,) = model.sampling
    assert sampling == {name: VALUES[name][1]}
    assert type(sampling[name]) is type(VALUES[name][1])


def test_chat_takes_the_same_parameters_as_run():
    def engine_and_sampling(command: click.Command) -> set[tuple[str, ...]]:
        found = [option for option in command.params if isinstance(option, options.SectionOption)]
        return {tuple(option.opts) for option in found}

    assert engine_and_sampling(chat_command) == engine_and_sampling(run_command)
    assert (
        len(engine_and_sampling(run_command)) == len(FIELDS) + len(options.ENGINE_NAMES) + 2
    )  # --device, --max-context


def test_options_of_loading_reach_the_library(llmc, model: FakeModel, tmp_path: Path):
    options = ["--draft", "lookup", "--determinism", "strict", "--max-batch", 4, "--prefix-cache-folder", tmp_path]
    llmc("run", tmp_path, "-p", "x", "--threads", 2, "--max-context", 64, "--no-self-test", "--memory", "1MB", *options)
    assert model.loaded == {
        "bundle": tmp_path,
        "threads": 2,
        "max_context": 64,
        "self_test": False,
        "verify": None,
        "memory": 10**6,
        "emulate": False,
        "device": 0,
        "draft": "lookup",
        "determinism": "strict",
        "max_batch": 4,
        "prefix_cache_folder": tmp_path,
        "kind": Generator,
    }


@pytest.mark.parametrize(("name", "content"), [("json_schema", '{"type": "object"}'), ("grammar", 'start: "東"')])
def test_schemas_and_grammars_may_be_files(llmc, model: FakeModel, tmp_path: Path, name: str, content: str):
    file = tmp_path / "a:file"
    file.write_text(content, encoding="utf-8")
    llmc("run", tmp_path, "-p", "Once", f"--{name.replace('_', '-')}", file)
    assert (model.asked, model.sampling) == (["Once"], [{name: content}])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--json-schema", "no.json"], "'--json-schema': 'no.json' is neither a JSON object nor a file that can be"),
        (["--grammar", "no.lark"], "'--grammar': 'no.lark' is neither a grammar in Lark's notation nor a file that"),
        (["--grammar", "x" * 5000], "'--grammar': 'xxxxx"),
        (["--logit-bias", "13"], "'--logit-bias': '13' is no list of biases, expected ID=NUMBER"),
        (["--logit-bias", "13=nan"], "'--logit-bias': '13=nan' is no list of biases"),
        (["--banned-tokens", "1,-2"], "'--banned-tokens': '1,-2' is no list of token ids"),
        (["--early-stopping", "maybe"], "'--early-stopping': 'maybe' is not one of true, false, never"),
        (["--top-p", "high"], "'--top-p': 'high' is not a valid float"),
        (["--on-overflow", "wrap"], "'--on-overflow': 'wrap' is not one of"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_with_its_flag(
    llmc, model: FakeModel, tmp_path: Path, arguments: list[str], sentence: str
):
    ran = llmc("run", tmp_path, "-p", "Once", *arguments)
    assert (ran.code, ran.out, model.loaded) == (2, "", {})
    assert ran.err.startswith(f"llmc: error: Invalid value for {sentence}")


# ----------------------------------------------------------------------------------------------------------- output


def test_several_outputs_are_printed_one_after_another_under_a_header(llmc, model: FakeModel, tmp_path: Path):
    model.ended = SEVERAL
    ran = llmc("run", tmp_path, "-p", "Once", "--n", 2)
    assert ran.out == "--- 1 of 2: ended by stop, seed 42\nab\n--- 2 of 2: ended by length, score -1.2500\ncd\n"


def test_json_is_the_whole_result_with_the_resolved_parameters(llmc, model: FakeModel, tmp_path: Path):
    model.ended = SEVERAL
    result = json.loads(llmc("run", tmp_path, "-p", "Once", "--json", "--logprobs", 1).out)
    assert (result["text"], result["token_ids"], result["finish_reason"], result["seed"]) == ("ab", [1, 2], "stop", 42)
    assert [output["text"] for output in result["outputs"]] == ["ab", "cd"]
    assert result["usage"]["total_tokens"] == 9
    assert result["timings"]["tpot_s"] == 0.25
    assert result["metrics"]["e2e_s"] == 0.75
    assert result["params"]["seed"] == 42
    assert result["params"]["json_schema"] == {"type": "object"}
    assert set(result["params"]) == set(FIELDS)
    assert (result["stop_reason"], result["outputs"][1]["stop_reason"]) == ("END", None)
    assert [item["token"] for item in result["outputs"][0]["logprobs"]] == [1, 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--logprobs", 1], "--logprobs is 1"),
        (["--prompt-logprobs", 1], "--prompt-logprobs is 1"),
        (["--no-detokenize"], "--detokenize is False"),
    ],
)
def test_what_only_json_shows_is_refused_without_it(
    llmc, model: FakeModel, tmp_path: Path, given: list[Any], named: str
):
    ran = llmc("run", tmp_path, "-p", "Once", *given)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"llmc: error: {named}, which only llmc run with --json shows")


# ----------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [("Once\n", "Once"), ("Once", "Once"), ("Once\n\n", "Once\n"), ("東京 🐍\r\n", "東京 🐍\r"), ("", "")],
)
def test_stdin_is_the_prompt_without_its_last_newline(llmc, model: FakeModel, tmp_path: Path, stdin: str, prompt: str):
    assert llmc("run", tmp_path, stdin=stdin.encode()).code == 0
    assert model.asked == [prompt]


def test_stdin_that_is_not_utf8_is_refused_with_the_byte(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, stdin=b"caf\xe9 au lait")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("llmc: error: stdin is not valid UTF-8 (byte 0xe9 at position 3 of a prompt)")
    assert model.loaded == {}


def test_more_than_the_context_can_hold_is_refused_before_it_is_all_read(
    llmc, model: FakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("llmc.cli.reading.MIN_STDIN_BYTES", 10)
    assert llmc("run", tmp_path, stdin=b"a" * 128 * 64).code == 0
    ran = llmc("run", tmp_path, stdin=b"a" * (128 * 64 + 1))
    assert (ran.code, len(model.asked)) == (2, 1)
    assert "stdin has a prompt of more than 8,192 bytes" in ran.err
    assert sys.stdin.buffer.tell() == 128 * 64 + 1


def test_stats_go_to_stderr(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "-p", "Once", "--stats")
    assert ran.out == "ab\n"
    assert ran.err == (
        "9 of 128 tokens, 4.0 tokens/s, first token after 0.50 s; prompt 7 tokens; answer 2 tokens; ended by stop; "
        "seed 42\n"
    )


def test_a_refused_request_is_a_sentence_after_what_was_streamed(llmc, model: FakeModel, tmp_path: Path):
    model.between = failing(RequestError("the context is full"))
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err) == (1, "a", "llmc: error: the context is full\n")
    assert model.closed


def test_ctrl_c_while_streaming_closes_the_model(llmc, model: FakeModel, tmp_path: Path):
    model.between = failing(KeyboardInterrupt())
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err.strip()) == (130, "a", "interrupted")
    assert model.closed


def test_a_terminal_without_a_prompt_is_told_how_to_give_one(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, terminal=True)
    assert (ran.code, ran.err) == (2, "llmc: error: --prompt is missing; give one with -p, or pipe one to stdin\n")


def test_chat_on_a_terminal_is_a_conversation(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "--chat", "--seed", 1, stdin=b"Hello\nAgain\n", terminal=True)
    first = [{"role": "user", "content": "Hello"}]
    second = [*first, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "Again"}]
    assert (ran.code, ran.out) == (0, "ab\nab\n")
    assert (model.asked, model.sampling) == ([first, second], [{"seed": 1}] * 2)
