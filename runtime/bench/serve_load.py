"""Load on an OpenAI-compatible server: requests that come at a rate whatever becomes of them, or clients that wait.

At a rate (an open loop) no arrival waits for an answer; latencies count from sending and from when a request was due.
At a concurrency (a closed loop) so many clients send their next request when they have their last answer, a load that
slows down together with the server.

Sources: Tene, How NOT to Measure Latency (https://www.infoq.com/presentations/latency-response-time); Schroeder et
al., Open Versus Closed: A Cautionary Tale (NSDI 2006).
"""

import datetime
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from llmc import __version__
from llmc.errors import LlmcError, UsageError
from llmc.runtime.bench.serve_report import Exchange, figures
from llmc.runtime.host.machine import cpu_model, usable_threads

OWN = ("model", "messages", "stream")  # fields of the body that the test itself decides
MAX_REQUESTS, MAX_CONCURRENCY = 1_000_000, 1024  # the latter also limits the requests under way at a rate
REQUESTS = 64  # where neither a number nor a duration is given
PROBES = (64, 128)  # words of the prompts that show how a server counts
TICK_S = 0.2  # between two reports of progress
READ_BYTES = 64 << 10
# Short and frequent, so nearly every vocabulary has each as one token.
_FREQUENT = """
the of and to in is you that it was for on are as with they at be this have from or one had by but not all were
we when your can said there use an each which do how their if will up other about out many then them these so
some would make like into time has look two more go see number no way could people my than first water been call
who its now find long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good sentence man think say great where help through much
"""
WORDS = _FREQUENT.split()


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The arguments of a load test, as ``llmc bench serve --help`` lists them.

    Attributes:
        url: of the server, with or without ``/v1``.
        rate, concurrency: one test for each; one client of a closed loop if there is neither.
        prompt_length: tokens of a prompt with its chat template, as ``128`` or ``128-512``. Two probes tell how many
            tokens the server counts for a word; the report has what it counted for each request.
        timeout: seconds for a request, to the end of its answer.
    """

    url: str
    model: str | None = None
    rate: Sequence[float] = ()
    concurrency: Sequence[int] = ()
    requests: int | None = None
    duration: float | None = None
    warm_up: int = 2
    seed: int = 0
    prompt_length: str = "128"
    max_tokens: str = "64"
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def check(self) -> None:
        if self.rate and self.concurrency:
            rates, clients = ",".join(map(str, self.rate)), ",".join(map(str, self.concurrency))
            raise UsageError(f"rate is {rates} and concurrency is {clients}: give one, requests come or clients wait")
        if own := sorted(set(self.extra_body) & set(OWN)):
            raise UsageError(f"extra_body has {', '.join(own)}, which the test itself decides; leave it out")

    @property
    def most_requests(self) -> int:
        if self.requests is not None:
            return self.requests
        return REQUESTS if self.duration is None else MAX_REQUESTS


def read_length(text: str, name: str) -> tuple[int, int]:
    """Read ``128``, or ``128-512``, as the least and the most tokens; ``name`` is the parameter's."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise UsageError(f"{name} is {text!r}, expected tokens from 1, as 128, or a range of them, as 128-512")
    return found


