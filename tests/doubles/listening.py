"""uvicorn with any application, in a thread of the tests' own process, and certificates for it."""

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    subprocess.run([*made.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
