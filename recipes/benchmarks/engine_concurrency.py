"""Measure what batching gains, and what a long prompt does to those who stream meanwhile.

* Throughput: 8 requests together, beside the same 8 one after another.
* Latency: gaps between the tokens of some streams, before and while a long prompt is prefilled beside them.
* With --peers, instead: requests together beside OpenVINO GenAI's continuous batching and llama.cpp's batched decoding,
  the same prompts and as many new tokens, each system in a process of its own, in turns.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_measures import (
    LONGEST_WAIT,
    Check,
    Found,
    median_ratio,
    opened,
    percentiles,
    run,
    run_batch,
    tokens,
)
from peers import NOT_RUN, Entry, Row, read_systems, run_all
from runners import TOGETHER

from llmc.runtime import Engine, Request, SamplingParams
from llmc.runtime.bench.client import Visit

MIN_GAIN = {"int8": 3.0, "int4": 2.0}  # 8 requests together, by precision
MAX_SLOWDOWN = 2.0  # 95th percentile of gaps beside a prefill
MIN_AHEAD = {"openvino": {8: 1.3, 4: 1.3}, "llamacpp": {8: 2.2}}  # of the peers, by requests at once
SETTLED = 16  # tokens of each stream before its gaps count
STREAM_PROMPT = 32


def request(prompt: list[int], new_tokens: int, visit: Visit | None = None) -> Request:
    """Greedy, and of exactly so many tokens."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return Request(prompt, params, on_delta=visit and visit.note)


