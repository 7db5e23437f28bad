"""gpt-oss's answers: a sequence of messages (reasoning, calls, text), each with a header that names its kind.

https://developers.openai.com/cookbook/articles/openai-harmony
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import literal, schema_of
from llmc.runtime.tools.json_values import stream_value
from llmc.runtime.tools.source import Arguments, Called, Content, Event, Reading, Source, Thought

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
# The ends of a message, and the mark that begins the next one if there is no end.
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = ("<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
# Most characters of a header; with the longest tool name it has about 130.
_MOST_HEADER = 256


@dataclass(frozen=True)
class HarmonyCalls(CallFormat):
    """Messages; one whose header has ``to=functions.NAME`` is a call, with JSON as its body.

    The prompt ends inside the header of the first message, so the output begins with its channel or recipient.
    """

    begin: str = "<|start|>"
    frame: tuple[str, str] = (FINAL, "")

    @property
    def begins(self) -> tuple[str, ...]:
        return (*_NEXT, " to=functions.")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*_NEXT, "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """The rule ``calls``, for the text after the opening mark: one call, which ends the answer."""
        head = f"{literal('assistant')} {spell('<|channel|>')}"
        body = f"{spell('<|constrain|>')} {literal('json')} {spell('<|message|>')}"
        calls = [
            f"call_{i}: {literal(f'commentary to=functions.{tool.name} ')} {body} {schema_of(tool)}"
            for i, tool in enumerate(tools)
        ]
        return "\n".join([f"calls: {head} ({' | '.join(f'call_{i}' for i in range(len(tools)))})", *calls, ""])

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
            f"{json.dumps(given, ensure_ascii=False)}<|call|>"
            for tool, given in calls
        )

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        """Read a message from its header on; False if there is none, and then no event was yielded."""
        header = yield from source.until("<|message|>", _MOST_HEADER)
        if header is None:
            return False
        recipient = _RECIPIENT.search(header)
        if recipient and tools:
            yield Called(recipient[1])
            yield from source.skip_blanks()
            is_json = yield from stream_value(source)  # marks inside its strings end nothing
            if (yield from _read_text(source, None if is_json else Arguments)) and not is_json:
                yield Arguments("{}")
        else:
            yield from _read_text(source, Thought if "<|channel|>analysis" in header else Content)
        source.at += next((len(end) for end in _ENDS if source.rest.startswith(end)), 0)
        return True


def _read_text(source: Source, make: Callable[[str], Event] | None) -> Reading[bool]:
    """Yield the text before the next mark, or skip it; True if there is any."""
    empty, at_mark = True, False
    while not at_mark and not (source.ended and not source.rest):
        piece, at_mark = yield from source.before((*_ENDS, *_NEXT))
        empty = empty and not piece
        if piece and make is not None:
            yield make(piece)
    return empty and at_mark
