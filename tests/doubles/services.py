"""The service as a process of its own, with a supervisor that listens to what it says."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

START_S = 60.0  # a machine that does much else imports slowly
PROGRAM = """
import json, sys, time
from llmc.runtime.engine.engine import Engine
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import serve

step, pause = Engine.step, float(sys.argv[2])

def slowly(engine):
    time.sleep(pause)
    step(engine)

if pause:
    Engine.step = slowly
serve(ServerConfig(**json.loads(sys.argv[1])))
"""


class Process:
    """One that runs.

    Attributes:
        address: where it listens, as ``http://127.0.0.1:12345`` or ``unix:/path``.
        said: what it told its supervisor.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], pause_s: float) -> None:
        self.said: list[str] = []
        self._log = folder / "log"
        self._supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._supervisor.bind(str(folder / "notify"))
        threading.Thread(target=self._listen, daemon=True).start()
        told = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1000000"}
        with self._log.open("wb") as log:
            given = json.dumps({"port": 0, "threads": 1, **settings}, default=str)
            command = [sys.executable, "-c", PROGRAM, given, str(pause_s)]
            self.popen = subprocess.Popen(command, stderr=log, env={**os.environ, **told})

    def _listen(self) -> None:
        while said := self._supervisor.recv(4096):
            self.said.append(said.decode())

    def hear(self, state: str) -> None:
        """Wait until it has told its supervisor so."""
        until = time.monotonic() + START_S
        while not any(state in said for said in self.said):
            ended = self.popen.poll() is not None or time.monotonic() > until
            assert not ended, f"{state} was not heard, but {self.said}; the log is {self.text}"
            time.sleep(0.01)

    @property
    def text(self) -> str:
        """All that it logged."""
        return self._log.read_text()

    def lines(self, message: str) -> list[dict[str, Any]]:
        """Lines of the log with a message."""
        found = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in found if line["message"] == message]

    @property
    def address(self) -> str:
        return str(self.lines("listening")[0]["address"])

    def client(self, **options: Any) -> httpx.Client:
        """A client of it."""
        address = self.address
        if address.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=address.removeprefix("unix:"))
            return httpx.Client(transport=transport, base_url="http://localhost", timeout=START_S, **options)
        return httpx.Client(base_url=address, timeout=START_S, **options)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to stop; its exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(START_S)

    def kill(self) -> None:
        """Leave nothing behind."""
        self.popen.kill()
        self.popen.wait()
        self._supervisor.shutdown(socket.SHUT_RDWR)
        self._supervisor.close()


@contextmanager
def service_process(pause_s: float = 0.0, **settings: Any) -> Iterator[Process]:
    """The service of these settings, once it is ready; each step of its engines takes ``pause_s`` seconds longer."""
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder), settings, pause_s)
        try:
            process.hear("READY=1")
            yield process
        finally:
            process.kill()
