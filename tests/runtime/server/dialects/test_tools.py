"""Tools that are no plain functions: namespaces are read, custom tools are functions of a text, others left out."""

import json
from typing import Any, get_args

import httpx2 as httpx
import pytest
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent, ToolParam
from pydantic import TypeAdapter

from llmc.runtime.server.dialects.responses import ResponseRequest
from llmc.runtime.server.dialects.tools import Toolbox, read_input, write_name
from llmc.runtime.server.http.call import Call
from llmc.runtime.server.http.errors import ApiError

GREEDY: dict[str, Any] = {"model": "able", "input": "Write a function.", "max_output_tokens": 100, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "able",
    "messages": [{"role": "user", "content": "Write a function."}],
    "max_tokens": 100,
    "temperature": 0,
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": DIGIT},
    "required": ["a"],
    "additionalProperties": False,
}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, "strict": None, **more}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": f"Tools of {name}.", "tools": list(tools)}


PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
LARK = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}
CODE = {**PATCH, "name": "code", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}}
AGENTS = namespace("agents", function("close", description="Close one."), {**PATCH, "name": "send"})
FORCED_CLOSE = {"tools": [AGENTS, function("add")], "tool_choice": {"type": "function", "name": "close"}}
FORCED_CODE = {"tools": [CODE, function("add")], "tool_choice": {"type": "custom", "name": "code"}}


def box(*tools: dict[str, Any], choice: Any = None, call: Call | None = None) -> Toolbox:
    body = {"input": "a", "tools": list(tools), "tool_choice": choice}
    return ResponseRequest.model_validate(body, context=call).toolbox


def functions(found: Toolbox) -> list[dict[str, Any]]:
    return [each["function"] for each in found.plain() or ()]


def test_tools_of_a_namespace_are_offered_with_its_name_and_its_purpose_once():
    found = box(AGENTS, namespace("other", function("close")), function("close"))
    assert [each["name"] for each in functions(found)] == ["agents__close", "agents__send", "other__close", "close"]
    assert [each.get("description") for each in functions(found)] == [
        "Tools of agents.\nClose one.", "Change files.", "Tools of other.", None]  # fmt: skip
    assert found.begin_call("agents__close") == {"type": "function_call", "name": "close", "namespace": "agents"}
    assert found.begin_call("agents__send")["type"] == "custom_tool_call"


def test_long_names_are_cut_and_stay_apart():
    names = {write_name(f"{'n' * 99}{end}", "s" * 30) for end in "ab"}
    assert len(names) == 2 and all(len(name) == 128 for name in names)
    assert write_name("b" * 30, "a" * 96) == f"{'a' * 96}__{'b' * 30}"


BAD = {**SCHEMA, "properties": {"a": {"type": "string", "pattern": r"\bx"}}}
WORD = {**CODE, "format": {"type": "grammar", "syntax": "regex", "definition": r"\bx"}}
BAD_FUNCTION = {**function("bad"), "parameters": BAD}
CALL = {"type": "function", "function": {"name": "a", "arguments": "{}"}}
CHAT_TOOLS = [{"type": "web_search"}, {"type": "function", "function": {"name": "bad", "parameters": BAD}}]
MESSAGE_TOOLS = [{"type": "bash_20250124", "name": "bash"}, {"name": "bad", "input_schema": BAD}]


