"""Measure what HTTP adds: one loaded model, asked in the process and through the service, in turns.

In the process threads call ``Model.stream_chat`` and note each token on the engine's thread, which is the least that a
client can cost. Through HTTP the same prompts come from a process of its own, as clients are, over ``llmc bench``'s
connections; it shares the processors with the service. Both are closed loops of as many clients, whose first requests
are not counted: they open connections. Answers are of different lengths, the same ones both ways: clients of equal
answers meet each other in the queue again and again, or never. TTFT counts from the call or the request, so it holds
template and tokenizer on both sides. What a client waits beyond the engine's own TTFT (of the same requests, from the
queue to the token) is also told by itself: it does not depend on how requests met each other in the queue. At last more
streams than rows run at once, and each must come to its end.
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import logging
import multiprocessing
import pstats
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn
from engine_measures import Check, Found, run

from llmc.runtime import Delta, Model
from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.prompts import Length, WordCount, drawn
from llmc.runtime.bench.serve_load import send
from llmc.runtime.bench.serve_report import point
from llmc.runtime.bench.wire import Client, server_at
from llmc.runtime.bench.wire import run as run_on_loop
from llmc.runtime.observe.tracing import fields_of
from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import guarded, uvicorn_options
from llmc.runtime.server.http.logs import RequestLog
from llmc.runtime.server.models.pool import ModelPool

MAX_TTFT_MS, MAX_TPOT_MS = 2.0, 0.3  # that HTTP may add
AT = 8  # the concurrency that the targets are for
SLOWEST = 30  # functions that --profile lists
FEWEST = 48  # timed requests of a round
LIMIT_S = 60.0  # of one request
Work = list[tuple[str, int]]  # prompts, and the tokens of their answers


class EngineTimes(logging.Handler):
    """The engine's own times to the first token, in seconds, of the requests that end while the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ttft: list[float] = []
        self._log = logging.getLogger("llmc.runtime.engine.output_processor")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the time of a request that has one."""
        if isinstance(ttft := fields_of(record).get("ttft_s"), float):
            self.ttft.append(ttft)

    def __enter__(self) -> "EngineTimes":
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *exception: object) -> None:
        self._log.removeHandler(self)


class Service:
    """The service in a thread of this process, and the model that it serves.

    Args:
        config: its settings.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config, self._ready = config, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            run_on_loop(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ModelPool(self._config.models, memory=self._config.memory, load_options=self._config.load_options)
        app = RequestLog(guarded(make_app(self._config, self._pool), self._config))
        quiet: dict[str, Any] = {"port": 0, "log_config": None, "access_log": False, "lifespan": "off"}
        self._server = uvicorn.Server(uvicorn.Config(app, **quiet, **uvicorn_options(self._config)))
        async with self._pool.lease(next(iter(self._config.models))) as self.model:
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
            self._ready.set()
            await serving
        await self._pool.close(drain=False)

    def cpu_s(self) -> float:
        """CPU seconds of the event loop's thread until now."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Print where the event loop's thread spends its time while the block runs."""
        profile = cProfile.Profile(time.thread_time)  # waiting for the interpreter or a core is not counted
        self._loop.call_soon_threadsafe(profile.enable)
        yield
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (profile.disable(), done.set()))
        done.wait()
        pstats.Stats(profile).sort_stats("tottime").print_stats(SLOWEST)

    def close(self) -> None:
        """Stop serving, and let the model go."""
        self._server.should_exit = True
        self._thread.join()


def body_of(prompt: str, tokens: int) -> bytes:
    """The body of a request for so many tokens."""
    exact = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"messages": [{"role": "user", "content": prompt}], **exact, **streamed}).encode()


def found(exchanges: list[Exchange], concurrency: int, busy: float = 0.0) -> dict[str, Any]:
    """The figures of these exchanges.

    Raises:
        SystemExit: one failed.
    """
    failed = next((exchange.failure for exchange in exchanges if exchange.failure is not None), None)
    if failed is not None:
        raise SystemExit(f"a request failed: {failed.kind}: {failed.message}")
    return asdict(point(exchanges, rate=None, concurrency=concurrency, client_cpu=busy, slo={}))


