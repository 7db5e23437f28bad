import json
from typing import Any

import pytest

from llmc.runtime.server.fleet.prefixes import BLOCK, MOST_BLOCKS, prefix_of

CHAT = "/v1/chat/completions"
LONG = "a system prompt that goes on and on; " * 40


def names(path: str, **body: Any) -> tuple[bytes, ...]:
    return prefix_of(path, json.dumps(body).encode())


def shared(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class TestNames:
    def test_of_a_conversation_go_on_where_its_next_turn_begins(self) -> None:
        turns = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
        first = names(CHAT, messages=turns)
        second = names(CHAT, messages=[*turns, {"role": "assistant", "content": "x" * 999}], temperature=1)
        assert first == second[: len(first)] and len(second) > len(first) > 10

    def test_differ_from_the_first_block_that_differs_on(self) -> None:
        left, right = (names("/v1/completions", prompt=LONG + end * 1000) for end in "ab")
        assert shared(left, right) == (len(LONG) + len("None\n")) // BLOCK
        assert len(set(left) & set(right)) == shared(left, right)  # equal blocks after it have other names

    def test_differ_for_other_scopes(self) -> None:
        for body in ({"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}], "prompt_cache_key": "k"}):
            path = CHAT if "messages" in body else "/v1/completions"
            several = [prefix_of(path, json.dumps(body).encode(), scope) for scope in (None, "ann", "ben", "ann")]
            assert several[1] == several[3] and shared(several[1], several[2]) == shared(*several[:2]) == 0

    def test_differ_for_other_models_tools_and_systems(self) -> None:
        turns: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]}
        tool = {"type": "function", "function": {"name": "f"}}
        several = [
            names(CHAT, **turns),
            names(CHAT, **turns, model="other"),
            names(CHAT, **turns, tools=[tool]),
            names("/v1/messages", **turns, system="be kind"),
        ]
        assert len({one[0] for one in several}) == len(several)

    @pytest.mark.parametrize(
        ("path", "one", "other"),
        [
            (
                "/v1/messages",
                {"system": LONG, "messages": [{"role": "user", "content": LONG}]},
                {
                    "system": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}],
                    "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
                },
            ),
            (
                "/v1/responses",
                {"input": LONG},
                {
                    "input": [
                        {"role": "user", "content": [{"type": "input_text", "text": LONG}]},
                        {
                            "type": "message",
                            "id": "msg_1",
                            "role": "assistant",
                            "status": "completed",
                            "content": [{"type": "output_text", "text": LONG, "annotations": []}],
                        },
                    ]
                },
            ),
            (
                CHAT,
                {"messages": [{"role": "user", "content": LONG}]},
                {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}, {"role": "tool"}]},
            ),
        ],
    )
    def test_are_those_of_the_prompt_in_whichever_words_its_dialect_has_it(
        self, path: str, one: dict[str, Any], other: dict[str, Any]
    ) -> None:
        first, second = names(path, **one), names(path, **other)
        assert len(first) > 10 and second[: len(first)] == first

    def test_of_one_key_begin_alike_whatever_is_asked_and_those_of_two_keys_never(self) -> None:
        turns = [{"role": "user", "content": LONG}]
        plain = names(CHAT, messages=turns)
        first, other = (names(CHAT, messages=turns, prompt_cache_key=key) for key in ("a", "b"))
        short = names(CHAT, messages=[{"role": "user", "content": "x"}], prompt_cache_key="a")
        assert len(first) == len(plain) + 1 and len({*plain, *first, *other}) == 3 * len(plain) + 2
        assert short == first[:1]
        assert names("/v1/messages", messages=turns, prompt_cache_key="a") == names("/v1/messages", messages=turns)

    def test_stay_when_the_mark_of_a_cache_moves_on(self) -> None:
        def turn(text: str, marked: bool) -> dict[str, Any]:
            mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
            return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

        first = names("/v1/messages", messages=[turn(LONG, True)])
        second = names("/v1/messages", messages=[turn(LONG, False), turn("more", True)])
        assert shared(first, second) == len(first) > 10

    def test_of_ollamas_dialect_are_those_of_its_prompts(self) -> None:
        assert len(names("/api/chat", messages=[{"role": "user", "content": LONG}])) > 10
        assert len(names("/api/generate", prompt=LONG)) > 10

    def test_are_bounded_for_prompts_without_end(self) -> None:
        assert len(names("/v1/completions", prompt="x" * (MOST_BLOCKS + 9) * BLOCK)) == MOST_BLOCKS

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/embeddings", json.dumps({"input": LONG}).encode()),
            (CHAT, b"{"),
            (CHAT, b"[" * 100_000),
            (CHAT, b'{"messages": ' + b"[" * 900 + b'"' + LONG.encode() + b'"' + b"]" * 900 + b"}"),
            (CHAT, b"\xff"),
            (CHAT, b"[1]"),
            (CHAT, b'{"messages": []}'),
            ("/v1/completions", json.dumps({"prompt": "short"}).encode()),
        ],
    )
    def test_are_none_where_there_is_no_long_prompt(self, path: str, body: bytes) -> None:
        assert prefix_of(path, body) == ()

    def test_of_what_no_text_can_be_are_names_too(self) -> None:
        assert names("/v1/completions", prompt="\ud800" * BLOCK)
