"""``llmc run``: where the prompt comes from, what the library is asked, what is streamed where."""

from pathlib import Path
from typing import Any

import pytest

from llmc.errors import RequestError
from llmc.runtime import GenerationResult, Timings, Usage

RESULT = GenerationResult("ab", (1, 2), "stop", Usage(7, 2), Timings(0.5, 0.25, 7, 1), seed=42)


class FakeStream:
    """Two pieces of text, or an error after the first one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.result = RESULT
        self.closed = False

    def __iter__(self):
        yield "a"
        if self.error:
            raise self.error
        yield "b"

    def close(self) -> None:
        self.closed = True


class FakeModel:
    """Notes how it is loaded, asked and closed."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.closed = False
        self.error: BaseException | None = None

    def load(self, bundle: Path, **options: Any) -> "FakeModel":
        self.loaded = {"bundle": bundle, **options}
        return self

    def stream(self, prompt: str, **sampling: Any) -> FakeStream:
        self.asked.append(("stream", prompt, given(sampling)))
        return FakeStream(self.error)

    def stream_chat(self, messages: list[dict[str, str]], **sampling: Any) -> FakeStream:
        self.asked.append(("chat", [dict(message) for message in messages], given(sampling)))
        return FakeStream(self.error)

    def __enter__(self) -> "FakeModel":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr("llmc.runtime.load", fake.load)
    return fake


def test_text_goes_to_stdout_and_nothing_else_anywhere(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err) == (0, "ab\n", "")
    assert model.asked == [("stream", "Once", {})]
    assert model.loaded == {"bundle": tmp_path, "threads": None, "max_context": None, "self_test": None, "memory": None}
    assert model.closed


def test_every_option_reaches_the_library_under_its_own_name(llmc, model: FakeModel, tmp_path: Path):
    sampling = {"max_tokens": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7}
    options = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", value)]
    stops = ["--stop", "\n\n", "--stop", "END"]
    llmc("run", tmp_path, "-p", "Once", *options, *stops, "--threads", 2, "--max-context", 64, "--no-self-test")
    assert model.asked == [("stream", "Once", {**sampling, "stop": ("\n\n", "END")})]
    assert model.loaded == {"bundle": tmp_path, "threads": 2, "max_context": 64, "self_test": False, "memory": None}


def test_zeros_are_not_taken_for_left_out(llmc, model: FakeModel, tmp_path: Path):
    llmc("run", tmp_path, "-p", "Once", "--temperature", 0, "--seed", 0, "--top-k", 0)
    assert model.asked == [("stream", "Once", {"temperature": 0.0, "seed": 0, "top_k": 0})]


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [("Once\n", "Once"), ("Once", "Once"), ("Once\n\n", "Once\n"), ("東京 🐍\r\n", "東京 🐍\r"), ("", "")],
)
def test_stdin_is_the_prompt_without_its_last_newline(llmc, model: FakeModel, tmp_path: Path, stdin: str, prompt: str):
    assert llmc("run", tmp_path, stdin=stdin.encode()).code == 0
    assert model.asked == [("stream", prompt, {})]


def test_an_empty_prompt_option_is_not_replaced_by_stdin(llmc, model: FakeModel, tmp_path: Path):
    llmc("run", tmp_path, "-p", "", stdin=b"not this")
    assert model.asked == [("stream", "", {})]


def test_stdin_that_is_not_utf8_is_refused_with_the_byte(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, stdin=b"caf\xe9 au lait")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("llmc: error: the prompt on stdin is not valid UTF-8 (byte 0xe9 at position 3)")
    assert model.loaded == {}


def test_chat_sends_the_prompt_as_the_users_message(llmc, model: FakeModel, tmp_path: Path):
    assert llmc("run", tmp_path, "--chat", "-p", "Hello").out == "ab\n"
    assert model.asked == [("chat", [{"role": "user", "content": "Hello"}], {})]


def test_stats_go_to_stderr(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "-p", "Once", "--stats")
    assert ran.out == "ab\n"
    assert ran.err == (
        "prompt: 7 tokens, first token after 0.500 s (14.0 tok/s); completion: 2 tokens, 250.00 ms each (4.0 tok/s); "
        "ended by stop; seed 42\n"
    )


def test_a_refused_request_is_a_sentence_after_what_was_streamed(llmc, model: FakeModel, tmp_path: Path):
    model.error = RequestError("the context is full")
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err) == (1, "a", "llmc: error: the context is full\n")
    assert model.closed


def test_ctrl_c_while_streaming_closes_the_model(llmc, model: FakeModel, tmp_path: Path):
    model.error = KeyboardInterrupt()
    ran = llmc("run", tmp_path, "-p", "Once")
    assert (ran.code, ran.out, ran.err.strip()) == (130, "a", "interrupted")
    assert model.closed


def test_a_terminal_without_a_prompt_is_told_how_to_give_one(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, terminal=True)
    assert (ran.code, ran.err) == (2, "llmc: error: no prompt: give one with -p, or pipe one to stdin\n")


def test_chat_on_a_terminal_keeps_the_conversation(llmc, model: FakeModel, tmp_path: Path):
    ran = llmc("run", tmp_path, "--chat", "--seed", 1, stdin=b"Hello\nAgain\n", terminal=True)
    first = [{"role": "user", "content": "Hello"}]
    second = [*first, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "Again"}]
    assert ran.code == 0
    assert model.asked == [("chat", first, {"seed": 1}), ("chat", second, {"seed": 1})]


def test_a_folder_that_is_no_bundle_is_refused(llmc, tmp_path: Path):
    ran = llmc("run", tmp_path, "-p", "Once")
    assert ran.code == 1
    assert ran.err.startswith(f"llmc: error: {tmp_path}: no llmc.json here")
