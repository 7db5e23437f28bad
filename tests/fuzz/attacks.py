"""Requests made to hold up everybody: bodies within the limits, each sent while another process asks for ``/health``.

By hand, with a table of how long the loop was held and of the memory that each took::

    python tests/fuzz/attacks.py BUNDLE [--only NAME] [--embed BUNDLE] [--rank BUNDLE]

Nothing here is stored: bodies are made when they are sent.
"""

import argparse
import base64
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MOST = (8 << 20) - 1  # bytes of a body, by default
PATIENCE_S = 240.0  # of an answer, which only the attacker waits for
TRIES = 3  # a busy machine keeps /health waiting in some of them, a body that holds the loop in each
PAUSE_S = 0.004  # between two looks at /health
VALUES, TEXTS = 299_000, 65_000  # nearly as many as a body may hold
FRAMES = "FRAMES"  # a method: the body goes through a WebSocket
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
TOP = {"model": "tiny", "max_tokens": 1}
CHATS: dict[str, Any] = {"messages": [USER], "max_tokens": 1}


# Each once held some step of a chat for longer than another one of the same bytes.
CHARACTERS = {
    "one rare character": "\u0f3c",
    "emoji": "\U0001f9ff",
    "accents": "\u0301",
    "letters": "a",
    "brackets": "<",
    "beginnings of control tokens": "<|",
    "turned directions": "\u202e",
    "ends of lines": "\n",
}
RARE = ("one rare character", "turned directions")  # which answers spell otherwise


@dataclass(frozen=True)
class Attack:
    """A body, or several in turn, sent ``times`` at once; ``FRAMES`` go through a WebSocket."""

    path: str
    body: Callable[[], bytes]
    times: int = 1
    method: str = "POST"


