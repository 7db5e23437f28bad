"""Measure what HTTP adds: one loaded model, asked in the process and through the service, in turns.

In the process threads call ``Model.stream_chat`` and note each token on the engine's thread, which is the least that a
client can cost. Through HTTP the same prompts come from ``llmc bench serve`` in a process of its own, as clients are.
Both are closed loops of as many clients. TTFT counts from the call or the request, so it holds template and tokenizer
on both sides. What a client waits beyond the engine's own TTFT (of the same requests, from the queue to the token) is
also told by itself: it does not depend on how requests met each other in the queue. At last more streams than rows run
at once, and each must come to its end.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
from engine_measures import Check, Found, run
from serving import clients

from llmc.runtime import Delta, Model
from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.prompts import Length, WordCount, drawn
from llmc.runtime.bench.serve_report import point
from llmc.runtime.bench.wire import run as run_on_loop
from llmc.runtime.observe.tracing import fields_of
from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.guard.guarded import guarded, uvicorn_options
from llmc.runtime.server.logs import RequestLog
from llmc.runtime.server.pool import ModelPool

MAX_TTFT_MS, MAX_TPOT_MS = 2.0, 0.3  # that HTTP may add
AT = 8  # the concurrency that the targets are for
SLOWEST = 30  # functions that --profile lists


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


def in_process(model: Model, prompts: Sequence[str], concurrency: int, max_tokens: int) -> dict[str, Any]:
    """The point of so many threads that ask one prompt after the other."""
    exchanges, todo = list[Exchange](), iter(prompts)

    def client() -> None:
        while (prompt := next(todo, None)) is not None:
            exchange = Exchange(time.perf_counter())
            exchange.sent = exchange.due

            last = threading.Event()  # whoever waits for a result is woken by each piece, which is not free

            def note(delta: Delta, exchange: Exchange = exchange, last: threading.Event = last) -> None:
                exchange.chunks.append(time.perf_counter())
                if len(exchange.chunks) == max_tokens:
                    last.set()

            messages = [{"role": "user", "content": prompt}]
            handle = model.stream_chat(messages, max_tokens=max_tokens, temperature=0, ignore_eos=True, on_delta=note)
            last.wait()
            exchange.completion_tokens = handle.result().usage.completion_tokens
            exchange.ended = time.perf_counter()
            exchanges.append(exchange)

    with ThreadPoolExecutor(concurrency) as pool:
        for started in [pool.submit(client) for _ in range(concurrency)]:
            started.result()
    return asdict(point(exchanges, rate=None, concurrency=concurrency, client_cpu=0.0, slo={}))


def over_http(url: str, prompts: Sequence[str], concurrency: int, max_tokens: int) -> dict[str, Any]:
    """The point that ``llmc bench serve`` finds."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(prompt)}\n" for prompt in prompts)
        file.flush()
        counts = ("--concurrency", concurrency, "--requests", len(prompts), "--warm-up", 0)
        [found] = clients(url, "--prompts", file.name, "--max-tokens", max_tokens, *counts)
    return found


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
    draw = drawn(length, 0.0, 0, WordCount())

    def prompts(count: int) -> list[str]:
        return [str(draw(next(numbers))) for _ in range(count)]

    rounds: list[dict[str, Any]] = []
    try:
        for number in range(args.rounds + 1):
            found: dict[str, Any] = {}
            for concurrency in (1, AT):
                count = args.requests * concurrency if number else concurrency
                work = (prompts(count), concurrency, args.new_tokens)
                ways = [("process", in_process, service.model), ("http", over_http, service.url)]
                for way, ask, where in ways if number % 2 else ways[::-1]:
                    before = service.cpu_s()
                    with EngineTimes() as own:
                        answered = ask(where, *work)
                        service.model.engine.call(lambda: None)  # a client may have its result before the log its line
                    spent = (service.cpu_s() - before) / (len(work[0]) * args.new_tokens)
                    of_engine = {"loop_cpu_per_token_s": spent, "engine_ttft_p50_s": statistics.median(own.ttft)}
                    found.setdefault(str(concurrency), {})[way] = {**answered, **of_engine}
            rounds.append(found)
        many = over_http(service.url, prompts(args.streams), args.streams, args.new_tokens)
        if args.profile:
            with service.profiled():
                over_http(service.url, prompts(args.requests * AT), AT, args.new_tokens)
    finally:
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
        new_tokens=(64, "tokens of each answer"),
        requests=(4, "requests of each client in a round"),
        streams=(64, "streams at once at last"),
        profile=(False, "profile the event loop of the service in one more round"),
    )


if __name__ == "__main__":
    main()
