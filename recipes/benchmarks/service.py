"""Measure the service: its overhead over the engine in the same process, and its speed next to llama.cpp's server.

    python service.py overhead BUNDLE
    python service.py peers BUNDLE GGUF --python venvs/llamacpp/bin/python   # the interpreter that has xllamacpp

A server's clients are `clients.py` in a separate process. In the process, threads call `stream_chat` and note each
token on the engine's thread, the least that a client can cost. The systems alternate. Answers are greedy, and two
prompts share only the template's beginning.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from clients import Exchange, closed_loop, make_prompts
from machine import Disturbance, in_turns, positive, publish, ratio, table
from peers import ENVIRONMENT

from llmc.runtime import Delta, Generator, load
from llmc.runtime.host.machine import usable_threads

PATIENCE_S = 180.0  # for a server to load its model
LIMIT_S = 540.0  # of one process of clients
# llama.cpp's own server as a library, with continuous batching.
LLAMACPP_SERVER = """
import signal, sys, xllamacpp
model, port, threads, rows, context = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = model, ["127.0.0.1"], port
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.n_parallel, params.n_ctx = rows, rows * context
params.cont_batching = params.use_jinja = True
server = xllamacpp.Server(params)
signal.pause()
"""
Ask = Callable[[int, int], dict[str, Any]]  # (concurrency, number of the round) -> figures of the clients


@contextmanager
def server(command: Sequence[object], port: int, ready: str) -> Iterator[int]:
    """Run a server during the block, once GET ``ready`` answers 200; yields its process id.
    Raises SystemExit: it ended, or is not ready in time."""
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
            process.communicate(timeout=20)
        process.kill()
        process.wait()


def wait_for(process: "subprocess.Popen[str]", url: str) -> None:
    """Wait until a URL answers 200. Raises SystemExit: the process ended, or it takes too long."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll() is not None:
            last = (process.communicate()[1].strip() or "no message").splitlines()[-1]
            raise SystemExit(f"a server ended with {process.returncode}: {last}")
        with suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} is not ready after {PATIENCE_S:g} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def over_http(args: argparse.Namespace, port: int, concurrency: int, number: int) -> dict[str, Any]:
    """Figures of clients in a separate process. Raises SystemExit: they failed."""
    options = {
        "--concurrency": concurrency,
        "--requests": concurrency * args.requests,
        "--seed": seed_of(number, concurrency),
        "--prompt": args.prompt,
        "--new-tokens": args.new_tokens,
    }
    command = [sys.executable, str(Path(__file__).with_name("clients.py")), f"http://127.0.0.1:{port}"]
    command += [str(part) for option in options.items() for part in option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the clients failed: {done.stderr.strip() or done.stdout}")
    return dict(json.loads(done.stdout))


def in_process(args: argparse.Namespace, model: Generator, concurrency: int, number: int) -> dict[str, Any]:
    """Figures of ``concurrency`` threads that ask one question after the other."""

    def messages(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    def ask(prompt: str) -> Exchange:
        exchange = Exchange(time.perf_counter())
        last = threading.Event()  # waiting for a result would wake the thread at each piece, which costs time

        def note(delta: Delta) -> None:
            exchange.pieces.append(time.perf_counter())
            exchange.tokens += len(delta.token_ids)
            if exchange.tokens >= args.new_tokens:
                last.set()

        options = {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}
        answer = model.stream_chat(messages(prompt), on_delta=note, **options)
        last.wait(LIMIT_S)
        exchange.prompt_tokens = answer.result().usage.prompt_tokens
        return exchange

    def count(prompt: str) -> int:
        return len(model.chat_tokens(messages(prompt)))

    seed = seed_of(number, concurrency)
    return closed_loop(ask, make_prompts(count, args.prompt, concurrency * args.requests, seed), concurrency)


def seed_of(number: int, concurrency: int) -> int:
    """The seed for a round's prompts, the same for all systems."""
    return 1000 * number + concurrency


def overhead(args: argparse.Namespace, held: ExitStack, pids: list[int]) -> dict[str, Ask]:
    """The bundle in this process, and in a server."""
    rows = max(args.concurrency)
    model = held.enter_context(load(args.bundle, threads=args.threads, max_batch=rows))
    return {"in the process": partial(in_process, args, model), "llmc serve": our_server(args, held, pids)}


def peers(args: argparse.Namespace, held: ExitStack, pids: list[int]) -> dict[str, Ask]:
    """Both servers, with equal rows, threads and positions."""
    port = free_port()
    sizes = (args.threads, max(args.concurrency), args.prompt + args.new_tokens + 64)
    command = (args.python, "-c", LLAMACPP_SERVER, args.gguf, port, *sizes)
    pids.append(held.enter_context(server(command, port, "/health")))
    return {"llama.cpp": partial(over_http, args, port), "llmc serve": our_server(args, held, pids)}


def our_server(args: argparse.Namespace, held: ExitStack, pids: list[int]) -> Ask:
    port, rows = free_port(), max(args.concurrency)
    options = ("--port", port, "--max-batch", rows, "--threads", args.threads)
    command = (sys.executable, "-m", "llmc.cli", "serve", args.bundle, *options)
    pids.append(held.enter_context(server(command, port, "/ready")))
    return partial(over_http, args, port)


def lines(found: dict[str, dict[str, list[dict[str, Any]]]]) -> Iterator[tuple[str, ...]]:
    """Cells of the table, per concurrency: both systems' medians over rounds, and the ratio."""
    for name, ways in found.items():
        for figure, label in (("output_tokens_per_s", "tok/s"), ("ttft", "TTFT p50, ms"), ("tpot", "TPOT p50, ms")):
            sides = [
                [point[figure] if label == "tok/s" else point[figure]["p50"] * 1e3 for point in rounds]
                for rounds in ways.values()
            ]
            medians = (f"{statistics.median(side):.2f}" for side in sides)
            yield f"{name}: {label}", *medians, ratio(sides[1], sides[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=("overhead", "peers"))
    parser.add_argument("bundle", type=Path, help="built with --max-batch of at least the concurrency")
    parser.add_argument("gguf", type=Path, nargs="?", help="of peers: the same checkpoint, from convert_gguf.py")
    parser.add_argument("--python", type=Path, help="of peers: the interpreter that has xllamacpp")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--requests", type=positive, default=12, help="of each client in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=usable_threads())
    parser.add_argument("--json", type=Path, help="file for every round")
    args = parser.parse_args()
    if args.measurement == "peers" and not (args.gguf and args.python):
        parser.error("peers needs the GGUF file and --python")
    with ExitStack() as held:
        pids: list[int] = []
        ways = (overhead if args.measurement == "overhead" else peers)(args, held, pids)
        meanwhile = Disturbance(pids)
        rounds = {
            f"{number} clients": in_turns({name: partial(ask, number) for name, ask in ways.items()}, args.rounds)
            for number in args.concurrency
        }
        other_cpus = meanwhile.cpus()
    head = (args.bundle.name, *ways, "ratio")
    publish(args.json, other_cpus, [table(head, *lines(rounds))], rounds=rounds)


if __name__ == "__main__":
    main()