class Client:
    """Requests to one server, each on a thread of its caller; connections are kept where the server keeps them."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        if parts.scheme not in ("http", "https") or not host or not _fits_a_header(url) or " " in url:
            raise UsageError(f"{url!r} is no URL of a server; expected for example http://localhost:8000")
        if key is not None and not _fits_a_header(key):
            raise UsageError("the API key is empty, or has characters that no header may have")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connect = partial(kind, host, port, timeout=timeout_s)
        self.base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout_s = timeout_s
        self._idle: list[HTTPConnection] = []

    def models(self) -> Any:
        """The server's list of models; raises OSError, HTTPException or ValueError where it gives none."""
        connection, response = self._send("GET", "/models")
        content = response.read()
        self._keep(connection, response)
        return json.loads(content)

    def ask(self, body: bytes, exchange: Exchange) -> None:
        """Send one request and note what comes; nothing is raised."""
        exchange.sent = time.perf_counter()
        try:
            connection, response = self._send("POST", "/chat/completions", body)
            try:
                self._read(response, exchange)
            finally:
                self._keep(connection, response)
        except TimeoutError:
            exchange.fail("timeout", f"no whole answer after {self._timeout_s:g} s")
        except (OSError, HTTPException) as error:
            exchange.fail("connection lost", f"{type(error).__name__}: {error}")
        exchange.close(time.perf_counter())

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _send(self, method: str, path: str, body: bytes | None = None) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request on a kept connection, or on a new one where there is none or the server gave it up."""
        while True:
            kept = self._take()
            connection = kept or self._connect()
            try:
                connection.request(method, self.base + path, body, self._headers)
                return connection, connection.getresponse()
            except (OSError, HTTPException) as error:
                connection.close()
                if kept is None or not isinstance(error, ConnectionError):
                    raise

    def _take(self) -> HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _keep(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        if response.isclosed() and not response.will_close:
            self._idle.append(connection)
        else:
            response.close()
            connection.close()

    def _read(self, response: HTTPResponse, exchange: Exchange) -> None:
        """Give the exchange each event of a stream, or what the server said instead."""
        kind = response.headers.get("content-type", "")
        if response.status != 200 or not kind.startswith("text/event-stream"):
            problem = f"HTTP {response.status}" if response.status != 200 else "no event stream"
            exchange.fail(problem, response.read(READ_BYTES).decode(errors="replace"))
            response.read()
            return
        rest = b""
        while piece := response.read1(READ_BYTES):
            moment = time.perf_counter()
            if moment > exchange.sent + self._timeout_s:
                raise TimeoutError
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    exchange.note(moment, line[5:].strip())


def _fits_a_header(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


class Bodies:
    """The JSON of each request, by its number: prompts of words, no two alike."""

    def __init__(self, settings: LoadSettings, model: str) -> None:
        self._settings = settings
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if settings.ignore_eos:
            self._fields["ignore_eos"] = True
        self._prompt, self._answer = (
            read_length(getattr(settings, name), name) for name in ("prompt_length", "max_tokens")
        )
        self.per_word, self.template = 1.0, 0.0  # tokens

    def __call__(self, number: int) -> bytes:
        """The JSON of a request."""
        draw = np.random.default_rng([self._settings.seed, number])
        tokens, answer = (int(draw.integers(low, high + 1)) for low, high in (self._prompt, self._answer))
        return self.of_words(max(1, round((tokens - self.template) / self.per_word)), answer, draw)

    def of_words(self, count: int, max_tokens: int, draw: np.random.Generator) -> bytes:
        """Write the JSON of a request with so many random words."""
        messages = [{"role": "user", "content": " ".join(draw.choice(WORDS, count))}]
        fields = {**self._fields, "max_tokens": max_tokens, "messages": messages}
        return json.dumps({**fields, **self._settings.extra_body}).encode()

    def calibrate(self, ask: Callable[[bytes], Exchange]) -> None:
        """Learn by two probes how many tokens the server counts for a word and for the chat template."""
        draw = np.random.default_rng([self._settings.seed, MAX_REQUESTS])
        few, many = (ask(self.of_words(count, 1, draw)).prompt_tokens for count in PROBES)
        if few is not None and many is not None and many > few:
            self.per_word = (many - few) / (PROBES[1] - PROBES[0])
            self.template = few - self.per_word * PROBES[0]


def serve_load(
    settings: LoadSettings, key: str | None = None, progress: Callable[..., None] = lambda step, fraction: None
) -> dict[str, Any]:
    """Run the tests, with ``key`` as bearer token, and report them; ``progress`` gets words and a fraction or None.

    Returns:
        The arguments, the server, the client's machine, and ``points``: the figures of each rate or concurrency, as
        :func:`llmc.runtime.bench.serve_report.figures` computes them.

    Raises:
        UsageError: an argument is out of its range.
        LlmcError: the server does not answer the requests that come before the tests.
    """
    settings.check()
    clients = () if settings.rate else settings.concurrency or (1,)
    tests = [*((rate, None) for rate in settings.rate), *((None, number) for number in clients)]
    points = []
    with closing(Client(settings.url, key, settings.timeout)) as client:
        model = settings.model or first_model(client)
        bodies = prepare_bodies(settings, client, model, progress)
        for rate, concurrency in tests:
            exchanges, busy = one_test(settings, client, bodies, rate, concurrency, progress)
            points.append({"rate": rate, "concurrency": concurrency, **figures(exchanges, busy)})
    machine = {"cpu": cpu_model(), "threads": usable_threads(), "system": platform.platform()}
    return {
        "schema": 2,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "server": settings.url,
        "model": model,
        "arguments": asdict(settings),
        "client": {**machine, "llmc": __version__, "python": platform.python_version()},
        "points": points,
    }


def first_model(client: Client) -> str:
    try:
        return str(client.models()["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise LlmcError(
            f"{client.base}/models lists no model ({type(error).__name__}: {error}); check the URL, or name a model"
        ) from error


def prepare_bodies(settings: LoadSettings, client: Client, model: str, progress: Callable[..., None]) -> Bodies:
    """The requests of the tests, after the probes and the warm-up."""

    def ask(body: bytes) -> Exchange:
        exchange = Exchange(time.perf_counter())
        client.ask(body, exchange)
        if exchange.failure is not None and exchange.failure[0] != "no output":  # one token may have no text
            raise LlmcError(f"{settings.url}: {': '.join(exchange.failure)}")
        return exchange

    bodies = Bodies(settings, model)
    bodies.calibrate(ask)
    for number in range(settings.warm_up):
        progress(f"warm-up {number + 1} of {settings.warm_up}", None)
        ask(bodies(MAX_REQUESTS + 1 + number))
    return bodies


def one_test(
    settings: LoadSettings,
    client: Client,
    bodies: Callable[[int], bytes],
    rate: float | None,
    concurrency: int | None,
    progress: Callable[..., None],
) -> tuple[list[Exchange], float]:
    """The exchanges at one rate or concurrency, and the share of a CPU that the client took."""
    exchanges: list[Exchange] = []
    cpu, started = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(MAX_CONCURRENCY + 1) as pool:

        def send(body: bytes, due: float) -> None:
            exchanges.append(exchange := Exchange(due))
            client.ask(body, exchange)

        if rate is not None:
            running = [pool.submit(open_loop, settings, rate, bodies, lambda *request: pool.submit(send, *request))]
        else:
            numbers = itertools.count()
            running = [pool.submit(run_closed_loop, settings, numbers, bodies, send) for _ in range(concurrency or 1)]
        while wait(running, TICK_S).not_done:
            seconds, ended = time.perf_counter() - started, sum(each.ended > 0 for each in list(exchanges))
            done = max(ended / settings.most_requests, seconds / settings.duration if settings.duration else 0.0)
            name = f"rate {rate:g}" if rate is not None else f"concurrency {concurrency}"
            progress(f"{name}: {ended} answered, {len(exchanges) - ended} in flight", min(1.0, done))
        for each in running:
            each.result()
    return exchanges, (time.process_time() - cpu) / (time.perf_counter() - started)


def open_loop(
    settings: LoadSettings, rate: float, bodies: Callable[[int], bytes], send: Callable[[bytes, float], object]
) -> None:
    """Send each request when it is due, late ones at once, whatever became of the others."""
    start, limit, offset = time.perf_counter(), settings.duration or float("inf"), 0.0
    gaps, number = np.random.default_rng(settings.seed), 0  # of a Poisson process
    while offset < limit and number < settings.most_requests:
        body, due = bodies(number), start + offset
        if (rest := due - time.perf_counter()) > 0:
            time.sleep(rest)
        send(body, due)
        offset, number = offset + float(gaps.exponential(1 / rate)), number + 1


def run_closed_loop(
    settings: LoadSettings,
    numbers: Iterator[int],
    bodies: Callable[[int], bytes],
    send: Callable[[bytes, float], object],
) -> None:
    """Send the next of the shared ``numbers`` when the last answer has come, until they or the time are used up."""
    until = time.perf_counter() + (settings.duration or float("inf"))
    while time.perf_counter() < until and (number := next(numbers)) < settings.most_requests:
        body = bodies(number)
        send(body, time.perf_counter())