def in_process(model: Model, work: Work, concurrency: int) -> dict[str, Any]:
    """The point of so many threads that ask one prompt after the other."""
    exchanges = list[Exchange]()

    def client(todo: Iterator[tuple[str, int]], exchanges: list[Exchange]) -> None:
        while (asked := next(todo, None)) is not None:
            prompt, tokens = asked
            exchange = Exchange(time.perf_counter())
            exchange.sent = exchange.due

            last = threading.Event()  # whoever waits for a result is woken by each piece, which is not free

            def note(
                delta: Delta, exchange: Exchange = exchange, last: threading.Event = last, tokens: int = tokens
            ) -> None:
                exchange.chunks.append(time.perf_counter())
                if len(exchange.chunks) == tokens:
                    last.set()

            messages = [{"role": "user", "content": prompt}]
            handle = model.stream_chat(messages, max_tokens=tokens, temperature=0, ignore_eos=True, on_delta=note)
            last.wait()
            exchange.completion_tokens = handle.result().usage.completion_tokens
            exchange.ended = time.perf_counter()
            exchanges.append(exchange)

    with ThreadPoolExecutor(concurrency) as pool:
        for todo, kept in ((iter(work[:concurrency]), []), (iter(work[concurrency:]), exchanges)):
            for started in [pool.submit(client, todo, kept) for _ in range(concurrency)]:
                started.result()
    return found(exchanges, concurrency)


def over_http(clients: Executor, url: str, work: Work, concurrency: int) -> dict[str, Any]:
    """The point of so many clients in another process."""
    exchanges, busy = clients.submit(ask, url, work, concurrency).result()
    return found(exchanges, concurrency, busy)


def ask(url: str, work: Work, concurrency: int) -> tuple[list[Exchange], float]:
    """Ask one prompt after the other on each of so many connections; the exchanges but for the first of each, and the
    share of this process's time that it worked."""
    return run_on_loop(_asked(url, work, concurrency))


async def _asked(url: str, work: Work, concurrency: int) -> tuple[list[Exchange], float]:
    client = Client(server_at(url), LIMIT_S)

    async def worker(todo: Iterator[tuple[str, int]], exchanges: list[Exchange]) -> None:
        while (asked := next(todo, None)) is not None:
            body, exchange = body_of(*asked), Exchange(time.perf_counter())
            exchanges.append(exchange)
            await send(client, "/chat/completions", body, exchange)

    async def workers(todo: Work) -> list[Exchange]:
        exchanges, shared = list[Exchange](), iter(todo)
        await asyncio.gather(*(worker(shared, exchanges) for _ in range(concurrency)))
        return exchanges

    await workers(work[:concurrency])  # which open the connections
    cpu, start = time.process_time(), time.perf_counter()
    exchanges = await workers(work[concurrency:])
    busy = (time.process_time() - cpu) / (time.perf_counter() - start)
    client.close()
    return exchanges, busy


def difference(rounds: Sequence[dict[str, Any]], concurrency: int, name: str) -> float:
    """Milliseconds that HTTP adds to the median of a latency: the median over rounds of the difference within one."""
    of = [each[str(concurrency)] for each in rounds]
    return statistics.median(each["http"][name]["p50"] - each["process"][name]["p50"] for each in of) * 1e3


def outside(rounds: Sequence[dict[str, Any]], concurrency: int) -> float:
    """Milliseconds that HTTP adds to what a client waits beyond the engine's own TTFT: the median over rounds of the
    difference within one, of medians."""

    def beyond(found: dict[str, Any]) -> float:
        return float(found["ttft"]["p50"] - found["engine_ttft_p50_s"])

    of = [each[str(concurrency)] for each in rounds]
    return statistics.median(beyond(each["http"]) - beyond(each["process"]) for each in of) * 1e3


