"""An answer on its way from a replica to the client; another replica may give it as long as nothing of it was sent."""

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import event

LOST = "the replica that computed the answer was lost in the middle of it; ask again"


class Answer:
    """Takes what a replica sends in ASGI's messages. ``scope``: of the request, whose route says how an error ends a
    stream.

    Attributes:
        started: the client has some of the answer.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = False
        self._scope = scope
        self._send = send
        self._head: Message = {}
        self._events = 0

    async def take(self, message: Message) -> None:
        """Send a message; status and headers wait for the first bytes of the body."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self.started:
            self.started = True
            await self._send(self._head)
        self._events += message["body"].count(b"\n\n")
        await self._send(message)

    async def break_off(self) -> None:
        """End an answer that nobody finishes: a stream with an error, anything else by closing the connection."""
        if "text/event-stream" not in Headers(raw=self._head["headers"]).get("content-type", ""):
            raise ConnectionError(LOST)
        ended = make_failure(self._scope, ApiError(500, LOST, code="replica_lost"), self._events)
        await self._send({"type": "http.response.body", "body": ended, "more_body": False})


def make_failure(scope: Scope, error: ApiError, number: int) -> bytes:
    """The event that ends a stream with an error, in the dialect of the route. ``number``: events before it."""
    if scope["path"].startswith("/v1/messages"):
        return event(error.anthropic_body(scope.get("state", {}).get("request_id")), "error")
    if scope["path"].startswith("/v1/responses"):
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event({**told, "sequence_number": number}, "error")
    return event(error.body)
