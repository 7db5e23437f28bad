"""Measure what batching gains, and what a long prompt does to those who stream meanwhile.

* Throughput: 8 requests together, beside the same 8 one after another.
* Latency: gaps between the tokens of some streams, before and while a long prompt is prefilled beside them.
"""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from engine_measures import (
    Check,
    OtherLoad,
    Report,
    arguments,
    engine_on,
    median_ratio,
    percentiles,
    submitted,
    tokens,
)

from llmc.runtime import Delta, Model, Request, SamplingParams, load
from llmc.runtime.engine.engine import Engine

MIN_GAIN = {"int8": 3.0, "int4": 2.0}  # 8 requests together, by precision
MAX_SLOWDOWN = 2.0  # 95th percentile of gaps beside a prefill
SETTLED = 16  # tokens of each stream before its gaps count
STREAM_PROMPT = 32
LONGEST_WAIT = 600.0  # seconds


def request(prompt: list[int], new_tokens: int, watch: "Watch | None" = None) -> Request:
    """Greedy, and of exactly so many tokens."""
    return Request(prompt, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True), on_delta=watch)


# ------------------------------------------------------------------------------------------------------ throughput


@dataclass(frozen=True)
class Throughput:
    """Seconds for all requests, per round."""

    requests: int
    prompt: int
    new_tokens: int
    serial_s: list[float]
    together_s: list[float]

    @property
    def gain(self) -> float:
        """Time one after another over time together."""
        return median_ratio(self.serial_s, self.together_s)


def run_serially(engine: Engine, requests: list[Request]) -> float:
    """Seconds for one after another."""
    started = time.perf_counter()
    for item in requests:
        engine.submit(item).result(LONGEST_WAIT)
    return time.perf_counter() - started


def run_together(engine: Engine, requests: list[Request]) -> float:
    """Seconds for all at once."""
    started = time.perf_counter()
    for handle in submitted(engine, requests):
        handle.result(LONGEST_WAIT)
    return time.perf_counter() - started


def measure_throughput(engine: Engine, count: int, prompt: int, new_tokens: int, rounds: int) -> Throughput:
    """Both ways in turns, with other prompts every time."""
    run_together(engine, [request(tokens(prompt, salt), min(8, new_tokens)) for salt in range(count)])
    run_serially(engine, [request(tokens(prompt, 0), min(8, new_tokens))])
    serial, together = [], []
    for i in range(rounds):
        requests = [request(tokens(prompt, 100 * (i + 1) + salt), new_tokens) for salt in range(count)]
        serial.append(run_serially(engine, requests))
        together.append(run_together(engine, requests))
    return Throughput(count, prompt, new_tokens, serial, together)


# --------------------------------------------------------------------------------------------------------- latency


class Watch:
    """When the tokens of one request came; ``reached`` is set at the ``count``-th."""

    def __init__(self, count: int) -> None:
        self.times: list[float] = []
        self.reached = threading.Event()
        self._count = count

    def __call__(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)
        if len(self.times) >= self._count:
            self.reached.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Gaps that overlap the time from ``start`` to ``end``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > start and before < end]


@dataclass(frozen=True)
class Episode:
    """Gaps of all streams in milliseconds, before and beside a prefill; seconds until its first token."""

    before: dict[str, float]
    beside: dict[str, float]
    ttft_s: float


def measure_latency(engine: Engine, streams: int, prompt: list[int], quiet_tokens: int, salt: int) -> Episode:
    """Start streams, watch them on their own for a while, then submit the prompt."""
    watches = [Watch(SETTLED + quiet_tokens) for _ in range(streams)]
    room = engine.max_context - STREAM_PROMPT
    handles = [engine.submit(request(tokens(STREAM_PROMPT, salt + i), room, w)) for i, w in enumerate(watches)]
    for watch in watches:
        if not watch.reached.wait(LONGEST_WAIT):
            raise SystemExit("the streams came to a halt")
    settled = max(watch.times[SETTLED] for watch in watches)
    submitted = time.perf_counter()
    first = Watch(1)
    engine.submit(request(prompt, 1, first)).result(LONGEST_WAIT)
    time.sleep(0.2)  # the last gap ends after the prompt's first token
    unfinished = sum(handle.cancel() for handle in handles)
    if unfinished < streams:
        raise SystemExit(f"a stream ended before the prompt was fed: {room} tokens are too few; use fewer or shorter")
    return Episode(
        before=percentiles([gap for watch in watches for gap in watch.gaps(settled, submitted)]),
        beside=percentiles([gap for watch in watches for gap in watch.gaps(submitted, first.times[0])]),
        ttft_s=first.times[0] - submitted,
    )


def measure(model: Model, args: Any) -> Report:
    """Both measurements."""
    load_meanwhile, report = OtherLoad(), Report.of(model)
    with engine_on(model, determinism=args.determinism) as engine:
        throughput = measure_throughput(engine, args.requests, args.prompt, args.new_tokens, args.rounds)
        long = [tokens(args.long_prompt, salt) for salt in range(args.rounds + 1)]
        alone = engine.submit(request(long[0], 1)).result(LONGEST_WAIT).timings.ttft_s  # warms up, too
        episodes = [
            measure_latency(engine, args.streams, prompt, args.quiet_tokens, 1000 * i)
            for i, prompt in enumerate(long[1:])
        ]
    slowdown = median_ratio([e.beside["p95_ms"] for e in episodes], [e.before["p95_ms"] for e in episodes])
    name = f"{args.requests} requests ({args.prompt} + {args.new_tokens} tokens) together, times faster"
    report.checks = [
        Check(name, throughput.gain, MIN_GAIN.get(report.precision, 1.0)),
        Check(
            f"p95 gap of {args.streams} streams beside a prefill of {args.long_prompt}, ratio",
            slowdown,
            MAX_SLOWDOWN,
            True,
        ),
    ]
    report.details = {
        "determinism": args.determinism,
        "throughput": asdict(throughput),
        "latency": [asdict(episode) for episode in episodes],
        "long_prompt_alone_ttft_s": alone,
    }
    report.other_cpus = load_meanwhile.cpus()
    return report


def main() -> None:
    """Print the figures."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--requests", type=int, default=8, help="requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of their prompts")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that each generates")
    parser.add_argument("--streams", type=int, default=4, help="requests that stream beside the long prompt")
    parser.add_argument("--long-prompt", type=int, default=2000, help="its tokens")
    parser.add_argument("--quiet-tokens", type=int, default=200, help="tokens of each stream before it comes")
    parser.add_argument("--determinism", default="fast", choices=["fast", "batch", "strict"])
    args = parser.parse_args()
    with load(args.bundle, threads=args.threads, self_test=False) as model:
        report = measure(model, args)
    report.write(args.json)
    latency, together = report.details["latency"][-1], report.details["throughput"]
    print(f"\nserial {together['serial_s'][-1]:.2f} s, together {together['together_s'][-1]:.2f} s")
    for name in ("before", "beside"):
        print(f"gaps {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in latency[name].items()))
    alone = report.details["long_prompt_alone_ttft_s"]
    print(f"time to first token of the long prompt: alone {alone:.2f} s, beside the streams {latency['ttft_s']:.2f} s")


if __name__ == "__main__":
    main()
