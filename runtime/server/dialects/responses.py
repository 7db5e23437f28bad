"""OpenAI's responses: items in, items out, and conversations that go on from a stored response."""

import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Discriminator, Field, JsonValue, Tag
from starlette.concurrency import run_in_threadpool

from llmc.errors import LlmcError
from llmc.runtime import Model, SamplingParams
from llmc.runtime.api.chat import ChatHandle, ChatResult, ToolCall
from llmc.runtime.server.dialects.openai import logprob_entries
from llmc.runtime.server.dialects.openai_chat import (
    Effort,
    OpenAIChat,
    Schema,
    TextFormat,
    add_variables,
    count_thoughts,
    effort_budget,
    write_input,
)
from llmc.runtime.server.dialects.response_events import PREFIXES, Event, Output
from llmc.runtime.server.dialects.tools import AnyTool, Toolbox, ToolChoice, write_name
from llmc.runtime.server.http.bodies import Asked, Body, Other, Verbosity
from llmc.runtime.server.http.call import Called, apart
from llmc.runtime.server.http.errors import ApiError, from_llmc, no_route, rename_place
from llmc.runtime.server.http.images import DataUrl, decode_base64, make_content
from llmc.runtime.server.http.streams import event, make_answer, unless_long
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.response_store import Item, make_stored, read
from llmc.runtime.server.models.service import Served, Service, new_id, plain_id
from llmc.runtime.server.turn import Turn

EFFORT = "reasoning.effort"
router = APIRouter(tags=["OpenAI"])
Status = Literal["in_progress", "completed", "incomplete"]
# Codes of OpenAI's failed responses, by the status that the error would have had before the first event.
FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


# ------------------------------------------------------------------------------------------------------------ request


class InputText(Body):
    IGNORED = frozenset({"prompt_cache_breakpoint"})
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    IGNORED = frozenset({"annotations", "logprobs", "parsed"})  # the client writes what it parsed into its objects
    type: Literal["output_text"]
    text: str


class OutputRefusal(Body):
    type: Literal["refusal"]
    refusal: str


class InputImage(Body):
    """An image, for models that see."""

    IGNORED = frozenset({"detail", "prompt_cache_breakpoint"})
    type: Literal["input_image"]
    image_url: DataUrl


Part = Annotated[InputText | OutputText | OutputRefusal | InputImage, Field(discriminator="type")]
ResultPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class MessageItem(Body):
    """A message, of whoever asks or of an earlier answer."""

    IGNORED = frozenset({"phase"})
    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    status: Status | None = None


class CallItem(Body):
    IGNORED = frozenset({"async", "caller", "created_by", "parsed_arguments"})
    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status | None = None


