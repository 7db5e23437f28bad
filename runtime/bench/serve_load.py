"""Load on an OpenAI-compatible server: requests that come at a rate whatever becomes of them, or clients that wait.

At a rate (an open loop) no arrival waits for an answer, as users do not wait for one another; beside latencies from the
moment of sending there are those from the moment at which a request was due, so a late client hides nothing. At a
concurrency (a closed loop) so many clients send their next request when they have their last answer; such a load slows
down together with the server and never shows its queue. See :mod:`llmc.runtime.bench.load_test` for the sources.
"""

import asyncio
import datetime
import itertools
import json
import platform
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmc import __version__
from llmc.errors import LlmcError, UsageError
from llmc.runtime.bench.arrivals import due_times
from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.prompts import Draw, Prompt, WordCount, drawn, from_file, read_length, word_count
from llmc.runtime.bench.serve_report import SCHEMA, Point, ServeReport, point, read_slo
from llmc.runtime.bench.wire import Client, run, server_at
from llmc.runtime.host.machine import cpu_model, usable_threads

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
OWN = ("model", "messages", "prompt", "stream", "stream_options")  # of the body: what the test itself decides
PROBES = (64, 128)  # words of the prompts that show how a server counts
MAX_REQUESTS, MIN_RATE, MAX_CONCURRENCY = 1_000_000, 1e-6, 10_000
REQUESTS = 64  # where neither a number nor a duration is given
TICK_S = 0.2  # between two reports of progress
Progress = Callable[[str, float | None], None]
Request = Callable[[bytes, Exchange], Coroutine[Any, Any, None]]


def silent(step: str, fraction: float | None) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The arguments of a load test.

    Attributes:
        url: of the server, with or without ``/v1``.
        api: ``chat`` or ``completions``.
        model: None takes the first one that the server lists.
        rate: requests per second, one test for each; above 0.
        even: gaps between arrivals are equal; else exponential (a Poisson process).
        concurrency: clients of a closed loop, one test for each; one client if there is no rate either.
        requests: of each test, to 1,000,000; 64 where there is no duration.
        duration: seconds in which requests are sent; those under way are waited for.
        warm_up: requests before the first test, one after the other, that are not counted.
        seed: of arrivals, prompts and lengths.
        prompts: a file of prompts (:func:`llmc.runtime.bench.prompts.from_file`); else words are drawn.
        prompt_length: tokens of a drawn prompt with its chat template, as ``128`` or ``128-512``. Two probes tell how
            many tokens the server counts for a word; the report has what it counted for each request.
        shared_prefix: the share of each drawn prompt, from 0 to 1, that all have in common.
        max_tokens: of each answer, likewise.
        ignore_eos: ask for exactly as many, by a field of the body that not every server takes.
        usage: ask for the count of tokens at the stream's end, by ``stream_options``; without it pieces are counted.
        extra_body: more fields of the body.
        timeout: of a request, to the end of its answer.
        slo: objectives, as ``ttft=0.5,tpot=0.05,e2e=10``.
        ca_file: certificates to trust in place of the system's.
    """

    url: str
    api: str = "chat"
    model: str | None = None
    rate: Sequence[float] = ()
    even: bool = False
    concurrency: Sequence[int] = ()
    requests: int | None = None
    duration: float | None = None
    warm_up: int = 2
    seed: int = 0
    prompts: Path | None = None
    prompt_length: str = "128"
    shared_prefix: float = 0.0
    max_tokens: str = "64"
    ignore_eos: bool = False
    usage: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    slo: str | None = None
    ca_file: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: an argument is out of its range, or contradicts another one.
        """
        if self.rate and self.concurrency:
            rates, clients = ",".join(map(str, self.rate)), ",".join(map(str, self.concurrency))
            raise UsageError(f"rate is {rates} and concurrency is {clients}: give one, requests come or clients wait")
        if self.even and not self.rate:
            raise UsageError("even is for arrivals at a rate: give rate too")
        limits: list[tuple[str, float, float, float]] = [
            ("requests", most_requests(self), 1, MAX_REQUESTS),
            ("warm_up", self.warm_up, 0, MAX_REQUESTS),
            ("seed", self.seed, 0, 2**63),
            ("shared_prefix", self.shared_prefix, 0, 1),
            ("timeout", self.timeout, 1e-3, 1e6),
            *(("rate", rate, MIN_RATE, 1e6) for rate in self.rate),
            *(("concurrency", number, 1, MAX_CONCURRENCY) for number in self.concurrency),
            *(("duration", seconds, 1e-3, 1e6) for seconds in (self.duration,) if seconds is not None),
        ]
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise UsageError(f"{name} is {value!r}, expected from {low:g} to {high:,g}")
        if own := sorted(set(self.extra_body) & set(OWN)):
            raise UsageError(f"extra_body has {', '.join(own)}, which the test itself decides; leave it out")


