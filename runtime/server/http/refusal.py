"""Refusals in the format of the dialect that a client speaks, over HTTP and over a WebSocket."""

import json
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from llmc.runtime.server.http.errors import ApiError, response

POLICY = 1008  # the code with which a WebSocket is closed for what its client may not do


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    answer = response(scope, error)
    if scope["type"] == "http":
        return await answer(scope, receive, send)
    if "websocket.http.response" in scope.get("extensions", {}):  # the handshake is answered, as a request would be
        return await WebSocket(scope, receive, send).send_denial_response(answer)
    return await send({"type": "websocket.close", "code": POLICY, "reason": error.message[:120]})


def check_messages(scope: Scope, receive: Receive, send: Send, check: Callable[[str], Awaitable[None]]) -> Receive:
    """``receive`` of a WebSocket whose messages pass ``check``; those that do not are answered with its ApiError."""

    async def receiving() -> Message:
        while True:
            message = await receive()
            if message["type"] != "websocket.receive":
                return message
            try:
                await check(message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace"))
            except ApiError as error:
                await send({"type": "websocket.send", "text": json.dumps(error.body)})
            else:
                return message

    return receiving
