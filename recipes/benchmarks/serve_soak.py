"""Soak the service: requests and faults of every kind from many clients, a kill, and answers compared with quiet ones.

A real `llmc serve` answers threads that send completions and chats, whole and streamed, and clients that leave in the
middle, send half a request and wait, send what is no HTTP, no JSON, too large, too late, or for a model that is not
there. No file may grow beyond a few kilobytes, so its prefix store is as on a full disk. After a part of the time it is
killed (SIGKILL) under load and started again.

* Answers: every greedy answer equals the one that a quiet server gave to the same request; faults are answered with the
  status that they deserve, or the connection is closed; nothing is answered with 500.
* Memory: the resident set at the end, over that after the first third of the time after the restart; files and threads.
* Order: at the end nothing waits or runs, no cache row is held, the server is ready, and SIGTERM ends it with status 0.

That answers do not depend on companions is promised from determinism "batch" on.
"""

import argparse
import collections
import http.client
import json
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_measures import Check, Found, run

MAX_GROWTH = 0.05  # of the resident set
MAX_FILES = 4  # open files more than at rest: what the kernel has not closed yet
FILE_BYTES = 32 << 10  # that a file of the server may have: less than a block of the prefix cache
KILL_AFTER = 0.2  # of the time
BODY_BYTES = 64 << 10  # that the server takes
HEADER_S = 1.0  # that it waits for headers and for bodies
WAIT_S = 120.0  # after which a request counts as lost
SETTLED_S = 30.0  # after which nothing may be left of any request
BUSY = {429, 503}  # come again later
SHOWN = 5  # mistakes that are described
PROMPTS = ("def add(a, b):", "import os\n", "class Stack:\n    def", "for i in range(", "# a comment\n", "x = [1, 2")
SYSTEM = "# Only the standard library. Type annotations everywhere. No global state.\n"

Status = int | None  # None: the connection was closed without an answer


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Greedy requests by path; some share a long beginning, so that the prefix cache has work."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number, prompt in enumerate(PROMPTS):
        size = {"max_tokens": 8 + 8 * number, "temperature": 0}
        found.append(("/v1/completions", {"prompt": prompt, **size}))
        found.append(("/v1/completions", {"prompt": SYSTEM * 4 + prompt, **size}))
        found.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **size}))
    return found


def text_of(choice: dict[str, Any]) -> str:
    """The text of an answer's choice, or of a piece of it."""
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""


