"""The output of a response as it grows: items of reasoning, text and calls, and the events that tell of them."""

from collections.abc import Callable, Iterator
from typing import Any

from llmc.runtime.api.chat import MessageDelta, ToolCallDelta
from llmc.runtime.server.dialects.tools import read_input
from llmc.runtime.server.models.service import new_id, plain_id

Event = dict[str, Any]
Kind = tuple[str, int]
# Prefixes of ids by kind of item.
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
PREFIXES |= {"custom_tool_call": "ctc_", "custom_tool_call_output": "ctco_"}
REASONING, MESSAGE = ("reasoning", 0), ("message", 0)


class Output:
    """The items of an answer. Events have no ``sequence_number`` yet.

    Args:
        entries: log-probabilities in OpenAI's form; None where they are not asked for.
        begin_call: members of a call's item, by the name that the model wrote.

    Attributes:
        items: as they are so far.
    """

    def __init__(
        self, entries: Callable[[Any], list[dict[str, Any]]] | None, begin_call: Callable[[str], dict[str, Any]]
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._entries = entries
        self._begin_call = begin_call
        self._arguments = ""  # of the open call
        self._held: list[Any] = []  # log-probabilities of tokens that have made no text yet
        self._open: Kind | None = None

    def events(self, delta: MessageDelta) -> Iterator[Event]:
        self._held.extend(delta.logprobs)
        if delta.reasoning:
            yield from self._turn(REASONING)
            yield from self._text("reasoning_text", delta.reasoning)
        if delta.content:
            yield from self._turn(MESSAGE)
            yield from self._text("output_text", delta.content)
        for call in delta.tool_calls:
            yield from self._turn(("function_call", call.index), call)
            self._arguments += call.arguments
            if call.arguments and self.items[-1]["type"] == "function_call":
                self.items[-1]["arguments"] = self._arguments
                yield self._event("response.function_call_arguments.delta", delta=call.arguments)
        if delta.content or delta.reasoning or delta.tool_calls:
            self._held.clear()

    def close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        item, self._open = self.items[-1], None
        if item["type"] == "custom_tool_call":  # whose text is known once its arguments are whole
            item["input"] = read_input(self._arguments)
            yield self._event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
            yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **rest: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **rest}

    def _turn(self, kind: Kind, call: ToolCallDelta | None = None) -> Iterator[Event]:
        """Close the open item and open one of this kind, unless it is the open one."""
        if kind == self._open:
            return
        yield from self.close()
        self._open, self._arguments = kind, ""
        item = _item(kind[0]) if call is None else self._call_item(call)
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}
        if call is None:
            part = _part(kind[0])
            yield self._event("response.content_part.added", content_index=0, part=part)
            item["content"].append(part)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        logprobs = {}
        if kind == "output_text":
            found = self._entries(tuple(self._held)) if self._entries is not None else []
            part["logprobs"].extend(found)
            logprobs = {"logprobs": found}
        yield self._event(f"response.{kind}.delta", content_index=0, delta=text, **logprobs)

    def _call_item(self, call: ToolCallDelta) -> dict[str, Any]:
        begun = self._begin_call(call.name or "")
        kind = begun["type"]
        own = {"input": ""} if kind == "custom_tool_call" else {"arguments": "", "status": "in_progress"}
        return {"id": new_id(PREFIXES[kind]), **begun, "call_id": f"call_{plain_id(call.id or '')}", **own}


def _item(kind: str) -> dict[str, Any]:
    item = {"id": new_id(PREFIXES[kind]), "type": kind, "status": "in_progress"}
    own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {**item, **own, "content": []}


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