def measure(args: argparse.Namespace) -> Found:
    """Rounds of both ways at each concurrency, in turns; round 0 is untimed; then the many streams."""
    options = {"threads": args.threads, "prefix_cache_bytes": 0, "max_batch": AT}
    service = Service(ServerConfig(models={"model": args.bundle}, **options))
    length, numbers = Length(args.words, args.words), iter(range(1_000_000))
    draw, answers = drawn(length, 0.0, 0, WordCount()), Length(args.new_tokens // 2, args.new_tokens * 3 // 2)

    def prompts(count: int) -> Work:
        return [(str(draw(number)), answers.draw(0, number)) for number in itertools.islice(numbers, count)]

    rounds: list[dict[str, Any]] = []
    clients = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    asked: dict[str, Callable[[Work, int], dict[str, Any]]] = {
        "process": partial(in_process, service.model),
        "http": partial(over_http, clients, service.url),
    }
    try:
        for number in range(args.rounds + 1):
            of_round: dict[str, Any] = {}
            for concurrency in (1, AT):
                timed = max(args.requests * concurrency, FEWEST) if number else concurrency
                work = prompts(timed + concurrency)
                for way in list(asked)[:: 1 if number % 2 else -1]:
                    before = service.cpu_s()
                    with EngineTimes() as own:
                        point = asked[way](work, concurrency)
                        service.model.engine.call(lambda: None)  # a client may have its result before the log its line
                    spent = (service.cpu_s() - before) / sum(tokens for _, tokens in work)
                    ttft = statistics.median(own.ttft[concurrency:])
                    answered = {**point, "loop_cpu_per_token_s": spent, "engine_ttft_p50_s": ttft}
                    of_round.setdefault(str(concurrency), {})[way] = answered
            rounds.append(of_round)
        many = asked["http"](prompts(2 * args.streams), args.streams)
        if args.profile:
            with service.profiled():
                asked["http"](prompts((args.requests + 1) * AT), AT)
    finally:
        clients.shutdown()
        service.close()
    return findings(rounds[1:], many, args)


def findings(rounds: list[dict[str, Any]], many: dict[str, Any], args: argparse.Namespace) -> Found:
    """Differences beside their targets, and all medians of the last round."""
    checks = [
        Check(f"HTTP adds to {name.upper()} at concurrency {number}, ms", difference(rounds, number, name), most, True)
        for number in (1, AT)
        for name, most in (("ttft", MAX_TTFT_MS), ("tpot", MAX_TPOT_MS))
    ]
    checks.append(Check(f"of {args.streams} streams at once, completed", many["completed"], args.streams))
    checks += [
        Check(f"of TTFT at concurrency {number} outside the engine, ms", outside(rounds, number), MAX_TTFT_MS, True)
        for number in (1, AT)
    ]
    head = ("medians of the last round, ms", "TTFT", "TPOT", "E2E", "CPU of the loop per token", "tok/s")
    rows = [
        (f"concurrency {number}, {way}", *(f"{of[name]['p50'] * 1e3:.3f}" for name in ("ttft", "tpot", "e2e")), *rest)
        for number, ways in rounds[-1].items()
        for way, of in ways.items()
        for rest in [(f"{of['loop_cpu_per_token_s'] * 1e3:.3f}", f"{of['output_tokens_per_s']:.1f}")]
    ]
    details = {"rounds": rounds, "many": many, "prompt_words": args.words, "new_tokens": args.new_tokens}
    return Found(checks, details, [(head, *rows)])


def main() -> None:
    """Print the figures."""
    run(
        measure,
        __doc__,
        rounds=5,
        words=(96, "words of the prompts"),
        new_tokens=(64, "tokens of an answer in the mean; they have half to one and a half times as many"),
        requests=(12, "timed requests of each client in a round"),
        streams=(64, "streams at once at last"),
        profile=(False, "profile the event loop of the service in one more round"),
    )


if __name__ == "__main__":
    main()
