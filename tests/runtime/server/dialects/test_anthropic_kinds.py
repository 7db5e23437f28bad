"""Kinds that are for Anthropic's servers, hints that the model cannot follow, and turns that follow each other."""

import typing
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic.types.beta import (
    BetaContentBlockParam,
    BetaSystemMessageParam,
    BetaToolResultBlockParam,
    BetaToolUnionParam,
)
from anthropic.types.beta.message_create_params import MessageCreateParamsBase

from llmc.runtime.server.dialects.anthropic import FOREIGN, MessageRequest
from llmc.runtime.text.chat_template import ChatTemplate

USER: dict[str, Any] = {"role": "user", "content": "Write a function."}
BODY: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 2}
VERSION = {"anthropic-version": "2023-06-01"}
TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
READ = {"text", "image", "document", "search_result", "thinking", "compaction", "tool_use", "tool_result"}
# Of a message's or a request's own part: a promise about the answer, a transport, and what is answered with details.
REFUSED = {"compaction", "thread"}


def ask(http: httpx.Client, path: str = "/v1/messages", **given: Any) -> tuple[Any, set[str]]:
    """The answer, and the names in its header."""
    answer = http.post(path, json={**BODY, **given}, headers=VERSION)
    assert answer.status_code == 200, answer.text
    return answer.json(), set(filter(None, answer.headers.get("x-llmc-ignored", "").split(", ")))


def count(http: httpx.Client, messages: list[Any], **given: Any) -> int:
    body = {"model": given.pop("model", "able"), "messages": messages, **given}
    answer = http.post("/v1/messages/count_tokens", json=body, headers=VERSION)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def kinds(hint: Any) -> set[str]:
    """The types of the objects that a hint of the official client's allows, or that it holds."""
    if hasattr(hint, "__total__") or hasattr(hint, "model_fields"):  # a TypedDict or a model of pydantic
        fields = getattr(hint, "model_fields", None)
        kind = fields["type"].annotation if fields else typing.get_type_hints(hint)["type"]
        while not isinstance(kind, str):
            kind = typing.get_args(kind)[0]
        return {kind}
    return {kind for part in typing.get_args(hint) for kind in kinds(part)}


def test_every_kind_of_the_official_client_is_read_or_left_out():
    tools = kinds(BetaToolUnionParam) - {"custom"}
    asked = {**BODY, "tools": [{"type": kind, "name": kind} for kind in tools]}
    assert len(tools) > 20 and not MessageRequest.model_validate(asked).tools_offered
    results, system = (
        typing.get_type_hints(each)["content"] for each in (BetaToolResultBlockParam, BetaSystemMessageParam)
    )
    blocks = kinds(BetaContentBlockParam) | kinds(results) | kinds(system)
    assert len(blocks) > 20 and {kind for kind in blocks if not FOREIGN.fullmatch(kind)} == READ | {"tool_reference"}


def test_every_parameter_of_the_official_client_is_known():
    known = {field.alias or name for name, field in MessageRequest.model_fields.items()} | MessageRequest.IGNORED
    assert typing.get_type_hints(MessageCreateParamsBase).keys() - known == REFUSED


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_effort_of_a_model_without_thoughts_is_named(http, effort):
    assert ask(http, output_config={"effort": effort})[1] == {"output_config.effort"}


