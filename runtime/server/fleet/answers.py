"""An answer on its way to the client: another replica may still give it while the client has heard nothing of it."""

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from llmc.runtime.server.anthropic.messages import PING
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import HEARTBEAT, event

# Events that say only that an answer begins. They wait for the next one, so that another replica can begin anew.
OPENINGS = (
    b'"delta":{"role":"assistant","content":""}',
    b"event: message_start\n",
    b"event: content_block_start\n",
    b"event: response.created\n",
    b"event: response.queued\n",
    b"event: response.in_progress\n",
    b"event: response.output_item.added\n",
    b"event: response.content_part.added\n",
)
LOST = "the replica that computed the answer was lost in the middle of it; ask again"


class Answer:
    """Takes what a replica sends in ASGI's messages. ``scope``: of the request, whose route says how an error ends a
    stream.

    Attributes:
        started: the client has the status and headers.
        spoken: it has some of the answer, too.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = False
        self.spoken = False
        self._scope = scope
        self._send = send
        self._events = 0
        self._held: list[Message] = []
        self._streams = False
        self._refused = False

    async def take(self, message: Message) -> None:
        """Send a message, or hold it until it is sure that this replica answers."""
        if message["type"] == "http.response.start":
            self._begin(message)
        elif self._streams and message["body"] in (HEARTBEAT, PING):
            await self._release_start()
            await self._send(message)
        elif self._streams and _is_opening(message):
            self._held.append(message)
        else:
            await self._speak(message)

    def forget(self) -> None:
        """Another replica begins anew."""
        self._held.clear()

    async def break_off(self, error: ApiError | None = None) -> None:
        """End an answer that nobody finishes: a stream with an error, anything else by closing the connection."""
        if not self._streams:
            raise ConnectionError(LOST)
        error = error or ApiError(500, LOST, code="replica_lost")
        ended = make_failure(self._scope, error, self._events)
        await self._send({"type": "http.response.body", "body": ended, "more_body": False})

    def _begin(self, message: Message) -> None:
        streams = message["status"] == 200 and "text/event-stream" in Headers(raw=message["headers"]).get(
            "content-type", ""
        )
        if self.started:  # by a heartbeat of a replica that was lost
            self._refused = not streams
            return
        self._streams = streams
        self._held = [message]

    async def _release_start(self) -> None:
        if not self.started:
            self.started = True
            await self._send(self._held.pop(0))

    async def _speak(self, message: Message) -> None:
        if self._refused:  # a plain error, where the client waits for events
            message = {**message, "body": _name_event(self._scope["path"], message["body"])}
        await self._release_start()
        self.spoken = True
        held, self._held = self._held, []
        for waiting in [*held, message]:
            self._events += waiting.get("body", b"").count(b"\n\n")
            await self._send(waiting)


def make_failure(scope: Scope, error: ApiError, number: int) -> bytes:
    """The event that ends a stream with an error, in the dialect of the route. ``number``: events before it."""
    if scope["path"].startswith("/v1/messages"):
        return event(error.anthropic_body(scope.get("state", {}).get("request_id")), "error")
    if scope["path"].startswith("/v1/responses"):
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event({**told, "sequence_number": number}, "error")
    return event(error.body)


def _name_event(path: str, body: bytes) -> bytes:
    """The body of a refusal as an event."""
    head = b"event: error\n" if path.startswith(("/v1/messages", "/v1/responses")) else b""
    return head + b"data: " + body + b"\n\n"


def _is_opening(message: Message) -> bool:
    events = [event for event in message["body"].split(b"\n\n") if event]
    begun = all(any(opening in event + b"\n" for opening in OPENINGS) for event in events)
    return bool(events) and begun and bool(message.get("more_body"))
