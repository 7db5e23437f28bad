"""A server that streams what a test tells it to, in the wire format of chat completions, with the page in front."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from llmc.runtime.server import page

WAIT = "wait until the gate is open"
BREAK = "end the stream without an end"
PARTS = {"content", "reasoning_content", "tool_calls"}  # of a delta; each counts as a token
DONE = b"data: [DONE]\n\n"


def says(*pieces: str) -> list[Any]:
    """A whole answer of these pieces."""
    return [{"role": "assistant"}, *({"content": piece} for piece in pieces), ends("stop")]


def ends(reason: str) -> dict[str, Any]:
    """The chunk that says why an answer ended."""
    return {"finish_reason": reason}


class ChatServer:
    """The endpoints that the page asks, and what a test sets and reads.

    Attributes:
        script: what is streamed: deltas, seconds to wait, WAIT, BREAK, or a mapping with ``error``.
        refusal: status, error and headers of what is answered instead.
        key: the key to ask for.
        chats: whether the models have chat templates.
        seeing: the models that see images.
        requests: the bodies that came.
        gate: opens what waits.
        gone: set when a client closes its stream early.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_route("/v1/models", self.models)
        self.app.add_route("/v1/chat/completions", self.chat, methods=["POST"])
        page.mount(self.app)
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """Forget what a test set."""
        self.script: list[Any] = says("Hello", " there", ", you", ".")
        self.refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.key: str | None = None
        self.names = ["tiny", "small"]
        self.chats = True
        self.seeing: tuple[str, ...] = ()
        self.requests: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gone = threading.Event()

    def _locked(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        error = {
            "message": "the key is missing or unknown",
            "type": "authentication_error",
            "param": None,
            "code": None,
        }
        return JSONResponse({"error": error}, 401)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        about = {"object": "model", "created": 0, "owned_by": "llmc"}
        listed = [
            {"id": name, **about, "x_llmc": {"chats": self.chats, "sees": name in self.seeing}} for name in self.names
        ]
        return self._locked(request) or JSONResponse({"object": "list", "data": listed})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        if locked := self._locked(request):
            return locked
        self.requests.append(await request.json())
        if self.refusal:
            status, error, headers = self.refusal
            return JSONResponse({"error": error}, status, headers)
        return StreamingResponse(self._stream(list(self.script)), media_type="text/event-stream")

    async def _stream(self, script: list[Any]) -> AsyncIterator[bytes]:
        ended = False
        try:
            yield b": heartbeat\n\n"
            for step in script:
                if step == WAIT:
                    await _opened(self.gate)
                elif step == BREAK:
                    ended = True
                    return
                elif isinstance(step, (int, float)):
                    await asyncio.sleep(step)
                else:
                    yield _event(step if "error" in step else _chunk(step))
            tokens = sum(isinstance(step, dict) and bool(step.keys() & PARTS) for step in script)
            usage = {"prompt_tokens": 12, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 8}}
            yield _event({**_chunk({}), "choices": [], "usage": usage})
            yield DONE
            ended = True
        finally:
            if not ended:
                self.gone.set()


async def _opened(gate: threading.Event) -> None:
    while not gate.is_set():
        await asyncio.sleep(0.01)


def _chunk(step: dict[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in step.items() if name != "finish_reason"}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": step.get("finish_reason")}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "tiny", "choices": [choice]}


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


@contextmanager
def chat_serving() -> Iterator[ChatServer]:
    """Such a server at a free port of this machine."""
    double = ChatServer()
    server = uvicorn.Server(uvicorn.Config(double.app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    double.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield double
    finally:
        double.gate.set()
        server.should_exit = True
        thread.join(10)