@dataclass(frozen=True)
class Body:
    """Bodies of requests, by number."""

    settings: LoadSettings
    model: str
    draw: Draw

    def __call__(self, number: int) -> bytes:
        """The JSON of a request."""
        settings = self.settings
        lengths = read_length(settings.max_tokens, "max_tokens")
        return self.of(self.draw(number), lengths.draw(settings.seed, 4, number))

    def of(self, prompt: Prompt, max_tokens: int) -> bytes:
        """The JSON of a request for ``max_tokens`` after ``prompt``."""
        settings = self.settings
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens}
        if settings.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        elif isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            raise UsageError(f"{settings.prompts} has messages, which are for chat; give texts for api completions")
        if settings.usage:
            body["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps({**body, **settings.extra_body}).encode()


def serve_load(
    settings: LoadSettings, key: str | None = None, progress: Progress = silent
) -> tuple[ServeReport, list[list[Exchange]]]:
    """Run the test or tests; the report, and the exchanges of each of its points.

    Args:
        settings: the arguments.
        key: the API key, sent as a bearer token.
        progress: called some times a second with words and the fraction that is done, None where nobody knows.

    Raises:
        UsageError: an argument is out of its range, or the file of prompts is none.
        LlmcError: the server does not answer the requests that come before the tests.
        MissingExtraError: the extra ``serve`` is not installed.
    """
    settings.check()
    read_length(settings.max_tokens, "max_tokens")
    slo = read_slo(settings.slo) if settings.slo else {}
    client = Client(server_at(settings.url, key, settings.ca_file), settings.timeout)
    return run(_serve_load(settings, client, slo, progress))


async def _serve_load(
    settings: LoadSettings, client: Client, slo: dict[str, float], progress: Progress
) -> tuple[ServeReport, list[list[Exchange]]]:
    try:
        model = settings.model or await first_model(client)
        body = Body(settings, model, await prompts(settings, model, client))
        for number in range(settings.warm_up):
            progress(f"warm-up {number + 1} of {settings.warm_up}", None)
            await _needed(client, settings, body(MAX_REQUESTS + number))
        points, timelines = [], []
        for rate, concurrency in tests(settings):
            found = await one_test(settings, client, body, rate, concurrency, slo, progress)
            points.append(found[0])
            timelines.append(found[1])
    finally:
        client.close()
    return report(settings, model, points), timelines


def tests(settings: LoadSettings) -> list[tuple[float | None, int | None]]:
    """The rate or the concurrency of each test."""
    if settings.rate:
        return [(rate, None) for rate in settings.rate]
    return [(None, number) for number in settings.concurrency or (1,)]


def report(settings: LoadSettings, model: str, points: Sequence[Point]) -> ServeReport:
    """The report around the points."""
    return ServeReport(
        schema=SCHEMA,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        server=settings.url,
        model=model,
        arguments=asdict(settings),
        client={
            "llmc": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpu": cpu_model(),
            "threads": str(usable_threads()),
        },
        points=points,
    )


# --------------------------------------------------------------------------------------------------- before the tests


async def first_model(client: Client) -> str:
    """The first model that the server lists.

    Raises:
        LlmcError: it lists none, or does not answer.
    """
    reply = await client.send("GET", "/models")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        said = reply.failure.message if reply.failure else f"status {reply.status}, {bytes(reply.body[:200])!r}"
        raise LlmcError(
            f"{client.server.base}/models lists no model ({said}); check the URL, or name a model"
        ) from error


async def prompts(settings: LoadSettings, model: str, client: Client) -> Draw:
    """The prompts: a file's, or drawn ones after two probes for how the server counts."""
    if settings.prompts is not None:
        draw = from_file(settings.prompts)
        Body(settings, model, draw)(0)  # a file of messages for an API of texts is refused now
        return draw
    length = read_length(settings.prompt_length, "prompt_length")
    counted: list[tuple[int, int]] = []
    for words in PROBES if settings.usage else ():
        prompt = drawn(type(length)(words, words), 0.0, settings.seed, WordCount())(MAX_REQUESTS)
        exchange = await _needed(client, settings, Body(settings, model, lambda number: "").of(prompt, 1))
        if exchange.prompt_tokens is not None:
            counted.append((words, exchange.prompt_tokens))
    count = word_count(*counted) if len(counted) == len(PROBES) else WordCount()
    return drawn(length, settings.shared_prefix, settings.seed, count)


async def _needed(client: Client, settings: LoadSettings, body: bytes) -> Exchange:
    """An exchange without which there is no use in going on; one without output will do, for it may be one token.

    Raises:
        LlmcError: it failed.
    """
    exchange = Exchange(time.perf_counter())
    await send(client, PATHS[settings.api], body, exchange)
    if exchange.failure is not None and exchange.failure.kind != "no output":
        raise LlmcError(f"{settings.url}: {exchange.failure.kind}: {exchange.failure.message}")
    return exchange


# ------------------------------------------------------------------------------------------------------------ a test


async def send(client: Client, path: str, body: bytes, exchange: Exchange) -> None:
    """Send one request and note what comes; nothing is raised."""
    exchange.sent = time.perf_counter()
    reply = await client.send("POST", path, body, exchange.note)
    exchange.close(time.perf_counter(), reply)


async def one_test(
    settings: LoadSettings,
    client: Client,
    body: Callable[[int], bytes],
    rate: float | None,
    concurrency: int | None,
    slo: dict[str, float],
    progress: Progress,
) -> tuple[Point, list[Exchange]]:
    """The point of one rate or concurrency, and its exchanges."""
    exchanges, tally = list[Exchange](), Tally()

    async def request(content: bytes, exchange: Exchange) -> None:
        exchanges.append(exchange)
        with tally.counting(exchange):
            await send(client, PATHS[settings.api], content, exchange)

    name = f"rate {rate:g}" if rate is not None else f"concurrency {concurrency}"
    cpu, started = time.process_time(), time.perf_counter()
    async with shown(tally, settings, name, progress):
        if rate is not None:
            await open_loop(request, body, within(due_times(rate, settings.seed, settings.even), settings))
        else:
            await closed_loop(request, body, concurrency or 1, settings)
    busy = (time.process_time() - cpu) / (time.perf_counter() - started)
    return point(exchanges, rate=rate, concurrency=concurrency, client_cpu=busy, slo=slo), exchanges


def most_requests(settings: LoadSettings) -> int:
    """Requests of a test at most."""
    if settings.requests is not None:
        return settings.requests
    return REQUESTS if settings.duration is None else MAX_REQUESTS


def within(offsets: Iterable[float], settings: LoadSettings) -> Iterator[float]:
    """The arrivals that the number of requests and the duration leave."""
    limit = settings.duration
    limited = itertools.islice(offsets, most_requests(settings))
    return limited if limit is None else itertools.takewhile(lambda offset: offset < limit, limited)


async def open_loop(request: Request, body: Callable[[int], bytes], offsets: Iterable[float]) -> None:
    """Send each request when it is due, late ones at once, whatever became of the others; then wait for all."""
    start, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    for number, offset in enumerate(offsets):
        content, exchange = body(number), Exchange(start + offset)
        if (wait := exchange.due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(request(content, exchange)))
    await asyncio.gather(*tasks)


async def closed_loop(request: Request, body: Callable[[int], bytes], clients: int, settings: LoadSettings) -> None:
    """Let so many clients send their next request when they have their last answer."""
    start, contents = time.perf_counter(), map(body, range(most_requests(settings)))

    async def client() -> None:
        while settings.duration is None or time.perf_counter() - start < settings.duration:
            if (content := next(contents, None)) is None:
                return
            await request(content, Exchange(time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(clients)))


@dataclass
class Tally:
    """Counts while a test runs: requests that were sent, ended and failed, and pieces of those that ended."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    pieces: int = 0

    @contextmanager
    def counting(self, exchange: Exchange) -> Iterator[None]:
        """Count an exchange that takes place in the block."""
        self.sent += 1
        yield
        self.ended += 1
        self.failed += exchange.failure is not None
        self.pieces += len(exchange.chunks)

    def words(self, seconds: float) -> str:
        """The counts for people."""
        speed = self.pieces / max(seconds, TICK_S)
        return f"{self.ended} answered, {self.sent - self.ended} in flight, {self.failed} failed, {speed:.0f} tok/s"

    def fraction(self, settings: LoadSettings, seconds: float) -> float:
        """The part of the test that is done, by requests or by time, whichever is further."""
        by_time = 0.0 if settings.duration is None else seconds / settings.duration
        return min(1.0, max(by_time, self.ended / most_requests(settings)))


@asynccontextmanager
async def shown(tally: Tally, settings: LoadSettings, name: str, progress: Progress) -> AsyncIterator[None]:
    """Report how far the test is while the block runs."""
    started = time.perf_counter()

    async def tick() -> None:
        while True:
            seconds = time.perf_counter() - started
            progress(f"{name}: {tally.words(seconds)}", tally.fraction(settings, seconds))
            await asyncio.sleep(TICK_S)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
