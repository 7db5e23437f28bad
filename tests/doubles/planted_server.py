"""A server of OpenAI's API whose every byte a test decides; it runs in a thread and keeps what it was asked."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

RESET = b"\0reset"  # in the place of a piece: the connection ends here
STALL = b"\0stall"  # nothing more comes until the client is gone
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: Any


Answer = Callable[[Asked], Sequence[bytes]]


@dataclass
class ChatServer:
    """``answer`` gives the pieces of the answer to each chat or completion."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    port: int = 0
    connections: int = 0
    left: threading.Event = field(default_factory=threading.Event)  # a client whose answer stalled is gone
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                line, *fields = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(line, headers, json.loads(content) if content else None)
                self.asked.append(asked)
                if not await self.send(reader, writer, [models()] if " /v1/models " in line else self.answer(asked)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: Sequence[bytes]) -> bool:
        """False if the connection is to end."""
        for piece in pieces:
            if piece == STALL:
                await reader.read()
                self.left.set()
                return False
            if piece == RESET:
                writer.transport.abort()
                return False
            writer.write(piece)
            await writer.drain()
        return True


@contextmanager
def planted_server(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[ChatServer]:
    """The server while the block runs."""
    server, ready = ChatServer(answer, scheme="https" if tls else "http"), threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
        server.port = listening.sockets[0].getsockname()[1]
        loop.call_soon(ready.set)
        async with listening:
            await stop.wait()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def chunked(data: bytes) -> bytes:
    """A piece of a body whose length nobody knows beforehand."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(chunk: Any) -> bytes:
    return chunked(b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n")


def text(content: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def whole(asked: Asked) -> list[bytes]:
    """An answer as it should be: all tokens asked for; a word of the prompt counts 1.25 tokens, and the template 7."""
    content = asked.body["messages"][0]["content"] if "messages" in asked.body else asked.body["prompt"]
    count = asked.body["max_tokens"]
    counted = usage(round(1.25 * len(content.split())) + 7, count)
    events = [text(""), *[text(" word")] * count, text("", "length"), counted, b"[DONE]"]
    return [STREAM, *map(event, events), END]


def models() -> bytes:
    return response(200, {"data": [{"id": "double"}]})


def response(status: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