def written(value: Any) -> bytes:
    """Compact JSON of a value."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def filled(value: Any, item: Any, count: int) -> bytes:
    """``value`` with a list in place of its text ``"@"``, of ``item`` so often as it and the limit allow."""
    before, after = written(value).split(b'"@"')
    one = item if isinstance(item, bytes) else written(item)
    count = max(1, min(count, (MOST - len(before) - len(after) - 2) // (len(one) + 1)))
    return before + b"[" + b",".join([one] * count) + b"]" + after


def named(value: Any, count: int, item: Any = 1) -> bytes:
    """``value`` with an object of ``count`` members in place of its text ``"@"``."""
    before, after = written(value).split(b'"@"')
    return before + written({str(number): item for number in range(count)}) + after


def texted(value: Any, text: str = "a ", size: int = 7_990_000) -> bytes:
    """``value`` with a text without end in place of its ``"@"``."""
    before, after = written(value).split(b'"@"')
    inner = written(text)[1:-1]
    room = size - len(before) - len(after) - 2
    return before + b'"' + inner * (room // len(inner)) + b'"' + after


def framed(content: bytes, kind: int = 1) -> bytes:
    """A frame of a WebSocket, as clients send it."""
    size = bytes([128 | len(content)]) if len(content) < 126 else b"\xff" + len(content).to_bytes(8, "big")
    return bytes([128 | kind]) + size + bytes(4) + content


def deep(opening: bytes, closing: bytes, levels: int) -> bytes:
    """Levels in one another."""
    return opening * levels + b"1" + closing * levels


def schema(properties: int) -> dict[str, Any]:
    """A schema of so many properties."""
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(properties)}}


def branches(levels: int) -> dict[str, Any]:
    """A schema with alternatives in alternatives."""
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"anyOf": [found, {"type": "object", "properties": {"a": found}}]}
    return found


def attacks() -> dict[str, Attack]:
    """All of them, by name."""
    found: dict[str, Attack] = {}

    def add(name: str, path: str, body: Callable[[], bytes], **rest: Any) -> None:
        found[name] = Attack(path, body, **rest)

    chat = CHATS
    text: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    answer: dict[str, Any] = {"input": "a", "max_output_tokens": 1}
    anthropic: dict[str, Any] = {**TOP, "messages": [USER]}
    ids = b"1," * VALUES
    add("ids and then a text", COMPLETIONS, lambda: b'{"prompt":[' + ids + b'"x"]}')
    add("numbers beyond all", COMPLETIONS, lambda: filled({"prompt": "@"}, b"1e999", VALUES))
    add("brackets", CHAT, lambda: b"[" * MOST)
    add("deep lists", CHAT, lambda: deep(b"[", b"]", MOST // 2 - 1))
    add("deep objects", CHAT, lambda: deep(b'{"a":', b"}", MOST // 6 - 1))
    add("a number of millions of digits", CHAT, lambda: b'{"max_tokens":' + b"9" * (MOST - 20) + b"}")
    add("a million members", CHAT, lambda: named("@", 700_000))
    add("unknown members", CHAT, lambda: named("@", TEXTS))
    add("escaped characters", COMPLETIONS, lambda: b'{"prompt":"' + b"\\ud83d\\ude00" * 690_000 + b'"}')
    for path, body, names in (
        (COMPLETIONS, text, ("prompt", "grammar")),
        (RESPONSES, answer, ("input",)),
        (MESSAGES, anthropic, ("system",)),
    ):
        for name in names:
            add(f"{path} {name} of 8 MB", path, lambda body=body, name=name: texted({**body, name: "@"}))  # type: ignore[misc]
    add("a message of 8 MB", CHAT, lambda: texted({"messages": [{"role": "user", "content": "@"}]}))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "@"}}
    calls = {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [call]}, USER], "max_tokens": 1}
    add(
        "arguments of many members",
        CHAT,
        lambda: written(calls).replace(b"@", b"{" + b",".join(b'\\"%d\\":1' % n for n in range(500_000)) + b"}"),
    )
    add("messages", CHAT, lambda: filled({"messages": "@", "max_tokens": 1}, USER, 16_000))
    add(
        "parts",
        CHAT,
        lambda: filled({"messages": [{"role": "user", "content": "@"}]}, {"type": "text", "text": "a"}, 16_000),
    )
    add("calls", CHAT, lambda: filled({"messages": [USER, {"role": "assistant", "tool_calls": "@"}]}, call, 7_000))
    add("tools", CHAT, lambda: filled({**chat, "tools": "@"}, TOOL, 16_000))
    add(
        "a deep tool",
        CHAT,
        lambda: written(
            {**chat, "tools": [{"type": "function", "function": {"name": "f", "parameters": branches(12)}}]}
        ),
    )
    add(
        "a wide schema",
        CHAT,
        lambda: written(
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(16_000)}}}
        ),
    )
    add(
        "a schema of 8 MB",
        CHAT,
        lambda: filled(
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": "@"}}}},
            "ab",
            TEXTS,
        ),
    )
    for name in ("stop", "banned_tokens"):
        item: Any = 5 if "token" in name else "ab"
        add(
            f"{name} without end",
            CHAT,
            lambda name=name, item=item: filled({**chat, name: "@"}, item, VALUES if item == 5 else TEXTS),
        )  # type: ignore[misc]
    add("biases", CHAT, lambda: named({**chat, "logit_bias": "@"}, TEXTS))
    add("variables of a template", CHAT, lambda: named({**chat, "chat_template_kwargs": "@"}, TEXTS))
    blocks = {**TOP, "messages": [{"role": "user", "content": "@"}]}
    add("blocks", MESSAGES, lambda: filled(blocks, {"type": "text", "text": "a"}, 16_000))
    add(
        "echo with logprobs",
        COMPLETIONS,
        lambda: written({"prompt": ["a b c d " * 240] * 6, "max_tokens": 1, "echo": True, "logprobs": 20}),
    )
    add("128 prompts", COMPLETIONS, lambda: written({"prompt": ["a " * 32_000] * 128, "max_tokens": 1}))
    add("tokens of 8 MB, eight times", f"{RESPONSES}/input_tokens", lambda: texted({"input": "@"}), times=8)
    for path, model in (("/v1/embeddings", "embed"),):
        add("ids to embed", path, lambda model=model: filled({"model": model, "input": "@"}, 5, VALUES))  # type: ignore[misc]
        add("texts to embed", path, lambda model=model: filled({"model": model, "input": "@"}, "a b", TEXTS))  # type: ignore[misc]
        add(
            "2,048 texts to embed", path, lambda model=model: filled({"model": model, "input": "@"}, "a b " * 900, 2048)
        )  # type: ignore[misc]
        add(
            "a text of 8 MB to embed",
            path,
            lambda model=model: texted({"model": model, "input": "@", "truncate": True}),
        )  # type: ignore[misc]
    add(
        "documents to rank",
        "/v1/rerank",
        lambda: filled({"model": "rank", "query": "a", "documents": "@"}, {"text": "a"}, 32_000),
    )
    add("a query of 8 MB", "/v1/rerank", lambda: texted({"model": "rank", "query": "@", "documents": ["a"]}))
    turn = {"type": "response.create", **answer}
    frames: dict[str, Callable[[], bytes]] = {
        "a message of 8 MB": lambda: framed(texted({**turn, "input": "@"})),
        "brackets": lambda: framed(b"[" * MOST),
        "64 requests": lambda: framed(written(turn)) * 64,
        "requests of no type": lambda: framed(b"{}") * 100_000,
        "refused ones": lambda: framed(b" " * 70 + b"{}") * 50_000,
        "pings": lambda: framed(b"", 9) * 300_000,
        "parts of a byte": lambda: (b"\1\x81" + bytes(5)) + (b"\0\x81" + bytes(5)) * 300_000,
    }
    for name, body in frames.items():
        add(f"frames: {name}", RESPONSES, body, method=FRAMES)
    return {**found, **texts(), **lists()}


def texts() -> dict[str, Attack]:
    """Texts of 8 MB in every dialect and of many alphabets."""
    found: dict[str, Attack] = {}

    def add(name: str, path: str, body: Callable[[], bytes], **rest: Any) -> None:
        found[name] = Attack(path, body, **rest)

    add("a name of millions of unprintable characters", CHAT, lambda: b'{"' + "\u202e".encode() * 2_600_000 + b'":1}')
    content = [{"role": "user", "content": "@"}]
    others = {MESSAGES: {**TOP, "messages": content}, RESPONSES: {"input": "@"}}
    others[OLLAMA] = {"model": "tiny", "messages": content}
    for name, character in CHARACTERS.items():  # dialects differ in what they read, not in what is done with a text
        for path, body in {CHAT: {"messages": content}, **(others if name in RARE else {})}.items():
            add(f"{path} of {name}", path, lambda body=body, c=character: texted(body, c))  # type: ignore[misc]
    for name in ("tokens", "truncated"):
        cut = {"on_overflow": "truncate_left"} if name == "truncated" else {}
        said = {"messages": [{"role": "user", "content": "@"}], "max_tokens": 1, **cut}
        add(f"a message of control tokens, {name}", CHAT, lambda said=said: texted(said, "<|im_end|>"))  # type: ignore[misc]
    tool = {"type": "function", "function": {"name": "f", "description": "@"}}
    add("a tool's description of 8 MB", CHAT, lambda: texted({**CHATS, "tools": [tool]}, "\u0f3c"))
    for name in ("model", "user", "regex", "grammar", "json_schema"):
        add(f"{name} of 8 MB", CHAT, lambda name=name: texted({**CHATS, name: "@"}, "\u0f3c"))  # type: ignore[misc]
    return found


def lists() -> dict[str, Attack]:
    """Lists of ids, images, words and members without end."""
    found: dict[str, Attack] = {}

    def add(name: str, path: str, body: Callable[[], bytes], **rest: Any) -> None:
        found[name] = Attack(path, body, **rest)

    for name, item in (("small ids", 5), ("large ids", 123_456), ("fractions", 1.5), ("lists of ids", [5])):
        add(name, COMPLETIONS, lambda item=item: filled({"prompt": "@", "max_tokens": 1}, item, VALUES))  # type: ignore[misc]
    for path, name in (("/api/generate", "context"), (CHAT, "stop_token_ids")):
        body = {"model": "tiny", "prompt": "a"} if name == "context" else {**CHATS}
        add(f"{name} of ids", path, lambda body=body, name=name: filled({**body, name: "@"}, 5, VALUES))  # type: ignore[misc]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    add("image parts", CHAT, lambda: filled({"messages": [{"role": "user", "content": "@"}]}, image, 8_000))
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    add(
        "image blocks", MESSAGES, lambda: filled({**TOP, "messages": [{"role": "user", "content": "@"}]}, source, 7_000)
    )
    seen = {"model": "tiny", "messages": [{"role": "user", "content": "a", "images": "@"}]}
    add("images", OLLAMA, lambda: filled(seen, "AAAA", 60_000))
    add(
        "images beside a prompt",
        "/api/generate",
        lambda: filled({"model": "tiny", "prompt": "a", "images": "@"}, "", 60_000),
    )
    for name in ("bad_words", "choice", "dry_sequence_breakers"):
        add(f"{name} of 65,000", CHAT, lambda name=name: filled({**CHATS, name: "@"}, "ab", TEXTS))  # type: ignore[misc]
        add(f"{name} of 100 KB", CHAT, lambda name=name: filled({**CHATS, name: "@"}, "ab" * 50_000, 79))  # type: ignore[misc]
    add("enum of numbers", CHAT, lambda: filled({**CHATS, "json_schema": {"enum": "@"}}, 5, VALUES))
    add("options", OLLAMA, lambda: named({"model": "tiny", "messages": [USER], "options": "@"}, TEXTS))
    add("queries", f"{CHAT}?{'&'.join(['a=1'] * 7_000)}", lambda: written(CHATS))
    return found


def png(
    width: int, height: int, *, depth: int = 8, colour: int = 2, interlaced: bool = False, whole: bool = True
) -> bytes:
    """A PNG of black pixels of a colour type; not ``whole``: of next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    size = height * (1 + -(-width * channels * depth // 8)) * (2 if interlaced else 1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    palette = chunk(b"PLTE", bytes(768)) + chunk(b"tRNS", bytes(256)) if colour == 3 else b""
    packed = zlib.compress(bytes(size if whole else 99), 1)
    return b"\x89PNG\r\n\x1a\n" + head + palette + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


LARGE = 7_000  # of a side: 49 million pixels
IMAGES: dict[str, Callable[[], bytes]] = {
    "a line of 20 million pixels": lambda: png(20_000_000, 1, colour=0),
    "a column of 20 million pixels": lambda: png(1, 20_000_000, colour=0),
    "a line of 50 million pixels": lambda: png(50_000_000, 1, colour=0),
    "more pixels than any memory": lambda: png(2**31 - 1, 2**31 - 1, whole=False),
    "a header alone": lambda: png(LARGE, LARGE, whole=False),
    "grey": lambda: png(LARGE, LARGE, colour=0),
    "one bit": lambda: png(LARGE, LARGE, depth=1, colour=0),
    "16 bits of grey": lambda: png(LARGE, LARGE, depth=16, colour=0),
    "colours": lambda: png(LARGE, LARGE),
    "16 bits of colours": lambda: png(LARGE, LARGE, depth=16),
    "a transparent palette": lambda: png(LARGE, LARGE, colour=3),
    "grey with alpha": lambda: png(LARGE, LARGE, colour=4),
    "alpha": lambda: png(LARGE, LARGE, colour=6),
    "interlaced alpha": lambda: png(LARGE, LARGE, colour=6, interlaced=True),
    "half a file": lambda: png(LARGE, LARGE)[:20_000],
    "a film": lambda: b"GIF89a" + struct.pack("<HH", 9, 9) + bytes(99),
    "another format": lambda: b"II*\0" + bytes(999),
}


def images(model: str) -> dict[str, Attack]:
    """Requests with one image, and eight at once with two large ones each; for a model that sees."""

    def body(*contents: bytes) -> bytes:
        urls = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in contents]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return written({"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1})

    found = {f"an image: {name}": Attack(CHAT, lambda make=make: body(make())) for name, make in IMAGES.items()}  # type: ignore[misc]
    return {**found, "eight requests of two images": Attack(CHAT, lambda: body(*[IMAGES["grey"]()] * 2), times=8)}


def stored(watch: "Watch") -> dict[str, Attack]:
    """Readings of a response of a megabyte, which is stored first: of 600 tokens, each with 20 others."""
    body = {"input": "a", "max_output_tokens": 600, "top_logprobs": 20, "ignore_eos": True, "temperature": 0}
    name = json.loads(watch.whole(Attack(RESPONSES, lambda: written(body))))["id"]
    paths = {"as it is": "", "as a stream": "?stream=true", "its items": "/input_items"}
    found = {
        f"what is stored, {said}": Attack(f"{RESPONSES}/{name}{path}", lambda: b"", times=2, method="GET")
        for said, path in paths.items()
    }
    goes_on = {"input": "a", "max_output_tokens": 1, "previous_response_id": name}
    return {**found, "what goes on from it": Attack(RESPONSES, lambda: written(goes_on))}


def probe(host: str, port: int) -> None:
    """Ask for /health again and again on one connection; print when each was asked, and how long it took."""
    with socket.create_connection((host, port), timeout=PATIENCE_S) as asked:
        while True:
            began = time.monotonic()
            asked.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            got = b""
            while b'{"status":"ok"}' not in got:
                if not (piece := asked.recv(4096)):
                    return
                got += piece
            print(began, time.monotonic() - began, flush=True)
            time.sleep(PAUSE_S)


@dataclass(frozen=True)
class Held:
    """What one attack did: seconds that /health took at most, bytes of memory at the peak, and its answer."""

    health_s: float
    peak: int
    took_s: float
    said: str


class Watch:
    """A server's process, seen from others."""

    def __init__(self, address: str, pid: int) -> None:
        self._host, self._port = (urlsplit(address).hostname or "", urlsplit(address).port or 0)
        self.pid = pid
        self._status = ""
        command = [sys.executable, __file__, "--probe", self._host, str(self._port)]
        with tempfile.NamedTemporaryFile() as out:
            self._seen = open(out.name)  # with a position of its own  # noqa: SIM115
            self._asking = subprocess.Popen(command, stdout=out)
        until = time.monotonic() + PATIENCE_S
        while not self._seen.readline() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """End the process that asks for /health."""
        self._asking.kill()
        self._asking.wait()
        self._seen.close()

    def least_held(self, attack: Attack, most_s: float) -> Held:
        """:meth:`held` of the try in which /health took the least, unless an earlier one took less than ``most_s``."""
        tried: list[Held] = []
        while len(tried) < TRIES and (not tried or tried[-1].health_s >= most_s):
            tried.append(self.held(attack))
        return min(tried, key=lambda held: held.health_s)

    def held(self, attack: Attack) -> Held:
        """Send an attack, and see how the server does meanwhile, and for a moment after."""
        body = attack.body()
        self.clear_peak()
        with self.watching() as looks:
            began = time.monotonic()
            with ThreadPoolExecutor(attack.times) as pool:
                said = list(pool.map(lambda _: self.send(attack, body), range(attack.times)))[-1]
            took = time.monotonic() - began
            time.sleep(0.1)
        return Held(max(looks), self.peak(), took, said)

    @contextmanager
    def watching(self) -> Iterator[list[float]]:
        """Seconds that each look at /health took in the block; they are there after it."""
        looks: list[float] = []
        self._seen.seek(0, os.SEEK_END)
        last = began = time.monotonic()
        try:
            yield looks
        finally:
            ended = time.monotonic()
            for line in self._seen:
                at, took = map(float, line.split())
                looks.append(took)
                last = at + took
            looks.append(ended - max(last, began))  # the one that had no answer yet

    def clear_peak(self) -> None:
        """Forget the peak of the memory so far."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes that the server held at most since then."""
        return self._read("VmHWM")

    def resident(self) -> int:
        """Bytes that the server holds now."""
        return self._read("VmRSS")

    def _read(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

    def send(self, attack: Attack, body: bytes) -> str:
        """The status, the beginning and the size of the answer to a request."""
        got = self.whole(attack, body)
        return f"{self._status} {got[:120].decode('utf-8', 'replace')} ({len(got)} bytes)"

    def whole(self, attack: Attack, body: bytes | None = None) -> bytes:
        """The body of the answer to a request."""
        body = attack.body() if body is None else body
        head = f"{attack.method} {attack.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "anthropic-version: 2026-10-21\r\nContent-Type: application/json\r\n"
        pieces = []
        if attack.method == FRAMES:
            return self.converse(attack, body)
        with socket.create_connection((self._host, self._port), timeout=PATIENCE_S) as asked, suppress(ConnectionError):
            asked.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while piece := asked.recv(1 << 20):
                pieces.append(piece)
        status, _, said = b"".join(pieces).partition(b"\r\n\r\n")
        self._status = status[9:12].decode()
        return said

    def converse(self, attack: Attack, body: bytes) -> bytes:
        """The beginning of what answers frames on a WebSocket."""
        head = f"GET {attack.path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        head += f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'a' * 22}==\r\n\r\n"
        with socket.create_connection((self._host, self._port), timeout=PATIENCE_S) as asked:
            asked.sendall(head.encode())
            self._status = asked.recv(4096)[9:12].decode()
            with suppress(ConnectionError):  # it hangs up on some of them
                asked.sendall(body)
                return asked.recv(4096)
        return b""


def main() -> None:
    """Print the table."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("bundle", type=Path)
    asked.add_argument("--embed", type=Path)
    asked.add_argument("--rank", type=Path)
    asked.add_argument("--see", type=Path)
    asked.add_argument("--only", default="")
    asked.add_argument("--most-ms", type=float, default=100.0, help="tried again where it is more")
    given = asked.parse_args()
    from doubles.services import service_process

    models = {"tiny": given.bundle, "embed": given.embed, "rank": given.rank, "see": given.see}
    with service_process(models={name: str(path) for name, path in models.items() if path}) as process:
        watch = Watch(process.address, process.popen.pid)
        with watch.watching() as idle:
            time.sleep(2)
        print(f"idle: /health took {max(idle) * 1e3:.0f} ms at most")
        for name, attack in {**attacks(), **stored(watch), **(images("see") if given.see else {})}.items():
            if given.only in name:
                held = watch.least_held(attack, given.most_ms / 1e3)
                print(
                    f"{held.health_s * 1e3:8.0f} ms {held.peak >> 20:6} MB {held.took_s:7.2f} s  {name}: {held.said}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2], int(sys.argv[3]))
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        main()