class Server:
    """The service in a process of its own, which may be killed and started again."""

    def __init__(self, bundle: Path, threads: int, determinism: str, scratch: Path) -> None:
        settings = {
            "port": 0,
            "threads": threads,
            "determinism": determinism,
            "max_queue": 2,
            "max_body_bytes": BODY_BYTES,
            "header_timeout_s": HEADER_S,
            "body_timeout_s": HEADER_S,
            "prefix_cache_folder": scratch / "prefixes",
            "prefix_cache_bytes": 8 << 20,
        }
        flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._command = [sys.executable, "-m", "llmc.cli", "serve", f"m={bundle}", *flags]
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._ready, self.port = threading.Event(), 0
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        if not self._ready.wait(WAIT_S):
            sys.exit(f"the service did not become ready: {self.errors}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as log:
            for text in log:
                self._heard(text.strip())

    def _heard(self, text: str) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            self.errors.append(text)
            return
        if line["message"] == "listening":
            self.port = int(line["address"].rpartition(":")[2])
        elif line["message"] == "ready":
            self._ready.set()
        elif line["level"] == "ERROR":
            self.errors.append(text)

    def kill(self) -> None:
        """As a machine without memory does."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def resident(self) -> int:
        """Bytes of its resident set."""
        return self._number("VmRSS") * 1024

    def _number(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))

    def resources(self) -> tuple[int, int]:
        """Threads and open files."""
        return self._number("Threads"), len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def connect(self) -> socket.socket:
        """A connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """The status and the body of its answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            connection.request(method, path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def gauges(self) -> float:
        """Requests that wait or run, and bytes of the cache that are in use."""
        names = ("llmc_num_requests_waiting{", "llmc_num_requests_running{", "llmc_kv_cache_used_bytes{")
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


# ------------------------------------------------------------------------------------------------------ what clients do


def whole(server: Server, path: str, body: dict[str, Any]) -> tuple[Status, str]:
    """Status and text of an answer in one piece."""
    status, answer = server.ask("POST", path, json.dumps(body).encode())
    return status, text_of(json.loads(answer)["choices"][0]) if status == 200 else answer.decode()


def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[Status, str]:
    """Status and text of an answer in pieces; its last one must say that it is the last."""
    status, answer = server.ask("POST", path, json.dumps({**body, "stream": True}).encode())
    if status != 200:
        return status, answer.decode()
    pieces = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: ")]
    if pieces[-1] != "[DONE]":
        return status, f"ended by {pieces[-1]}"
    choices = [choice for piece in pieces[:-1] for choice in json.loads(piece).get("choices", ())]
    return status, "".join(map(text_of, choices))


def raw(server: Server, data: bytes, *, ends: bool = False) -> Status:
    """The status that bytes on a connection are answered with; with ``ends`` the client says that no more will come."""
    with closing(server.connect()) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):
            while b"\r\n" not in answer and (more := connection.recv(4096)):
                answer += more
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


def posted(body: bytes, length: int | None = None, path: str = "/v1/completions", headers: str = "") -> bytes:
    """The bytes of a request."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {size}\r\n{headers}\r\n".encode() + body


def leave(server: Server, body: dict[str, Any], pieces: int) -> Status:
    """Go after some pieces of a stream have come, or before any has."""
    with closing(server.connect()) as connection:
        connection.sendall(posted(json.dumps({**body, "stream": True}).encode()))
        received = b""
        while received.count(b"data: ") < pieces and (more := connection.recv(4096)):
            received += more
        return int(received.split()[1]) if received else None


LONG = {"prompt": "def", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
# Faults by name: what the client does, and the answers that are right.
FAULTS: dict[str, tuple[Callable[[Server], Status], set[Status]]] = {
    "leaves at once": (lambda server: leave(server, LONG, 0), {None}),
    "leaves in the middle": (lambda server: leave(server, LONG, 3), {200}),
    "comes too late": (
        lambda server: server.ask("POST", "/v1/completions", json.dumps({**LONG, "deadline_s": 0.02}).encode())[0],
        {504},
    ),
    "is no JSON": (lambda server: raw(server, posted(b'{"prompt": "a')), {400}),
    "has a wrong type": (lambda server: raw(server, posted(b'{"prompt": {"a": 1}}')), {400}),
    "has an unknown parameter": (lambda server: raw(server, posted(b'{"prompt": "a", "tempurature": 1}')), {400}),
    "is out of range": (lambda server: raw(server, posted(b'{"prompt": "a", "temperature": -1}')), {400}),
    "names a model that is not here": (lambda server: raw(server, posted(b'{"prompt": "a", "model": "x"}')), {404}),
    "names a route that is not here": (lambda server: raw(server, posted(b"{}", path="/v2/nothing")), {404}),
    "is too large": (lambda server: raw(server, posted(b"", BODY_BYTES + 1)), {413}),
    "is too long for the context": (
        lambda server: raw(server, posted(json.dumps({"prompt": "a b " * 10_000}).encode())),
        {400},
    ),
    "has large headers": (lambda server: raw(server, posted(b"{}", headers=f"x: {'a' * 50_000}\r\n")), {431, None}),
    "is no HTTP": (lambda server: raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n"), {400}),
    "sends half of its headers": (lambda server: raw(server, b"POST /v1/comp"), {408, None}),
    "sends half of its body": (lambda server: raw(server, posted(b'{"prompt"', 100)), {408}),
    "ends in its body": (lambda server: raw(server, posted(b'{"prompt"', 100), ends=True), {400, 408, None}),
}


class Clients:
    """Threads that send requests until they are told to stop, and note what is wrong."""

    def __init__(self, server: Server, expected: dict[str, str], seed: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._server = server
        self._expected = expected
        self._stop = threading.Event()
        self._killed = False
        self._lock = threading.Lock()
        self._random = random.Random(seed)

    @contextmanager
    def running(self, number: int, *, killed: bool = False) -> Iterator[None]:
        """Send requests while the block runs; if the server is killed in it, closed connections are no mistake."""
        self._stop.clear()
        self._killed = killed
        threads = [threading.Thread(target=self._work, args=(self._random.random(),)) for _ in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(2 * WAIT_S)
            lost = sum(thread.is_alive() for thread in threads)
            if lost:
                self._note("lost", f"{lost} clients wait for ever")

    def _work(self, seed: float) -> None:
        chance, known = random.Random(seed), cases()
        while not self._stop.is_set():
            try:
                if chance.random() < 0.6:
                    self._ask(chance.choice((whole, streamed)), *chance.choice(known))
                else:
                    self._fault(chance.choice(list(FAULTS)))
            except (OSError, http.client.HTTPException) as error:
                self._closed(error)

    def _ask(self, way: Callable[..., tuple[Status, str]], path: str, body: dict[str, Any]) -> None:
        status, text = way(self._server, path, body)
        right = status in BUSY or (status == 200 and text == self._expected[key(path, body)])
        busy = status in BUSY
        said = f"{way.__name__}: turned away" if busy else f"{way.__name__}: answered"
        self._note(said, None if right else f"{way.__name__} {path} {body}: {status} {text!r:.200}")
        if busy:
            time.sleep(0.02)

    def _fault(self, name: str) -> None:
        act, right = FAULTS[name]
        status = act(self._server)
        fine = status in right or status in BUSY or (status is None and self._killed)
        self._note(f"fault: {name}", None if fine else f"{name}: answered with {status}, expected {right}")

    def _closed(self, error: Exception) -> None:
        self._note("closed", None if self._killed else f"{type(error).__name__}: {error}")
        time.sleep(0.05)

    def _note(self, said: str, mistake: str | None) -> None:
        with self._lock:
            self.counts[said] += 1
            if mistake is not None:
                self.wrong.append(mistake)


def key(path: str, body: dict[str, Any]) -> str:
    """A request as a name."""
    return json.dumps([path, body])


# --------------------------------------------------------------------------------------------------------------- a soak


def soak(args: argparse.Namespace) -> Found:
    """Quiet answers, a kill under load, the long run, and what is left after it."""
    with TemporaryDirectory() as scratch:
        server = Server(args.bundle, args.threads, args.determinism, Path(scratch))
        try:
            return _soaked(server, args)
        finally:
            server.kill()


def _soaked(server: Server, args: argparse.Namespace) -> Found:
    began = time.monotonic()
    expected = {key(path, body): whole(server, path, body)[1] for path, body in cases()}
    clients = Clients(server, expected, args.seed)
    with clients.running(args.clients, killed=True):
        time.sleep(args.seconds * KILL_AFTER)
        server.kill()
    server.start()
    resident = []
    with clients.running(args.clients):
        time.sleep(1)
        at_rest = server.resources()
        until = time.monotonic() + args.seconds * (1 - KILL_AFTER)
        while time.monotonic() < until and server.process.poll() is None:
            resident.append(server.resident())
            time.sleep(min(1.0, args.seconds / 50))
    left = settled(server)
    now = server.resources()
    changed = sum(whole(server, path, body)[1] != expected[key(path, body)] for path, body in cases())
    ready = server.ask("GET", "/ready")[0]
    checks = (
        Check("requests", sum(clients.counts.values()), args.clients),
        Check("wrong answers, and faults answered wrongly", len(clients.wrong), 0, at_most=True),
        Check("answers that changed, asked again at the end", changed, 0, at_most=True),
        Check("left: waiting, running, bytes of the cache in use", left, 0, at_most=True),
        Check("growth of the resident set", growth(resident), MAX_GROWTH, at_most=True),
        Check("open files more than under the first load", now[1] - at_rest[1], MAX_FILES, at_most=True),
        Check("lines of errors in the log", len(server.errors), 0, at_most=True),
        Check("ready at the end (200)", ready, 200, at_most=True),
        Check("exit status after SIGTERM", server.end(), 0, at_most=True),
    )
    for mistake in [*clients.wrong[:SHOWN], *server.errors[:SHOWN]]:
        print(mistake, file=sys.stderr)
    seconds = round(time.monotonic() - began)
    rows = [("what clients did", "times"), *((name, str(count)) for name, count in sorted(clients.counts.items()))]
    memory = [("resident set", "MB"), ("after the first third", mb(resident, first=True)), ("at the end", mb(resident))]
    details = {
        "seconds": seconds,
        "counts": dict(clients.counts),
        "resident": resident,
        "threads": [at_rest[0], now[0]],
    }
    return Found(checks, details, (rows, [*memory, ("seconds", str(seconds))]))


def settled(server: Server) -> float:
    """Requests, and bytes of the cache, that are left once nobody asks any more."""
    until = time.monotonic() + SETTLED_S
    while (left := server.gauges()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def ends(resident: list[int]) -> tuple[float, float]:
    """Bytes after the first third of the time, and at the end: medians of a tenth of it each."""
    tenth = max(1, len(resident) // 10)
    third = len(resident) // 3
    return statistics.median(resident[third : third + tenth]), statistics.median(resident[-tenth:])


def growth(resident: list[int]) -> float:
    """Growth of the resident set, as a share."""
    before, after = ends(resident)
    return after / before - 1


def mb(resident: list[int], first: bool = False) -> str:
    """For the table."""
    return f"{ends(resident)[0 if first else 1] / 1e6:.1f}"


def main() -> None:
    """Soak, and fail where a target is missed."""
    found = run(
        soak,
        __doc__,
        seconds=(300.0, "how long, the kill included; default: %(default)s"),
        clients=(8, "threads that ask; default: %(default)s"),
        determinism=("batch", "of the server; default: %(default)s"),
        seed=(0, "of the chance by which clients choose; default: %(default)s"),
    )
    sys.exit(not found.met)


if __name__ == "__main__":
    main()
