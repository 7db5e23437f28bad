"""``llmc chat``: what is kept of a conversation, what the commands do, what Ctrl-C stops, and what files hold."""

import json
import signal
from pathlib import Path

import pytest
from doubles.talking import FakeHandle, FakeModel, failing
from PIL import Image

from llmc.errors import BundleError, RequestError, UsageError
from llmc.runtime import load

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello 東京"},
    {"role": "assistant", "content": "ab"},
]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr("llmc.runtime.load", fake.load)
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    return fake


@pytest.fixture
def talk(llmc, model: FakeModel, tmp_path: Path):
    """``llmc chat`` with lines on stdin."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "llmc.json").write_text("{}")

    def run(*lines: str, options: tuple[object, ...] = (), terminal: bool = False):
        return llmc("chat", folder, *options, stdin="\n".join(lines).encode() + b"\n", terminal=terminal)

    return run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


# ----------------------------------------------------------------------------------------------------- conversation


@pytest.mark.parametrize("terminal", [False, True])
def test_every_line_is_a_turn_that_remembers_those_before(talk, model: FakeModel, terminal: bool):
    ran = talk("Hello", "", "  ", "東京?", options=("--seed", 1), terminal=terminal)
    assert (ran.code, ran.out) == (0, "ab\nab\n")
    assert model.asked == [[user("Hello")], [user("Hello"), assistant("ab"), user("東京?")]]
    assert model.sampling == [{"seed": 1}] * 2


def test_a_line_with_two_slashes_begins_with_one(talk, model: FakeModel):
    talk("//save x")
    assert model.asked == [[user("/save x")]]


def test_the_system_text_comes_first_and_may_change_and_go(talk, model: FakeModel):
    talk("One", "/system  Shout. ", "Two", "/system", "Three", options=("--system", "Be brief."))
    assert [asked[0] for asked in model.asked] == [system("Be brief."), system("Shout."), user("One")]
    assert model.asked[1][1:] == [user("One"), assistant("ab"), user("Two")]


def test_clear_keeps_the_system_text_only(talk, model: FakeModel):
    talk("One", "/clear", "Two", options=("--system", "Be brief."))
    assert model.asked[1] == [system("Be brief."), user("Two")]


def test_stats_show_the_last_answer_the_context_and_all_answers(talk, model: FakeModel):
    err = talk("/stats", "Hello", "/stats").err.splitlines()
    assert err[0] == "no answer yet"
    assert err[1:] == [
        "9 of 128 tokens, 4.0 tokens/s, first token after 0.50 s; prompt 7 tokens; answer 2 tokens; ended by stop; "
        "seed 42; 2 messages",
        "all answers: 6 tokens; 8 of 21 tokens of prompts were cached",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_status_line_follows_each_answer_on_stderr(talk, model: FakeModel, terminal: bool):
    ran = talk("Hello", "Again", options=("--stats",), terminal=terminal)
    assert ran.out == "ab\nab\n"
    assert ran.err.count("9 of 128 tokens, 4.0 tokens/s, first token after 0.50 s") == 2


# ------------------------------------------------------------------------------------------------------------ /model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another bundle."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "llmc.json").write_text("{}")
    return folder


def test_another_model_goes_on_with_the_conversation(talk, model: FakeModel, other: Path):
    ran = talk("Hello", f"/model {other}", "Again", "/stats", "/model", options=("--threads", 3))
    assert [Path(each["bundle"]).name for each in model.loads] == ["bundle", "other"]
    assert model.loads[1] == {**model.loads[0], "bundle": str(other)}  # with the same options
    assert model.events == ["load", "close", "load", "close"]  # never two at a time
    assert model.asked[1] == [user("Hello"), assistant("ab"), user("Again")]
    assert ran.err.splitlines().count("tiny answers, from tiny") == 2


@pytest.mark.parametrize("error", [BundleError("weights.bin is corrupt"), KeyboardInterrupt()])
def test_a_model_that_cannot_be_loaded_leaves_the_old_one(talk, model: FakeModel, other: Path, error: BaseException):
    model.unloadable[other] = error
    ran = talk("Hello", f"/model {other}", "Again", terminal=True)
    assert model.asked[1] == [user("Hello"), assistant("ab"), user("Again")]
    assert model.events == ["load", "close", "load", "load", "close"]
    assert "error: " in ran.err


def test_a_wrong_name_of_a_model_closes_nothing(talk, model: FakeModel, tmp_path: Path):
    ran = talk(f"/model {tmp_path}/nothing", "Hello", terminal=True)
    assert (model.events, len(model.asked)) == (["load", "close"], 1)
    assert "error: " in ran.err


def test_an_answer_that_cannot_be_streamed_is_printed_whole(talk, model: FakeModel):
    ran = talk("Hello", "Again", options=("--n", 3, "--consensus", "f1"))
    assert ran.out == "ab\nab\n"
    assert model.asked[1][1] == assistant("ab")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--n", 3), "--n asks"),
        (("--num-return-sequences", 2), "--num-return-sequences asks"),
        (("--logprobs", 1), "1,"),
    ],
)
def test_what_gives_several_answers_or_only_json_is_refused(talk, model: FakeModel, options: tuple, found: str):
    ran = talk("Hello", options=options)
    assert (ran.code, ran.out, model.asked) == (2, "", [])
    assert found in ran.err


def test_a_script_ends_at_the_first_answer_that_fails(talk, model: FakeModel):
    model.between = failing(RequestError("the context is full"))
    ran = talk("Hello", "Again")
    assert (ran.code, ran.out, len(model.asked)) == (1, "a\n", 1)
    assert ran.err == "llmc: error: the context is full\n"


def test_a_person_goes_on_after_an_answer_that_fails_without_its_turn(talk, model: FakeModel):
    model.between = failing(RequestError("the context is full"))
    ran = talk("Hello", "Again", terminal=True)
    assert (ran.code, len(model.asked)) == (0, 2)
    assert model.asked[1] == [user("Again")]
    assert "error: the context is full" in ran.err


def test_a_full_context_is_told_with_what_a_chat_can_do(talk, model: FakeModel):
    model.encode = list
    model.between = lambda handle: failing(RequestError("shorten it"))(handle) if len(model.asked) == 2 else None
    ran = talk("Hello", "a" * 121, "Again", terminal=True)
    found = "error: the conversation has 129 tokens, the context holds 128: /clear forgets what was said; to keep it, "
    assert f"{found}/save FILE and start again with --load FILE and --on-overflow sink" in ran.err
    assert model.asked[2] == [user("Hello"), assistant("ab"), user("Again")]


def test_a_parameter_that_cannot_be_ends_the_talk_for_a_person_too(talk, model: FakeModel):
    model.between = failing(UsageError("top_p", "is 2.0, expected less"))
    ran = talk("Hello", "Again", terminal=True)
    assert (ran.code, len(model.asked)) == (2, 1)
    assert ran.err.endswith("llmc: error: --top-p is 2.0, expected less\n")


@pytest.mark.parametrize("line", ["/bake", "/save", "/load", "/load /no/such/file"])
def test_a_wrong_command_ends_a_script_and_not_a_person(talk, model: FakeModel, line: str):
    assert talk(line, "Hello").code == 2
    assert model.asked == []
    ran = talk(line, "Hello", terminal=True)
    assert (ran.code, model.asked) == (0, [[user("Hello")]])
    assert "error: " in ran.err


def test_a_line_that_does_not_end_is_refused(talk, model: FakeModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmc.cli.reading.MIN_STDIN_BYTES", 10)
    ran = talk("a" * (128 * 64 - 1), "a" * (128 * 64 + 1))
    assert (ran.code, len(model.asked)) == (2, 1)
    assert "stdin has a line of more than 8,192 bytes" in ran.err


def test_a_script_that_is_not_utf8_is_refused(llmc, model: FakeModel, tmp_path: Path):
    (tmp_path / "llmc.json").write_text("{}")
    ran = llmc("chat", tmp_path, stdin=b"Hello\ncaf\xe9\n")
    assert (ran.code, ran.out) == (2, "ab\n")
    assert "stdin is not valid UTF-8 (byte 0xe9 at position 3 of a line)" in ran.err


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "keys", ["\x1b[200~one\ntwo\x1b[201~", "one\\\ntwo", "one\x1b\rtwo"], ids=["paste", "backslash", "alt-enter"]
)
def test_a_question_may_have_several_lines(talk, model: FakeModel, keys: str):
    talk(keys, "/help", terminal=True)
    assert model.asked == [[user("one\ntwo")]]


@pytest.mark.threat("prefix-privacy")
def test_former_questions_come_back_with_the_arrow_keys(
    talk, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    talk("second\\\nline", "third", terminal=True)
    file = tmp_path / "state" / "llmc" / "chat-history"
    assert file.stat().st_mode & 0o777 == 0o600
    talk("\x1b[A\x1b[A\x1b[A", terminal=True)  # two questions back, over the lines of the second
    assert model.asked[-1] == [user("second\nline")]
    file.unlink()
    file.mkdir()
    assert talk("Hello", terminal=True).code == 0


def test_a_conversation_that_is_left_is_kept(talk, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "state" / "llmc" / "last-chat.json"
    talk("/help", terminal=True)
    assert not file.exists()  # nothing was said
    assert f"--load {file} goes on" in talk("Hello", terminal=True).err
    assert json.loads(file.read_text())["messages"] == [user("Hello"), assistant("ab")]


@pytest.mark.parametrize(("expires_s", "asked"), [(60.0, 0), (0.0, 1)])
def test_a_second_ctrl_c_leaves_only_soon_after_the_first(
    talk, model: FakeModel, monkeypatch: pytest.MonkeyPatch, expires_s: float, asked: int
):
    monkeypatch.setattr("llmc.cli.prompt.WARNING_S", expires_s)
    talk("\x03\x03Hello", terminal=True)
    assert len(model.asked) == asked


def test_parameters_change_during_a_talk(talk, model: FakeModel):
    lines = ("/temperature 0.5", "/set top-k 3", "Hello", "/set stop x", "/temperature", "Again", "/set")
    ran = talk(*lines, options=("--seed", 1))
    assert model.sampling == [{"seed": 1, "temperature": 0.5, "top_k": 3}, {"seed": 1, "top_k": 3, "stop": ("x",)}]
    assert ran.err.splitlines()[-1] == "seed is 1, top_k is 3, stop is ('x',)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/temperature -1", "temperature is -1.0, expected"),
        ("/temperature warm", "'warm' is not a valid float"),
        ("/set repeat_penalty 1.1", "repeat_penalty is no parameter; did you mean repetition_penalty?"),
        ("/n 2", "n asks for several outputs"),
        ("/logprobs 2", "which only llmc run with --json shows"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_and_the_talk_goes_on(talk, model: FakeModel, line: str, said: str):
    ran = talk(line, "Hello", terminal=True)
    assert said in ran.err and model.sampling == [{}]


def test_a_model_without_a_chat_template_is_refused_before_anything_is_typed(talk, model: FakeModel):
    class Plain(FakeModel):
        @property
        def chat_template(self) -> None:
            raise RequestError("tiny: the model has no chat template; pass a prompt instead of messages")

        @chat_template.setter
        def chat_template(self, _: None) -> None:
            pass

    model.__class__ = Plain
    ran = talk("Hello")
    assert (ran.code, ran.out, model.asked) == (1, "", [])
    assert "no chat template; pass a prompt instead of messages; llmc run tiny -p TEXT completes" in ran.err


def test_a_saved_conversation_goes_on_where_it_was(talk, model: FakeModel, tmp_path: Path):
    file = tmp_path / "a talk.json"
    saved = talk("Hello 東京", f"/save {file}", options=("--system", "Be brief."))
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == TALK
    assert f"3 messages saved in {file}" in saved.err
    talk("Again", options=("--load", file))
    assert model.asked[-1] == [*TALK, user("Again")]


def test_images_go_with_the_next_question_and_are_saved_by_their_paths(talk, model: FakeModel, tmp_path: Path):
    for name in ("one.png", "two.png"):
        Image.new("RGB", (4, 3)).save(tmp_path / name)
    ran = talk(f"/image {tmp_path}/one.png", f"/image {tmp_path}/two.png", "Which?", "Why?", f"/save {tmp_path}/saved")
    assert ran.err.count("4 x 3 pixels go with the next question") == 2
    parts = [{"type": "image", "image": f"{tmp_path}/{name}.png"} for name in ("one", "two")]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
    assert model.asked[1] == [asked, assistant("ab"), user("Why?")]
    talk("Again", options=("--load", tmp_path / "saved"))
    assert model.asked[-1][0] == asked


def test_what_is_no_image_is_refused_at_once(talk, model: FakeModel, tmp_path: Path):
    (tmp_path / "text").write_text("text")
    ran = talk(f"/image {tmp_path}/text", "Hello", terminal=True)
    assert f"{tmp_path}/text cannot be read" in ran.err
    assert model.asked == [[user("Hello")]]


@pytest.mark.parametrize("content", ["", "text", "[]", '{"messages": []}', "\ud800"])
def test_other_files_are_not_overwritten(talk, model: FakeModel, tmp_path: Path, content: str):
    file = tmp_path / "precious"
    file.write_text(content, encoding="utf-8", errors="surrogatepass")
    before = file.read_bytes()
    ran = talk("Hello", f"/save {file}")
    assert ran.code == 2
    assert f"{file} exists and is not a saved conversation; choose another one" in ran.err
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "precious"}


# ----------------------------------------------------------------------------------------------------------- Ctrl-C


def press(_: FakeHandle | None = None) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_person_sees_the_reasoning_and_a_script_does_not(talk, model: FakeModel, terminal: bool):
    ran = talk("Hello", terminal=terminal)
    assert ran.out == "ab\n" and ("hm" in ran.err) == terminal


def test_ctrl_c_stops_the_answer_and_keeps_what_came(talk, model: FakeModel):
    model.between = press
    ran = talk("Hello", "Again", terminal=True)
    assert (ran.code, ran.out) == (0, "a\na\n")
    assert ran.err.count("(stopped)") == 2
    assert model.asked[1] == [user("Hello"), assistant("a"), user("Again")]


def test_ctrl_c_ends_a_script(talk, model: FakeModel):
    model.between = press
    ran = talk("Hello", "Again")
    assert (ran.code, ran.err.strip(), len(model.asked)) == (130, "interrupted", 1)


# ---------------------------------------------------------------------------------------------------- the real thing


def test_a_script_gets_the_answers_of_the_library(llmc, tiny_bundle: Path, tmp_path: Path):
    """Saved and loaded in another run, the conversation goes on as if it had never been left."""
    greedy = {"temperature": 0, "max_tokens": 12}
    with load(tiny_bundle, self_test=False) as model:
        messages = [system("You are brief, and you answer in Python only."), user("Hello")]
        first = model.chat(messages, **greedy).text
        messages += [assistant(first), user("And then?")]
        second = model.chat(messages, **greedy).text
    options = ("--temperature", 0, "--max-tokens", 12, "--no-self-test")
    file = tmp_path / "saved"
    lines = f"/system {messages[0]['content']}\nHello\n/save {file}\n"
    ran = llmc("chat", tiny_bundle, *options, stdin=lines.encode())
    assert (ran.code, ran.out) == (0, f"{first}\n")
    again = llmc("chat", tiny_bundle, *options, "--load", file, stdin=b"And then?\n")
    assert again.out == f"{second}\n"
