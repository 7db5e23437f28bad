"""The front of a fleet: hands each request to a replica, and to another one if that is lost before it answers."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from llmc.errors import LlmcError
from llmc.runtime.server.fleet.answers import Answer
from llmc.runtime.server.fleet.calls import BILL, Forwarded, ReplicaLostError, make_call
from llmc.runtime.server.http.call import NOTHING, Client, call_of
from llmc.runtime.server.http.errors import ApiError, from_llmc, refuse
from llmc.runtime.server.http.streams import unless_gone

log = logging.getLogger(__name__)

# Replicas that a request is tried on: one that is lost with its machine, and one that was about to go. A request that
# kills whoever computes it must not bring the fleet down.
ATTEMPTS = 3
# Seconds in which a replica must answer /ready.
ASKED_S = 5.0


class Replicas(Protocol):
    """The replicas as the front sees them."""

    def answer(self, call: Forwarded) -> AsyncGenerator[list[Message], None]:
        """The answer of a replica; closing it cancels the request.
        Raises ReplicaLostError: before or amid the answer; ApiError: 429, as many requests wait as may wait."""


def make_front(replicas: Replicas) -> Starlette:
    """The application that answers by the replicas; keys and limits stand around it, as around theirs they do not."""
    return Starlette(routes=[Route("/health", _health), Mount("/", Front(replicas))])


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


class Front:
    """Hands requests on."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of HTTP; its client's disconnection cancels it at the replica."""
        request = Request(scope, receive)
        answer = Answer(scope, send)
        try:
            call = make_call(scope, await request.body())
            if call.scope["path"] == "/metrics":
                raise ApiError(404, "/metrics would be one replica's; monitor the replicas by Ray's own metrics")
            waiting = self._relay(call, answer, call_of(scope).client)
            if call.scope["path"] == "/ready":  # without a replica it would wait for one
                waiting = asyncio.wait_for(waiting, ASKED_S)
            await unless_gone(request.receive, waiting)
        except (ApiError, LlmcError, asyncio.TimeoutError) as error:
            if not answer.started:
                await refuse(scope, receive, send, _refusal(error))

    async def _relay(self, call: Forwarded, answer: Answer, client: Client) -> None:
        """Send the answer of the first replica that is not lost before it sends any of it."""
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._replicas.answer(call)) as messages:
                    async for several in messages:
                        for message in several:
                            if message["type"] != BILL:
                                await answer.take(message)
                            else:
                                client.take(message["bill"])
                return
            except ReplicaLostError as error:
                log.warning("a replica was lost: %s", error)
                if answer.started:
                    await answer.break_off()
                    return
                client.take(NOTHING)  # what was computed in vain costs nothing
        raise ApiError(503, "the replicas that tried to answer were lost; try again later", retry_after_s=1)


def _refusal(error: ApiError | LlmcError | asyncio.TimeoutError) -> ApiError:
    if isinstance(error, asyncio.TimeoutError):
        return ApiError(503, f"no replica answered within {ASKED_S:g} s; try again later", retry_after_s=1)
    return from_llmc(error)
