"""Streams: JSON in pieces, signs of life, and how a stream ends."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server.http import streams
from llmc.runtime.server.http.streams import HEARTBEAT, EventStream, encode_json, event, in_pieces

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # halves of characters cannot be sent at all
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.integers(1, 3))
def test_what_is_encoded_in_pieces_is_the_same(value, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "PIECE", piece)
        patch.setattr(streams, "SHORT", piece)
        for whole in (value, {5: value}):  # tokens are names of biases
            assert in_pieces(whole) == encode_json(whole)


@pytest.mark.parametrize("end", sorted({c for c in map(chr, range(0x10FFFF)) if len(f"a{c}b".splitlines()) > 1}))
def test_no_reader_of_lines_takes_a_text_for_several(end):
    value = {f"é{end}": [f"{end}x{end}"]}
    for written in (encode_json(value), in_pieces([value]), event(value).decode().rstrip("\n")):
        assert len(written.splitlines()) == 1 and "é" in written
    assert json.loads(encode_json(value)) == value


def test_what_json_does_not_know_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"logprob": float("nan")})


class Talk:
    """A stream and its client.

    Args:
        heard: what the client does about a body.
        heartbeat_s: as the stream's.

    Attributes:
        sent: bodies that came, and what ended: the events, and then what they need.
    """

    def __init__(self, heard: Callable[["Talk", bytes], object], heartbeat_s: float = 0) -> None:
        self.sent: list[bytes] = []
        self.goes_on, self.leaves = asyncio.Event(), asyncio.Event()
        self._heard = heard
        self._held = AsyncExitStack()
        self._held.callback(self.sent.append, b"let go")
        self._heartbeat_s = heartbeat_s

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await self.goes_on.wait()
            yield b"two"
        finally:
            self.sent.append(b"closed")

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self.sent.append(body)
            self._heard(self, body)

    async def __call__(self) -> list[bytes]:
        self.answering = asyncio.current_task()
        await EventStream(self._events(), self._held, self._heartbeat_s)({}, self._receive, self._send)
        return self.sent

    def cancel(self) -> None:
        """Cancel the task that answers."""
        assert self.answering is not None
        self.answering.cancel()


def talked(talk: Talk) -> list[bytes]:
    return asyncio.run(talk())


def test_a_stream_that_says_nothing_gives_signs_of_life_between_its_pieces():
    found = talked(Talk(lambda talk, body: body == HEARTBEAT and talk.goes_on.set(), heartbeat_s=0.001))
    assert found[:2] == [b"one", HEARTBEAT]
    assert [piece for piece in found if piece != HEARTBEAT] == [b"one", b"two", b"closed", b"let go"]


def test_a_client_that_leaves_ends_the_events_and_what_they_need():
    assert talked(Talk(lambda talk, body: talk.leaves.set())) == [b"one", b"closed", b"let go"]


def test_a_server_that_ends_does_not_leave_them_behind_either():
    talk = Talk(lambda talk, body: talk.cancel())
    with pytest.raises(asyncio.CancelledError):
        talked(talk)
    assert talk.sent == [b"one", b"closed", b"let go"]


def test_what_goes_wrong_is_not_swallowed():
    talk = Talk(lambda talk, body: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        talked(talk)
    assert talk.sent == [b"one", b"closed", b"let go"]


def test_signs_of_life_that_cannot_be_sent_leave_no_errors_behind(caplog):
    failed = []

    def heard(talk: Talk, body: bytes) -> None:
        if body == HEARTBEAT:
            failed.append(body)
            if len(failed) == 3:
                talk.goes_on.set()
            raise OSError("the connection is closed")

    talked(Talk(heard, heartbeat_s=0.001))
    gc.collect()  # with which asyncio tells of errors that nobody asked for
    assert len(failed) >= 3 and not caplog.records