@pytest.mark.parametrize(
    ("thinking", "named"),
    [
        ({"type": "adaptive"}, {"thinking"}),
        ({"type": "enabled", "budget_tokens": 1024}, {"thinking"}),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, {"thinking"}),
        ({"type": "between_tools"}, {"thinking", "thinking.type"}),
        ({"type": "disabled"}, set()),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_model_without_thoughts_keeps_any_bound_of_them(http, thinking, named, goes_on):
    messages = [USER, {"role": "assistant", "content": "def"}] if goes_on else [USER]
    answer, ignored = ask(http, messages=messages, thinking=thinking, max_tokens=1025, stop_sequences=["e", "a", " "])
    assert ignored == named and {block["type"] for block in answer["content"]} <= {"text"}


def test_thoughts_that_are_left_out_are_empty_blocks(able_anthropic):
    given: dict[str, Any] = {"model": "able", "messages": [USER], "max_tokens": 24, "extra_body": {"temperature": 0}}
    thinking: Any = {"type": "enabled", "budget_tokens": 6, "display": "omitted"}
    whole = able_anthropic.messages.create(thinking=thinking, **given).content
    with able_anthropic.messages.stream(thinking=thinking, **given) as stream:
        streamed = stream.get_final_message().content
    shown = able_anthropic.messages.create(thinking={**thinking, "display": "summarized"}, **given).content
    assert whole[0].thinking == streamed[0].thinking == "" != shown[0].thinking
    assert whole[1].text == streamed[1].text == shown[1].text


def test_parameters_for_anthropics_servers_are_named(http):
    given = {
        "context_management": {
            "edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 1}}]
        },
        "container": {"skills": []},
        "mcp_servers": [{"type": "url", "url": "https://mcp.example", "name": "m"}],
        "service_tier": "auto",
        "metadata": {"user_id": "a", "trace": "b"},
        "output_config": {"task_budget": {"type": "tokens", "total": 9}},
        "betas": ["a-2026-01-01"],
    }
    named = {*given.keys() - {"metadata", "output_config"}, "trace", "task_budget"}
    assert ask(http, **given)[1] == named


def test_tools_of_anthropics_own_are_left_out_and_named(able_http):
    given = [
        {"type": kind, "name": kind[:-9]} for kind in sorted(kinds(BetaToolUnionParam) - {"custom", "mcp_toolset"})
    ]
    tools = [SEARCH, TOOL, {"type": "mcp_toolset", "mcp_server_name": "m"}]
    _, named = ask(able_http, model="able", tools=tools)
    assert named == {"tools.web_search_20250305", "tools.mcp_toolset"}
    assert count(able_http, [USER], tools=[*given, *tools]) == count(able_http, [USER], tools=[TOOL])
    assert count(able_http, [USER], tools=given) == count(able_http, [USER])


@pytest.mark.parametrize("tools", [[SEARCH], [SEARCH, TOOL]])
def test_a_tool_that_cannot_be_run_is_refused_where_it_is_forced(able_http, tools):
    body = {**BODY, "model": "able", "tools": tools, "tool_choice": {"type": "tool", "name": "web_search"}}
    answer = able_http.post("/v1/messages", json=body, headers=VERSION)
    assert answer.status_code == 400 and "web_search_20250305" in answer.json()["error"]["message"]
    if len(tools) == 1:
        answer = able_http.post("/v1/messages", json={**body, "tool_choice": {"type": "any"}}, headers=VERSION)
        assert answer.status_code == 400 and "tool_choice" in answer.json()["error"]["message"]


def test_blocks_of_anthropics_own_are_left_out_and_named(able_http):
    foreign = [{"type": kind} for kind in sorted(kinds(BetaContentBlockParam)) if FOREIGN.fullmatch(kind)]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    text = {"type": "text", "text": "So."}
    used = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a"}
    turns = [
        {"role": "user", "content": [*foreign, pdf, text]},
        {"role": "assistant", "content": foreign},
        {"role": "assistant", "content": [text, *foreign, used]},
        {"role": "user", "content": [{**result, "content": [text, pdf, *foreign]}, *foreign]},
        {"role": "user", "content": [pdf]},
    ]
    plain = [
        {"role": "user", "content": "So."},
        {"role": "assistant", "content": [text, used]},
        {"role": "user", "content": [{**result, "content": "So."}]},
    ]
    assert count(able_http, turns, tools=[TOOL]) == count(able_http, plain, tools=[TOOL])
    _, named = ask(able_http, model="able", messages=turns, tools=[TOOL])
    assert {"messages.content.document", "messages.content.server_tool_use"} <= named


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
            "T\nd",
        ),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}}, "d"),
        ({"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "d"}]}, "T\ns\nd"),
    ],
)
def test_documents_that_are_text_are_read(able_http, block, text):
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    turns = [{"role": "user", "content": [result, block]}]
    assert count(able_http, turns) == count(
        able_http, [{"role": "user", "content": [{**result, "content": text}, {"type": "text", "text": text}]}]
    )


