"""uvicorn with any application, in a thread of the tests' own process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[tuple[str, int]]:
    """Address and port where it answers.

    Args:
        options: of ``uvicorn.Config``.
    """
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", **options)
    server = uvicorn.Server(config)
    started = threading.Event()

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(30)
