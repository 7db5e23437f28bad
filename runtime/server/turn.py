"""The turn: one request for text in any dialect, submitted, streamed or answered whole, and closed."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request, Response

from llmc.runtime import Handle, Model
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.errors import name_parameters
from llmc.runtime.server.http.streams import EventStream, unless_gone
from llmc.runtime.server.models.service import Service


class TextBody(Protocol):
    """The body of a request for text."""

    model: Any
    """The name that the client gives; None for its first model."""
    stream: Any
    """True if the client asks for the answer in pieces."""

    @property
    def names(self) -> Mapping[str, str]:
        """The dialect's own names of llmc's parameters."""


B = TypeVar("B", bound=TextBody)
H = TypeVar("H", bound=Handle)


class Turn(ABC, Generic[B, H]):
    """A request for text, from its body to its answer; each dialect has a class of its own.

    A prompt is a list of messages, a text or a list of tokens.

    Attributes:
        body: the body of the request, validated.
        name: the model or adapter that answers, resolved here once.
        model: the leased model; set by :meth:`submit`.
        handles: the submitted prompts, in their order.

    Raises:
        ApiError: there is no such model, it generates no text, or the client's key is not for it.
    """

    RAW = False
    """Prompts go to the model without a chat template."""

    model: Model

    def __init__(self, body: B, request: Request) -> None:
        self.body, self.request = body, request
        self.call = call_of(request.scope)
        self.service: Service = request.app.state.service
        self.name = self.service.find_for(self.call, body.model, None)
        self.handles: list[H] = []
        self._base = self.service.pool.base(self.name)
        self._adapter = {"adapter": self.name} if self.name != self._base else {}

    @property
    def handle(self) -> H:
        """The first prompt's handle, which is the only one of a chat."""
        return self.handles[0]

    async def answer(self) -> Response:
        """Submit the request and answer it. The model is held until the answer ends or the client leaves."""
        async with AsyncExitStack() as held:
            await self.submit(held)
            if self.streams:
                return self.stream(held.pop_all())
            return await self.make_whole(await unless_gone(self.request.receive, self.result()))

    async def submit(self, held: AsyncExitStack) -> None:
        """Lease the model and submit the prompts to it, until ``held`` is closed."""
        prompts, arguments = await self.read()
        arguments = self.service.bound_sampling(self.call, arguments, len(prompts), raw=self.RAW)
        self.model = await held.enter_async_context(self.service.pool.lease(self._base))
        client = self.call.client
        self.service.find(client, self.name)  # an adapter may have been unloaded meanwhile
        for prompt in prompts:
            with name_parameters(self.body.names):
                prompt, own = await self.call.aside(partial(self.fit, prompt, arguments))
                own |= self._adapter
                handle = await self.service.submit(client, prompt, own, partial(self.start, prompt, own))
            held.callback(handle.cancel)
            self.handles.append(handle)
            self.check()
        await self.service.wait_turn(client, self.handles)

    @abstractmethod
    async def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Read prompts and sampling arguments from the body. Raises ApiError: parameters contradict each other."""

    def fit(self, prompt: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Fit a prompt and its arguments to the model, which may have a chat template of its own."""
        return prompt, {**arguments}

    def start(self, prompt: Any, arguments: dict[str, Any]) -> H:
        """Submit a prompt to the model."""
        submit: Any = self.model.stream if self.RAW else self.model.stream_chat
        handle: H = submit(prompt, **arguments)
        return handle

    def check(self) -> None:
        """Check what was submitted so far. Raises ApiError: it is too much."""

    # ------------------------------------------------------------------------------------------ the answer

    @property
    def streams(self) -> bool:
        """True if the client asks for the answer in pieces."""
        return self.body.stream is True

    def result(self) -> Awaitable[Any]:
        """The result that :meth:`make_whole` takes."""
        return self.handle

    @abstractmethod
    async def make_whole(self, result: Any) -> Response:
        """The answer as one object."""

    def stream(self, held: AsyncExitStack) -> Response:
        """The answer in pieces; ``held`` is closed after the last one."""
        return EventStream(self.events(), held, self.service.config.heartbeat_s)

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """The encoded pieces as they come; an error is the last one of them."""
