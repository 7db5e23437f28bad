"""Compare ``llmc serve`` with llama.cpp's server on the same weights: output tokens per second and TTFT under load.

Both servers run the whole time, in a process each, and take turns: every round asks each of them at every concurrency,
in a closed loop of ``llmc bench serve``, with prompts that nobody has seen before. Answers are greedy and of exactly so
many tokens. Medians over rounds count. See README.md for how to make the bundle and the GGUF file.

    python serve_peers.py --bundle models/q05-llmc-int4 --gguf models/q05-q4_0.gguf --python venvs/llamacpp/bin/python
"""

import argparse
import json
import resource
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import QUIET_CPUS, Disturbance, provenance, table
from runners import positive
from serving import clients, free_port, server

from llmc.runtime.host.machine import usable_threads

HERE = Path(__file__).resolve().parent
LLMC, LLAMACPP = "llmc", "llama.cpp"
ROOM = 64  # tokens beyond prompt and answer: a prompt's length is met to a few
Rounds = dict[str, list[dict[str, Any]]]  # of each system its points, by name and concurrency


def commands(args: argparse.Namespace, ports: dict[str, int]) -> dict[str, tuple[list[object], str]]:
    """Of each system the command of its server, and the path that tells when it is ready."""
    context, rows = args.prompt + args.new_tokens + ROOM, max(args.concurrency)
    work = ("--threads", args.threads)
    ours = [sys.executable, "-m", "llmc.cli", "serve", args.bundle, "--port", ports[LLMC], "--max-batch", rows, *work]
    script = [args.python, HERE / "llamacpp_server.py", args.gguf, "--port", ports[LLAMACPP], "--parallel", rows]
    return {LLMC: (ours, "/ready"), LLAMACPP: ([*script, "--context", context, *work], "/health")}


def measure(args: argparse.Namespace) -> tuple[Rounds, float | None]:
    """All rounds, and the CPUs that something else kept busy; round 0 does not count."""
    found: Rounds = {}
    ports = {LLMC: free_port(), LLAMACPP: free_port()}
    with ExitStack() as held:
        started = {
            name: held.enter_context(server(command, ports[name], ready))
            for name, (command, ready) in commands(args, ports).items()
        }
        disturbance = Disturbance(resource.RUSAGE_CHILDREN, list(started.values()))
        for number in range(args.rounds + 1):
            for concurrency in args.concurrency:
                order = list(ports.items())[:: 1 if number % 2 else -1]
                for name, port in order:
                    [point] = asked(port, concurrency, number, args)
                    print(f"round {number}, {name} at {concurrency}: {brief(point)}", file=sys.stderr)
                    if number:
                        found.setdefault(f"{name} {concurrency}", []).append(point)
        return found, disturbance.cpus()


def asked(port: int, concurrency: int, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The point of one server in one round."""
    count = concurrency * (args.requests if number else 1)
    lengths = ("--prompt-length", args.prompt, "--max-tokens", args.new_tokens)
    seed = number * 1000 + concurrency
    counts = ("--concurrency", concurrency, "--requests", count, "--warm-up", 0, "--seed", seed)
    return clients(f"http://127.0.0.1:{port}", *lengths, *counts)


def brief(point: dict[str, Any]) -> str:
    """A point in a few words."""
    sizes = f"{point['prompt_tokens']['mean']:.0f} + {point['output_tokens']['mean']:.0f} tokens"
    return f"{point['output_tokens_per_s']:.1f} tok/s, TTFT p95 {point['ttft']['p95'] * 1e3:.0f} ms ({sizes})"


def median(points: Sequence[dict[str, Any]], name: str) -> float:
    """Over rounds: tokens per second, or the milliseconds below which 95 % of a latency are."""
    if name == "tok/s":
        return statistics.median(point["output_tokens_per_s"] for point in points)
    return statistics.median(point[name]["p95"] * 1e3 for point in points)


def rows(found: Rounds, concurrencies: Sequence[int]) -> list[tuple[str, ...]]:
    """The table: each figure of llmc beside the peer's, and how many times better llmc's is."""
    lines = []
    for number in concurrencies:
        ours, theirs = found[f"{LLMC} {number}"], found[f"{LLAMACPP} {number}"]
        for name, label in (("tok/s", "output tok/s"), ("ttft", "TTFT p95, ms"), ("tpot", "TPOT p95, ms")):
            a, b = median(ours, name), median(theirs, name)
            ratio = a / b if name == "tok/s" else b / a
            lines.append((f"concurrency {number}: {label}", f"{a:.1f}", f"{b:.1f}", f"{ratio:.2f}x"))
    return lines


def main() -> int:
    """Measure, write the JSON file and print the table; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="built with --max-batch of at least the concurrency")
    parser.add_argument("--gguf", type=Path, required=True, help="the same checkpoint, from convert_gguf.py")
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has xllamacpp")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of a prompt, its template included")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--requests", type=positive, default=3, help="of each client in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=usable_threads())
    parser.add_argument("--output", type=Path, default=Path("serve_peers.json"), help="where the JSON goes")
    args = parser.parse_args()
    origin = provenance()
    found, other_cpus = measure(args)
    content = {**origin, "arguments": {k: str(v) for k, v in vars(args).items()}, "rounds": found}
    args.output.write_text(json.dumps({**content, "other_cpus": other_cpus}, indent=1) + "\n", encoding="utf-8")
    head = (f"{args.bundle.name} beside {args.gguf.name}", LLMC, LLAMACPP, "llmc is better by")
    print(table(head, *rows(found, args.concurrency)))
    sizes = f"{args.prompt} + {args.new_tokens} tokens, greedy"
    print(f"\nMedians of {args.rounds} rounds, {sizes}, {args.threads} threads, {origin['machine']['cpu']}.")
    if other_cpus is not None and other_cpus > QUIET_CPUS:
        print(f"DISTURBED: {other_cpus} CPUs were busy with something else; do not quote.")
    return int(any(point["failed"] for points in found.values() for point in points))


if __name__ == "__main__":
    sys.exit(main())