class CustomCallItem(Body):
    """A call of a custom tool, shown to the model as the call of a function."""

    IGNORED = frozenset({"async", "caller", "created_by", "status"})
    type: Literal["custom_tool_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(Body):
    IGNORED = frozenset({"caller", "created_by", "name", "namespace"})
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str | None = None
    call_id: str = ""
    output: str | list[ResultPart]
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Thoughts of an earlier answer. What other servers summed up or encrypted, templates do not show."""

    IGNORED = frozenset({"summary", "encrypted_content"})
    type: Literal["reasoning"]
    id: str | None = None
    content: list[ReasoningText] | None = None
    status: Status | None = None


class ToolsItem(Body):
    """Tools that come with the conversation."""

    IGNORED = frozenset({"call_id", "execution", "status"})
    type: Literal["additional_tools", "tool_search_output"]
    id: str | None = None
    role: Literal["developer"] | None = None
    tools: list[AnyTool]


class ReferenceItem(Body):
    """An item of a stored response, or of what it answered."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _kind(item: Any) -> str:
    """The type of an item; messages and references need not name theirs."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return ":item_reference" if isinstance(item, dict) and item.keys() == {"id"} else ":message"
    return f":{SAME_FORM.get(kind, 'other') if isinstance(kind, str) else 'other'}"


# Kinds of items by their types.
SAME_FORM = {
    **{name: name for name in ("message", "function_call", "custom_tool_call", "reasoning", "item_reference")},
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "function_call_output"),
    **dict.fromkeys(("additional_tools", "tool_search_output"), "additional_tools"),
}
AnyItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | ToolsItem | ReferenceItem | Other
InputItem = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[CallItem, Tag(":function_call")]
    | Annotated[CustomCallItem, Tag(":custom_tool_call")]
    | Annotated[CallOutputItem, Tag(":function_call_output")]
    | Annotated[ReasoningItem, Tag(":reasoning")]
    | Annotated[ToolsItem, Tag(":additional_tools")]
    | Annotated[ReferenceItem, Tag(":item_reference")]
    | Annotated[Other, Tag(":other")],
    Discriminator(_kind),
]


class ObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Schema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class TextConfig(Body):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat | None, Field(discriminator="type")] = None
    verbosity: Verbosity = None


class Reasoning(Body):
    """Thoughts, by OpenAI's words for effort; nobody sums them up, for they are given as they are."""

    IGNORED = frozenset({"context", "generate_summary", "mode", "summary"})
    effort: Effort | None = None


class Prompted(Asked):
    """The members that make the prompt."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def conversation(self, service: Service, owner: str | None) -> tuple[list[Item], list[dict[str, Any]]]:
        """The new items of the conversation, as they are kept, and all messages as chat templates read them.
        Raises ApiError: there are no items, or ``owner`` has not stored what they go on from."""
        if isinstance(self.input, str):
            items = [_name_item(MessageItem(role="user", content=self.input))]
        else:
            items = list(self._read_items(self.input, service, owner))
        if not items and self.previous_response_id is None:
            raise ApiError(400, "input holds no items, expected one at least", param="input")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        before = service.responses.conversation(owner, self.previous_response_id)
        return items, [*system, *plain([*before, *items])]

    def _read_items(self, given: Sequence[AnyItem], service: Service, owner: str | None) -> Iterator[Item]:
        stored: dict[str, Item] = {}
        if ids := {item.id for item in given if isinstance(item, ReferenceItem)}:
            stored = service.responses.items(owner, ids)
        for number, item in enumerate(given):
            if isinstance(item, Other):
                self.ignore(f"input.{item.type}")
            elif isinstance(item, ReferenceItem):
                if item.id not in stored:
                    said = f"no item {item.id[:80]!r} is stored; give the item itself"
                    raise ApiError(404, said, param=f"input[{number}]", code="item_not_found")
                yield stored[item.id]
            elif not isinstance(item, ToolsItem):
                yield _name_item(item)

    @property
    def needs_stored(self) -> bool:
        """True if it goes on from what is stored."""
        items = () if isinstance(self.input, str) else self.input
        return self.previous_response_id is not None or any(isinstance(item, ReferenceItem) for item in items)

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools that the model is offered. Raises ApiError: one that is forced or allowed is not there."""
        items = enumerate(() if isinstance(self.input, str) else self.input)
        later = {f"input[{at}].tools": item.tools for at, item in items if isinstance(item, ToolsItem)}
        return Toolbox({"tools": self.tools or (), **later}, self.tool_choice, self.ignore)

    def make_arguments(self, model: Model) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.chat_tokens` beside the messages.
        Raises ApiError: ``tool_choice`` allows a tool that is not there."""
        tools = self.toolbox.plain()
        offered = tools is not None
        variables = add_variables(
            model, {}, self.effort, self.verbosity, offered, self.ignore, "text.verbosity", EFFORT
        )
        return {"tools": tools, "chat_template_kwargs": variables}

    @property
    def verbosity(self) -> Verbosity:
        return self.text.verbosity if self.text else None

    @property
    def effort(self) -> str | None:
        """OpenAI's word for how long the model may think."""
        return self.reasoning.effort if self.reasoning else None


class ResponseRequest(OpenAIChat, Prompted):
    IGNORED = frozenset(
        {"access_programs", "background_options", "client_metadata", "context_management", "image", "max_tool_calls"}
        | {"prompt_cache_options", "service_tier", "stream_options"}
    )
    store: Annotated[bool | None, Field(description="keep it for previous_response_id; true by default")] = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    background: Literal[False] | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream_chat` beside the messages.
        Raises ApiError: parameters contradict each other."""
        for name in self.include or ():
            if name != LOGPROBS:
                self.ignore(f"include.{name}")
        if self.parallel_tool_calls is False and not self.toolbox.offered:
            self.ignore("parallel_tool_calls")
        return {
            **self.sampling(
                max_tokens=self.max_output_tokens,
                stop=self.stop,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
                logit_bias=self.logit_bias,
                on_overflow="truncate_left" if self.truncation == "auto" else None,
                json_schema=self._schema(),
            ),
            "tool_choice": self.toolbox.choice,
            "tool_format": self.tool_format,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "ignored": lambda place: self.ignore(rename_place(place, self.toolbox.names)),
        }

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    @property
    def names(self) -> dict[str, str]:
        """This dialect's names of llmc's parameters, as the request has them."""
        return NAMES | self.form_names | self.toolbox.names

    @property
    def form_names(self) -> dict[str, str]:
        is_object = self.text is not None and isinstance(self.text.format, ObjectFormat)
        return {"json_schema": "text.format"} if is_object else super().form_names

    def _schema(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if isinstance(wanted, SchemaFormat):
            return wanted.schema_
        return {"type": "object"} if isinstance(wanted, ObjectFormat) else None


# This dialect's names of llmc's parameters.
NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "json_schema": "text.format.schema"}
LOGPROBS = "message.output_text.logprobs"
# Sampling parameters that a response names.
PARAMETERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
DECIDING = (
    "min_p",
    "mirostat",
    "num_beams",
    "top_k",
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
)  # whether it draws
# Members that a response copies from its request.
ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "safety_identifier", "user")


def _name_item(item: MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem) -> Item:
    """An item as it is kept, with an id, and a message's text as a part."""
    status = {} if isinstance(item, CustomCallItem) else {"status": "completed"}
    found = {"id": new_id(PREFIXES[item.type]), **status, **item.model_dump(exclude_none=True)}
    if isinstance(item, ReasoningItem):
        return {"summary": [], **found}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = [{"type": kind, "text": item.content}] if isinstance(item.content, str) else found["content"]
        found["content"] = [({"annotations": []} if part["type"] == "output_text" else {}) | part for part in parts]
    return found


def plain(items: Iterable[Item]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in items:
        if item["type"] in ("function_call_output", "custom_tool_call_output"):
            output = (
                item["output"] if isinstance(item["output"], str) else make_content(map(_read_part, item["output"]))
            )
            found.append({"role": "tool", "tool_call_id": plain_id(item["call_id"]), "content": output})
        elif item["type"] == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": make_content(map(_read_part, item["content"]))})
        else:
            _add_answer(found, item)
    return found


def _add_answer(found: list[dict[str, Any]], item: Item) -> None:
    """Add an item of an answer to the message that it belongs to; thoughts after text or calls begin another one."""
    last = found[-1] if found else {}
    goes_on = last.get("role") == "assistant" and not (
        item["type"] == "reasoning" and (last["content"] or "tool_calls" in last)
    )
    if not goes_on:
        found.append(last := {"role": "assistant", "content": ""})
    if item["type"] == "message":
        last["content"] += _text(item["content"])
    elif item["type"] == "reasoning":
        last["reasoning_content"] = last.get("reasoning_content", "") + _text(item.get("content") or "")
    else:
        arguments = write_input(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
        call = ToolCall(plain_id(item["call_id"]), write_name(item["name"], item.get("namespace")), arguments)
        last.setdefault("tool_calls", []).append(call.to_dict())


def _read_part(part: dict[str, Any]) -> str | bytes:
    return decode_base64(part["image_url"], "input") if part["type"] == "input_image" else _text([part])


def _text(content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


# ------------------------------------------------------------------------------------------------------------- answer


class ResponseTurn(Turn[ResponseRequest, ChatHandle]):
    """A conversation, and the response that answers it."""

    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        if self.body.store and not self.service.responses.keeps:
            raise ApiError(400, "store is true, but this server keeps no responses; set it to false", param="store")
        self.body.admit(self.call, self.service)

        def read_body() -> tuple[list[Any], dict[str, Any]]:
            self._items, messages = self.body.conversation(self.service, self.call.client.name)
            return [messages], self.body.arguments()

        return await (apart if self.body.needs_stored else self.call.aside)(read_body)

    def fit(self, prompt: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {**arguments, **self.body.make_arguments(self.model)}
        budget = effort_budget(self.model, self.body.effort, given, self.body.ignore, EFFORT)
        return prompt, {"reasoning_budget": budget, **given}

    def _head(self) -> dict[str, Any]:
        body = self.body
        asked = {name: value for name in (*PARAMETERS, *DECIDING) if (value := getattr(body, name)) is not None}
        params = SamplingParams.from_defaults(self.model.manifest.generation, **asked)
        text = body.text or TextConfig()
        given = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "max_tool_calls", "usage")),
            **{name: getattr(body, name) for name in ECHOED},
            **{name: getattr(params, name) for name in PARAMETERS},
            "metadata": body.metadata or {},
            "model": self.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.effort, "summary": None},
            "service_tier": "default",
            "background": False,
            "store": body.store is not False and self.service.responses.keeps,
            "text": {"format": given, "verbosity": body.verbosity or "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.toolbox.kept],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
        }

    async def pieces(self) -> AsyncIterator[Event]:
        """The events of the answer; the last of them has the whole response."""
        head = self._head()
        entries = partial(logprob_entries, self.model) if self.body.wants_logprobs else None
        output = Output(entries, self.body.toolbox.begin_call)
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": head}
        try:
            async for delta in self.handle.deltas_async():
                for found in output.events(delta):
                    yield found
            result = await self.handle
        except LlmcError as error:
            for found in output.close("incomplete"):
                yield found
            refusal = from_llmc(error)
            told = {"code": FAILURES.get(refusal.status, "server_error"), "message": refusal.message}
            failed = {**head, "status": "failed", "error": told, "output": output.items}
            yield {"type": "response.failed", "response": failed}
            return
        for found in output.close("incomplete" if result.message.finish_reason == "length" else "completed"):
            yield found
        response = await run_in_threadpool(self._finish, head, output, result)
        yield {"type": f"response.{response['status']}", "response": response}

    def _finish(self, head: dict[str, Any], output: Output, result: ChatResult) -> dict[str, Any]:
        """The whole response, which is kept where it is to be."""
        usage = result.usage
        cut = result.message.finish_reason == "length"
        response = {
            **head,
            "completed_at": None if cut else int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output.items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": count_thoughts(self.model, result.message)},
                "total_tokens": usage.total_tokens,
            },
        }
        if response["store"]:
            stored = make_stored(self.body.previous_response_id, self._items, response)
            self.service.responses.put(self.call.client.name, response["id"], stored)
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """Events of this dialect, numbered; long ones are encoded in another thread."""
        number = 0
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                numbered = {**piece, "sequence_number": number}
                yield await unless_long(numbered, partial(event, numbered, piece["type"]))
                number += 1

    def result(self) -> Awaitable[dict[str, Any]]:
        return self._whole()

    async def _whole(self) -> dict[str, Any]:
        """The whole response. Raises LlmcError: the request failed."""
        last: Event = {}
        async for piece in self.pieces():
            last = piece
        if last["type"] == "response.failed":
            await self.handle  # which raises
        response: dict[str, Any] = last["response"]
        return response

    async def make_whole(self, result: dict[str, Any]) -> Response:
        return await make_answer(lambda: result, large=self.body.wants_logprobs)


# ------------------------------------------------------------------------------------------------------------- routes


@router.post("/v1/responses")
async def responses(body: Annotated[ResponseRequest, take_body(ResponseRequest)], request: Request) -> Response:
    """Answer a conversation. With ``stream`` the answer comes as server-sent events."""
    return await ResponseTurn(body, request).answer()


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: Annotated[Prompted, take_body(Prompted)], call: Called, service: Served) -> dict[str, Any]:
    """The tokens of the prompt that such a request becomes, before anything of it is dropped."""
    aside = apart if body.needs_stored else call.aside
    _, messages = await aside(partial(body.conversation, service, call.client.name))
    count = await service.count_tokens(
        call, body.model, NAMES, lambda model: model.chat_tokens(messages, **body.make_arguments(model))
    )
    return {"object": "response.input_tokens", "input_tokens": count}


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(request: Request) -> Response:
    """Say that there is no such route, for the address is one of a stored response for other methods."""
    raise no_route(request.scope)


@router.get("/v1/responses/{response_id}")
async def stored_response(response_id: str, call: Called, service: Served) -> Response:
    """A stored response, as it was sent."""
    return Response(service.responses.get(call.client.name, response_id).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, call: Called, service: Served) -> dict[str, Any]:
    """Forget a response. Conversations cannot go on from it, nor from those after it."""
    service.responses.delete(call.client.name, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: str,
    call: Called,
    service: Served,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items that a stored response answered, the conversation before it included."""

    def page() -> dict[str, Any]:
        stored = service.responses.get(call.client.name, response_id)
        items = [*service.responses.conversation(call.client.name, stored.previous), *read(stored.items)]
        return page_of(items if order == "asc" else items[::-1], after, limit)

    return await make_answer(page, large=True)


def page_of(items: list[Item], after: str | None, limit: int) -> dict[str, Any]:
    """Some of the items, from the one after ``after`` on."""
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise ApiError(400, f"after is {after[:80]!r}, which is no item of this response", param="after")
    start = 0 if after is None else names.index(after) + 1
    found = items[start : start + limit]
    ends = names[start : start + limit] or [None]
    more = start + limit < len(items)
    return {"object": "list", "data": found, "first_id": ends[0], "last_id": ends[-1], "has_more": more}