def test_a_thread_is_refused_in_the_words_that_clients_compare(able_http):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = able_http.post("/v1/messages?beta=true", json={**BODY, "thread": thread}, headers=VERSION)
        details = answer.json()["error"]["details"]
        assert answer.status_code == 400
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("streams", [False, True])
def test_the_clients_tool_runner_goes_on_without_a_thread(able_anthropic, streams):
    results = []

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add."""
        results.append(a)
        return "3"

    runner = able_anthropic.beta.messages.tool_runner(
        model="able",
        max_tokens=100,
        messages=[USER],  # type: ignore[list-item]
        tools=[add],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        stream=streams,
    )
    answers = [each.get_final_message() if streams else each for each in runner]  # type: ignore[union-attr]
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 2 and results


ANSWER = {"role": "assistant", "content": "a"}
CALL = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "2"}


@pytest.mark.parametrize(
    ("turns", "one"),
    [
        ([USER, ANSWER, ANSWER, USER], [USER, {**ANSWER, "content": "aa"}, USER]),
        ([USER, USER], [{**USER, "content": [{"type": "text", "text": USER["content"]}] * 2}]),
        (
            [USER, ANSWER, {**ANSWER, "content": [CALL]}, {**ANSWER, "content": [{**CALL, "id": "c2"}]}],
            [USER, {**ANSWER, "content": [{"type": "text", "text": "a"}, CALL, {**CALL, "id": "c2"}]}],
        ),
        ([USER, {**ANSWER, "content": "x"}, {**ANSWER, "content": "y"}], [USER, {**ANSWER, "content": "xy"}]),
        (
            [USER, {**ANSWER, "content": [{"type": "thinking", "thinking": "t"}]}, {**ANSWER, "content": [CALL]}, USER],
            [USER, {**ANSWER, "content": [{"type": "thinking", "thinking": "t"}, CALL]}, USER],
        ),
    ],
)
def test_turns_that_follow_each_other_are_one(able_http, turns, one):
    if turns[-1]["role"] == "assistant" and isinstance(turns[-1]["content"], list):
        turns, one = (
            [*given, {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "c2"}]}] for given in (turns, one)
        )
    assert count(able_http, turns, tools=[TOOL]) == count(able_http, one, tools=[TOOL])


SHOWS_ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (SHOWS_ALL, "<system>r\ns<user>a<system>t<assistant>b<user>c"),
        (FIRST_ALONE, "<system>r\ns<user>a\nt<assistant>b<user>c"),
        (REFUSES, "<system>r\ns<user>a\nt<assistant>b<user>c"),
    ],
)
def test_a_system_message_in_the_middle_is_shown(source, wanted):
    template = ChatTemplate({"default": source}, {})
    turns = [("system", "s"), ("user", "a"), ("system", "t"), ("assistant", "b"), ("user", "c")]
    body = MessageRequest(
        **{**BODY, "system": "r", "messages": [{"role": role, "content": content} for role, content in turns]}
    )
    assert template.render(body.fit(body.plain(), template)) == wanted


def test_a_system_message_ends_where_clear_at_says(able_http):
    brief = {"role": "system", "content": [{"type": "text", "text": "Be brief."}], "clear_at": "next_user_message"}
    assert count(able_http, [USER, brief, ANSWER, USER]) == count(able_http, [USER, ANSWER, USER])
    assert count(able_http, [USER, brief]) > count(able_http, [USER])


def test_the_billing_header_of_claude_code_is_not_shown(able_http):
    mark = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cch=a1b2c;"}
    brief = {"type": "text", "text": "Be brief."}
    assert count(able_http, [USER], system=[mark, brief]) == count(able_http, [USER], system="Be brief.")


def test_output_format_is_a_form_too(able_http):
    form = {"type": "json_schema", "schema": {"enum": [1, 2]}}
    answer, _ = ask(able_http, model="able", output_format=form, max_tokens=8)
    assert answer["content"][0]["text"] in ("1", "2")
