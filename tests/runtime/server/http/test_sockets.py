"""WebSockets: a message is heard whenever it comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from llmc.runtime.server.http.bodies import Body
from llmc.runtime.server.http.sockets import converse

ONE_TWO = ('{"text": "one"}', '{"text": "two"}')


class Said(Body):
    """What a client says."""

    text: str


class Socket:
    """Messages of a client; each is on its way for a moment, in which whoever waits for it must not give up."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._messages: list[dict[str, Any]] = [{"type": "websocket.receive", "text": text} for text in ONE_TWO]

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            return {"type": "websocket.disconnect"}
        message = self._messages.pop(0)
        await asyncio.sleep(0 if message["text"] == ONE_TWO[0] else 0.05)
        return message

    async def send_text(self, text: str) -> None:
        self.sent.append(text)


def test_a_message_that_is_on_its_way_as_an_answer_ends_is_the_next_request():
    socket = Socket()

    async def opened(asked: Said, held: AsyncExitStack) -> AsyncIterator[str]:
        async def events() -> AsyncIterator[str]:
            yield asked.text

        return events()

    asyncio.run(converse(socket, Said, opened))  # type: ignore[arg-type]
    assert socket.sent == ["one", "[DONE]", "two", "[DONE]"]
