"""Pieces of messages put together again."""

from collections.abc import Iterable
from typing import Any

from llmc.runtime.tools.calls import ToolCallDelta

Heard = tuple[str, str, list[tuple[str, str]]]


def merged(parsed: Iterable[Any]) -> Heard:
    """Content, reasoning and calls of all the pieces."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for piece in parsed:
        content, reasoning = content + piece.content, reasoning + piece.reasoning
        for delta in piece.calls:
            assert isinstance(delta, ToolCallDelta)
            if delta.id is not None:
                assert delta.index == len(calls) and delta.name is not None
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, reasoning, calls
