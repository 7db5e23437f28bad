"""A replica: a process somewhere in the cluster that has the models, and answers what the front hands on."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import Message

from llmc.errors import EngineClosedError, GpuError, LlmcError, UsageError
from llmc.runtime.generator import Generator
from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.fleet.calls import BILL
from llmc.runtime.server.fleet.stages import StagesOnRay
from llmc.runtime.server.http.call import Bill, Call, Client
from llmc.runtime.server.models.pool import Pool

log = logging.getLogger(__name__)


class Replica:
    """The application, reached through calls of Ray instead of a socket.
    ``config``: the server's settings, all but ``models``, which :meth:`reconfigure` brings."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._bundles: Mapping[str, Path] = {}
        self._pool: Pool | None = None
        self._app: FastAPI | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve these bundles. Ray calls it before the first request, and when the deployment is updated.

        Bundles in other folders, or built anew in the same ones, take the place of those before without a failed
        request. ``revision`` may be any text: another one makes Ray call this though the folders are the same.
        ``user_config``: ``models``, names to folders on this machine; ``revision``.

        Raises:
            UsageError: the names are others than before.
            LlmcError: a bundle cannot be loaded; the one before it goes on.
        """
        bundles = {name: Path(folder) for name, folder in user_config["models"].items()}
        if self._pool is None:
            options = {**self._config.load_options, "stages": StagesOnRay}
            config = replace(self._config, models=bundles)
            formats = config.tool_formats
            self._pool = Pool(bundles, memory=config.memory, load_options=options, tool_formats=formats)
            self._app = make_app(config, self._pool)
            await self._pool.warm(*self._config.warm)
        else:
            await self._swap(self._pool, bundles)
        self._bundles = bundles

    async def _swap(self, pool: Pool, bundles: Mapping[str, Path]) -> None:
        if bundles.keys() != self._bundles.keys():
            raise UsageError(
                "models",
                f"is {', '.join(bundles)}, and a running replica serves {', '.join(self._bundles)}",
                "change the application's args, and Ray starts new ones",
            )
        for name, folder in bundles.items():
            if folder != self._bundles[name]:
                await pool.place(name).swap(folder)
        await self.refresh()

    async def refresh(self) -> None:
        """Swap every model in whose folder another bundle was published.
        Raises LlmcError: one cannot be loaded; the one before it goes on."""
        for error in (await self._ready_pool.refresh()).values():
            if error is not None:
                raise error

    async def try_refresh(self) -> tuple[str, Exception | None]:
        """The replica's name, and why :meth:`refresh` failed."""
        try:
            await self.refresh()
        except LlmcError as error:
            return _name(), error
        return _name(), None

    async def check_health(self) -> None:
        """Called by Ray now and then; a replica that fails three times is replaced."""
        pool = self._ready_pool
        if pool.lost is not None:
            raise pool.lost
        for name, model in pool.models().items():
            if isinstance(model, Generator):
                try:
                    await asyncio.to_thread(model.engine.call, lambda: None)  # its thread answers between two steps
                except EngineClosedError:
                    if pool.models().get(name) is model:  # and was not swapped out meanwhile
                        raise

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """The application's answer, as it comes: all that is there goes into one message between the machines, with
        what the client took by then before it.

        Whoever stops reading cancels the request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()

        def report(bill: Bill) -> None:
            sent.put_nowait({"type": BILL, "bill": bill})

        client = Client(scope["state"].pop("key", None), report)
        scope["state"]["call"] = Call(client)
        answering = asyncio.ensure_future(self._run(scope, body, sent, gone))
        try:
            while messages := _take_messages(await sent.get(), sent):
                if self._ready_pool.lost is not None:
                    self._end()
                yield [{"type": BILL, "bill": client.bill}, *messages]
            await answering
        finally:
            gone.set()
            await asyncio.gather(answering, return_exceptions=True)

    def _end(self) -> None:
        """End the process without the GPU now: fast failures would draw requests until Ray asks after our health."""
        log.critical("%s; the replica ends", self._ready_pool.lost)
        os._exit(GpuError.exit_code)

    async def _run(
        self, scope: dict[str, Any], body: bytes, sent: "asyncio.Queue[Message | None]", gone: asyncio.Event
    ) -> None:
        bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (first := next(bodies, None)) is not None:
                return first
            await gone.wait()
            return {"type": "http.disconnect"}

        assert self._app is not None
        try:
            await self._app(scope, receive, sent.put)
        except Exception:
            log.exception("%s failed", scope["path"][:200])  # the application has answered it as a bug
        finally:
            sent.put_nowait(None)

    @property
    def _ready_pool(self) -> Pool:
        assert self._pool is not None, "Ray configures a replica before it uses it"
        return self._pool

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def _name() -> str:
    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def _take_messages(first: Message | None, sent: "asyncio.Queue[Message | None]") -> list[Message]:
    """The first message and those that are there already; none at the end."""
    messages: list[Message] = []
    message = first
    while message is not None:
        messages.append(message)
        if sent.empty():
            break
        message = sent.get_nowait()
    else:
        if messages:
            sent.put_nowait(None)  # the end is for the next time
    return messages