def measure_throughput(engine: Engine, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds for all requests, per round: both ways in turns, with other prompts every time; round 0 is untimed."""
    seconds: dict[str, list[float]] = {"serial_s": [], "together_s": []}
    for i in range(args.rounds + 1):
        new_tokens = args.new_tokens if i else min(8, args.new_tokens)
        requests = [request(tokens(args.prompt, 100 * i + salt), new_tokens) for salt in range(args.requests)]
        for way, batches in (("serial_s", [[item] for item in requests]), ("together_s", [requests])):
            started = time.perf_counter()
            for batch in batches:
                run_batch(engine, batch)
            seconds[way].append(time.perf_counter() - started)
    return {way: rounds[1:] for way, rounds in seconds.items()}


def gaps(times: Sequence[float], start: float, end: float) -> list[float]:
    """Gaps between tokens that came at ``times``, of those that overlap the time from ``start`` to ``end``."""
    pairs = itertools.pairwise(times)
    return [after - before for before, after in pairs if after > start and before < end]


def measure_latency(engine: Engine, args: argparse.Namespace, salt: int) -> dict[str, Any]:
    """Start streams, watch them on their own for a while, then submit the prompt.

    Gives the streams' gaps in milliseconds, before and beside the prefill, and the seconds until its first token.
    """
    streams, first = [Visit(0.0) for _ in range(args.streams)], Visit(0.0)
    room = engine.max_context - STREAM_PROMPT
    handles = [engine.submit(request(tokens(STREAM_PROMPT, salt + i), room, v)) for i, v in enumerate(streams)]
    while any(len(stream.tokens) < SETTLED + args.quiet_tokens for stream in streams):
        if any(handle.done for handle in handles):
            raise SystemExit("a stream ended before it was watched; ask for fewer --quiet-tokens")
        time.sleep(0.01)
    settled = max(stream.tokens[SETTLED] for stream in streams)
    submitted = time.monotonic()
    engine.submit(request(tokens(args.long_prompt, salt - 1), 1, first)).result(LONGEST_WAIT)
    time.sleep(0.2)  # the last gap ends after the prompt's first token
    if sum(handle.cancel() for handle in handles) < len(handles):
        raise SystemExit(f"a stream ended before the prompt was fed: {room} tokens are too few; use fewer or shorter")
    times = {"before": (settled, submitted), "beside": (submitted, first.tokens[0])}
    found = {name: percentiles([gap for v in streams for gap in gaps(v.tokens, *span)]) for name, span in times.items()}
    return {**found, "ttft_s": first.tokens[0] - submitted}


def rates(row: Row, requests: int) -> list[float]:
    """New tokens per second of so many requests at once, per round."""
    return [result["tok_s"] for found in row.rounds for result in found["results"] if result["requests"] == requests]


def beside_peers(rows: Sequence[Row], together: Sequence[int]) -> tuple[list[Check], list[tuple[str, ...]]]:
    """Checks of the ratios that have a target, and the table; the first row is ours.

    A cell has the median rate and, of peers, the median over rounds of ours over theirs, least and most in brackets.
    """
    ours, checks = rows[0], []
    lines: list[tuple[str, ...]] = [("new tokens per second, requests at once", *map(str, together))]

    def cells(row: Row) -> Iterator[str]:
        for requests in together:
            found = rates(row, requests)
            ratios = [a / b for a, b in zip(rates(ours, requests), found, strict=False)]
            if not ratios:
                yield row.trouble or NOT_RUN
            elif row is ours:
                yield f"{statistics.median(found):.0f}"
            else:
                middle = statistics.median(ratios)
                yield f"{statistics.median(found):.0f} ({middle:.2f}x; {min(ratios):.2f} to {max(ratios):.2f})"
                if target := MIN_AHEAD.get(row.entry.runner, {}).get(requests):
                    checks.append(Check(f"{requests} requests beside {row.entry.name}", middle, target))

    lines += [(row.entry.name, *cells(row)) for row in rows]
    return checks, lines


def measure_peers(args: argparse.Namespace) -> Found:
    """Requests together, the bundle beside the systems of the TOML file that can answer several at once."""
    file, together = Path(args.peers), tuple(args.together)
    try:
        pythons, listed = read_systems(file)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    bundle = Entry(f"llmc {args.precision}", args.group, "llmc", str(args.bundle.resolve()))
    peers = [entry for entry in listed if entry.runner in TOGETHER and entry.runner != "llmc"]
    entries = [bundle, *(entry for entry in peers if args.group in ("", entry.group))]
    work = ("--prompts", args.prompt, "--new-tokens", args.new_tokens, "--together", *together)
    pythons["llmc"] = Path(sys.executable)
    rows = run_all(pythons, entries, file.parent, work, args.rounds)
    checks, lines = beside_peers(rows, together)
    return Found(checks, {"together": together, "rows": [asdict(row) for row in rows]}, [lines])


def measure(args: argparse.Namespace) -> Found:
    """Both measurements, or those beside peers."""
    if args.peers:
        return measure_peers(args)
    with opened(args, determinism=args.determinism) as model:
        throughput = measure_throughput(model.engine, args)
        warm_up = request(tokens(args.long_prompt, 0), 1)
        alone = model.engine.submit(warm_up).result(LONGEST_WAIT).timings.ttft_s
        episodes = [measure_latency(model.engine, args, 1000 * (i + 1)) for i in range(args.rounds)]
    gain = median_ratio(throughput["serial_s"], throughput["together_s"])
    slowdown = median_ratio([e["beside"]["p95_ms"] for e in episodes], [e["before"]["p95_ms"] for e in episodes])
    together = f"{args.requests} requests ({args.prompt} + {args.new_tokens} tokens) together, times faster"
    beside = f"p95 gap of {args.streams} streams beside a prefill of {args.long_prompt}, ratio"
    checks = [
        Check(together, gain, MIN_GAIN.get(args.precision, 1.0)),
        Check(beside, slowdown, MAX_SLOWDOWN, at_most=True),
    ]
    last = {name: episodes[-1][name] for name in ("before", "beside")}
    gap_table = [
        ("gaps", *last["before"]),
        *((name, *(f"{v:.4g}" for v in row.values())) for name, row in last.items()),
    ]
    seconds = {**throughput, "long prompt alone": [alone], "beside the streams": [e["ttft_s"] for e in episodes]}
    second_table = [("seconds", "last round"), *((name, f"{rounds[-1]:.2f}") for name, rounds in seconds.items())]
    details = {"throughput": throughput, "latency": episodes, "long_prompt_alone_ttft_s": alone}
    return Found(checks, {"determinism": args.determinism, **details}, (gap_table, second_table))


def main() -> None:
    """Print the figures."""
    run(
        measure,
        __doc__,
        requests=(8, "requests at once"),
        prompt=(128, "tokens of their prompts"),
        new_tokens=(128, "tokens that each generates"),
        streams=(4, "requests that stream beside the long prompt"),
        long_prompt=(2000, "its tokens"),
        quiet_tokens=(200, "tokens of each stream before it comes"),
        determinism=("fast", "level: fast, batch or strict"),
        peers=("", "TOML file of systems, as for peers.py: measure beside them instead"),
        group=("", "of its systems only those of this group"),
        together=((1, 4, 8, 16), "requests at once beside peers"),
    )


if __name__ == "__main__":
    main()
