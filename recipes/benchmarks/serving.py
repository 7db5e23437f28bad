"""Common parts of the service's benchmarks: servers in processes of their own, and clients, which are another one."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from peers import ENVIRONMENT

PATIENCE_S, POLL_S = 180.0, 0.2  # for a server to load its model
LIMIT_S = 540.0  # of one process of clients


def clients(url: str, *arguments: object) -> list[dict[str, Any]]:
    """The points that ``llmc bench serve`` finds with these arguments, greedy and of exactly so many tokens.

    Raises:
        SystemExit: it failed.
    """
    greedy = ("--ignore-eos", "--extra-body", '{"temperature": 0}', "--json")
    command = [sys.executable, "-m", "llmc.cli", "bench", "serve", url, *map(str, arguments), *greedy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"llmc bench serve failed: {done.stderr.strip() or done.stdout}")
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return points


@contextmanager
def server(command: Sequence[object], port: int, ready: str) -> Iterator[int]:
    """A server while the block runs, which answers GET ``ready`` with 200; its process id.

    Raises:
        SystemExit: it ended, or is not ready in time.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        wait_for(process, f"http://127.0.0.1:{port}{ready}")
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=POLL_S * 100)
        process.kill()
        process.wait()


def wait_for(process: "subprocess.Popen[str]", url: str) -> None:
    """Wait until a URL answers with 200.

    Raises:
        SystemExit: the process ended, or it takes too long.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll() is not None:
            last = (process.communicate()[1].strip() or "no message").splitlines()[-1]
            raise SystemExit(f"{process.args}: ended with {process.returncode}: {last}")
        with suppress(OSError), urllib.request.urlopen(url, timeout=POLL_S * 10):
            return
        time.sleep(POLL_S)
    raise SystemExit(f"{url} is not ready after {PATIENCE_S:g} s")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