@pytest.mark.parametrize(
    ("path", "given", "places"),
    [
        ("chat/completions", {"tools": CHAT_TOOLS}, {"tools[1].function.parameters"}),
        ("messages", {"tools": MESSAGE_TOOLS}, {"tools[1].input_schema"}),
        ("responses", {"tools": [{"type": "mcp"}, namespace("n", function("a"), BAD_FUNCTION), BAD_FUNCTION, WORD]},
         {"tools[1].tools[1].parameters", "tools[2].parameters", "tools[3].format.definition"}),
        ("responses", {"input": [{"role": "user", "content": "a"},
                                 {"type": "additional_tools", "tools": [BAD_FUNCTION]}]},
         {"input[1].tools[0].parameters"}),
    ],
)  # fmt: skip
def test_places_in_tools_are_those_that_the_client_knows(able_http, path, given, places):
    body = {**(GREEDY if path == "responses" else CHAT), **given}
    answer = able_http.post(f"/v1/{path}", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-llmc-ignored"].split(", ")
    assert {name.removesuffix(".properties.a.pattern") for name in ignored if "[" in name} == places
    forced = {"tool_choice": {"type": "any"} if path == "messages" else "required"}
    error = able_http.post(f"/v1/{path}", json=body | forced, headers={"anthropic-version": "2023-06-01"}).json()[
        "error"
    ]
    assert error["message"].partition(" ")[0] in places and "calls:" not in error["message"]


def test_a_tool_that_comes_twice_is_one_and_another_of_its_name_is_refused():
    again = {"type": "tool_search_output", "tools": [function("close"), AGENTS]}
    tools = {"tools": [function("close")], "input": [{"role": "user", "content": "a"}, again, again]}
    assert len(ResponseRequest.model_validate(tools).toolbox.offered) == 3
    with pytest.raises(ApiError, match="'close' twice"):
        box(function("close"), function("close", description="Another one."))


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
         "messages[0].tool_calls[0].id"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
         "messages[0].content[0].text"),
        ("responses", {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].name"),
    ],
)  # fmt: skip
def test_a_member_that_is_missing_has_its_own_place(able_http, path, given, param):
    answer = able_http.post(f"/v1/{path}", json={**(GREEDY if path == "responses" else CHAT), **given})
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("choice", "offered", "chosen"),
    [
        ({"type": "function", "name": "add"}, 4, "add"),
        ({"type": "function", "name": "close"}, 4, "agents__close"),
        ({"type": "function", "name": "agents__close"}, 4, "agents__close"),
        ({"type": "function", "name": "close", "namespace": "agents"}, 4, "agents__close"),
        ({"type": "custom", "name": "code"}, 4, "code"),
        ({"type": "function", "name": "gone"}, 4, "gone"),  # which the model's room refuses
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, 1, "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]}, 2,
         "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, 0, "auto"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "a"},
                                                            {"type": "custom", "name": "code"}]}, 1, "auto"),
        ("required", 4, "required"),
        (None, 4, "auto"),
    ],
)  # fmt: skip
def test_a_choice_names_tools_as_the_client_does(choice, offered, chosen):
    found = box(function("add"), AGENTS, CODE, {"type": "web_search"}, choice=choice)
    assert (len(found.offered), found.choice) == (offered, chosen)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([function("add")], {"type": "web_search_preview"}, "tool_choice"),
        ([{"type": "web_search"}], "required", "tool_choice"),
        ([{"type": "mcp", "server_label": "a"}], {"type": "mcp", "server_label": "a", "name": "b"}, "tool_choice"),
        ([{"type": "shell"}], {"type": "shell"}, "tool_choice"),
        ([{"type": "web_search"}], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
         "tool_choice"),
        ([function("add")], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]},
         "tool_choice.tools"),
        ([namespace("a", function("f")), namespace("b", function("f"))], {"type": "function", "name": "f"},
         "tool_choice"),
        ([namespace("a", function("f")), function("a__f")], None, "tools"),
        ([LARK], {"type": "custom", "name": "apply_patch"}, "tools"),
        ([LARK], "required", "tools"),
    ],
)  # fmt: skip
def test_a_promise_that_cannot_be_kept_is_refused(tools, choice, param):
    with pytest.raises(ApiError) as refused:
        box(*tools, choice=choice).plain()
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_custom_tool_is_a_function_of_a_text_that_fits_its_format():
    call = Call()
    told, code, patch = functions(box(LARK, CODE, {**PATCH, "name": "patch"}, call=call))
    assert told["parameters"]["properties"] == {"input": {"type": "string"}} and 'start: "x"' in told["description"]
    assert code["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:[0-9]{3})$"}}
    assert patch["description"] == "Change files." and list(call.ignored) == ["tools.apply_patch.format"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a', "a"), ('{"input": "a\\', "a\\"), ("{", ""), ("[1]", "")],
)
def test_the_input_of_a_cut_call_is_what_there_is(arguments, text):
    assert read_input(arguments).rstrip('"') == text


def literal_types(union: Any) -> list[str]:
    """The types of a union of the official package's typed dictionaries."""
    found = []
    for each in get_args(union):
        kind = each.__annotations__.get("type")
        kind = getattr(kind, "__forward_arg__", str(kind))
        found += [part.strip("\"' ") for part in kind.partition("Literal[")[2].partition("]")[0].split(",")]
    return sorted({kind for kind in found if kind})


TOOL_TYPES = literal_types(ToolParam)
ITEM_TYPES = literal_types(ResponseInputItemParam)


def test_the_official_package_has_the_kinds_that_are_tried():
    assert {"namespace", "custom", "web_search", "mcp", "local_shell", "shell", "tool_search"} <= set(TOOL_TYPES)
    assert {"custom_tool_call", "web_search_call", "mcp_call", "compaction", "item_reference"} <= set(ITEM_TYPES)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_the_service_cannot_run_are_left_out_and_named(able_http, stream):
    known = {"function", "namespace", "custom"}
    others = sorted({*TOOL_TYPES, "tool_of_tomorrow"} - known)
    tools = [*({"type": kind, "anything": 1} for kind in others), function("add", output_schema=SCHEMA, examples=[1])]
    body = {**GREEDY, "tools": tools, "max_output_tokens": 4, "stream": stream}
    answer = able_http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-llmc-ignored"].split(", ")
    assert sorted(named) == sorted([*(f"tools.{kind}" for kind in others), "output_schema", "examples"])


def test_items_that_the_service_cannot_read_are_left_out_and_named(able_http):
    read = {"message", "function_call", "function_call_output", "reasoning", "item_reference", "additional_tools"}
    read |= {"custom_tool_call", "custom_tool_call_output", "tool_search_output"}
    others = sorted({*ITEM_TYPES, "item_of_tomorrow"} - read)
    items = [{"type": kind, "id": "x", "call_id": "y", "anything": [1]} for kind in others]
    user = {"role": "user", "content": "Write a function."}
    answer = able_http.post("/v1/responses", json={**GREEDY, "input": [*items, user], "max_output_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers["x-llmc-ignored"].split(", ")) == [f"input.{kind}" for kind in others]
    plain = able_http.post("/v1/responses", json={**GREEDY, "input": [user], "max_output_tokens": 4})
    assert answer.json()["usage"] == plain.json()["usage"]


def counted(able_http: httpx.Client, items: list[Any], tools: list[Any]) -> int:
    body = {"model": "able", "input": items, "tools": tools}
    answer = able_http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


@pytest.mark.parametrize(
    ("given", "kind", "name"), [(FORCED_CLOSE, "function_call", "close"), (FORCED_CODE, "custom_tool_call", "code")]
)
def test_calls_come_back_as_the_client_named_the_tools_and_may_be_sent_again(able_openai, able_http, given, kind, name):
    body = {**GREEDY, **given, "parallel_tool_calls": False}
    whole = able_http.post("/v1/responses", json=body).json()
    TypeAdapter(Response).validate_json(json.dumps(whole), strict=True)
    call = whole["output"][-1]
    assert (call["type"], call["name"], call.get("namespace")) == (kind, name, "agents" if name == "close" else None)
    written = call["input"] if kind == "custom_tool_call" else json.loads(call["arguments"])["a"]
    assert written in range(10) or (written.isdecimal() and len(written) == 3)
    assert [tool["type"] for tool in whole["tools"]] == [tool["type"] for tool in given["tools"]]

    events = list(able_openai.responses.create(stream=True, **body))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_json(event.model_dump_json(exclude_unset=True), strict=True)
    last = events[-1].response.output[-1].model_dump(exclude_none=True)
    assert {k: v for k, v in last.items() if "id" not in k} == {k: v for k, v in call.items() if "id" not in k}
    if kind == "custom_tool_call":
        assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [written]

    user = {"role": "user", "content": "Write a function."}
    result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "3"}]}
    before = counted(able_http, [user], given["tools"])
    assert counted(able_http, [user, call, result], given["tools"]) > before + 5
    first = {**body, "input": [result], "previous_response_id": whole["id"], "tool_choice": "auto"}
    assert able_http.post("/v1/responses", json={**first, "max_output_tokens": 2}).status_code == 200


def test_items_are_referred_to_by_their_ids(able_http):
    user = {"role": "user", "content": "Write a function."}
    first = able_http.post("/v1/responses", json={**GREEDY, "input": [user], "max_output_tokens": 8}).json()
    names = [item["id"] for item in first["output"]]
    references = [{"type": "item_reference", "id": names[0]}, *({"id": name} for name in names[1:])]
    go_on = {"role": "user", "content": "Go on."}
    asked = {**GREEDY, "max_output_tokens": 8}
    by_name = able_http.post("/v1/responses", json={**asked, "input": [user, *references, go_on]}).json()
    by_hand = able_http.post("/v1/responses", json={**asked, "input": [user, *first["output"], go_on]}).json()
    assert by_name["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    gone = able_http.post("/v1/responses", json={**GREEDY, "input": [{"type": "item_reference", "id": "msg_x"}]})
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "input[0]"
    able_http.delete(f"/v1/responses/{by_name['id']}")
    able_http.delete(f"/v1/responses/{by_hand['id']}")
    able_http.delete(f"/v1/responses/{first['id']}")
    assert able_http.post("/v1/responses", json={**GREEDY, "input": references}).status_code == 404


def test_tools_may_come_with_the_conversation(able_http):
    user = {"role": "user", "content": "Write a function."}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [function("add")]},
        {"type": "tool_search_output", "call_id": "x", "status": "completed", "tools": [AGENTS, {"type": "mcp"}]},
    ]
    assert counted(able_http, [user, *items], []) == counted(able_http, [user], [function("add"), AGENTS])


def test_refusals_of_earlier_answers_are_text(able_http):
    said = [{"role": "assistant", "content": [{"type": kind, name: "No."}]} for kind, name in (
        ("refusal", "refusal"), ("output_text", "text"))]  # fmt: skip
    assert counted(able_http, [said[0]], []) == counted(able_http, [said[1]], [])


CUSTOM = {"type": "custom", "custom": {"name": "apply_patch", "description": "Change files."}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
def test_chats_leave_out_tools_that_are_no_functions(able_http, stream):
    tools = [CUSTOM, {"type": "web_search"}, {**ADD, "function": {**ADD["function"], "input_examples": [{"a": 1}]}}]
    answer = able_http.post("/v1/chat/completions", json={**CHAT, "tools": tools, "max_tokens": 4, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-llmc-ignored"] == "input_examples, tools.custom, tools.web_search"
    custom = {"type": "custom", "custom": {"name": "apply_patch"}}
    for choice in (custom, {"type": "web_search"}):
        refused = able_http.post("/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": choice})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [custom]}}
    assert (
        able_http.post("/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": allowed}).status_code == 400
    )


def test_custom_calls_of_earlier_answers_are_shown_as_functions(able_http):
    def prompt_tokens(call: dict[str, Any]) -> int:
        messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **call}]}]
        messages += [{"role": "tool", "tool_call_id": "call_1", "content": "Done."}]
        answer = able_http.post("/v1/chat/completions", json={**CHAT, "messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    same = {"type": "function", "function": {"name": "apply_patch", "arguments": '{"input": "x"}'}}
    assert prompt_tokens({"type": "custom", "custom": {"name": "apply_patch", "input": "x"}}) == prompt_tokens(same)
