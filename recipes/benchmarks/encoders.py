"""Documents per second of encoders beside their quality: llmc, ONNX Runtime with Optimum's export, OpenVINO.

    python encoders.py encoders.toml --shapes 1x32 1x128 32x32 32x128

The TOML file lists the systems (see encoders.example.toml); the first one is the float32 that all are compared with.
Quality is the cosine to its vectors, and the order of documents as ``llmc inspect`` tells it. All systems are open at
once, in processes of their own, and take turns for each shape (documents x tokens); medians over rounds count.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from machine import Disturbance, in_turns, positive, publish, ratio, table
from peers import ENVIRONMENT

from llmc.optimize.judge.retrieval import PASSAGES, compare_orders, read_passages, score_documents
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.strict import parse_toml

RUNNER = Path(__file__).resolve().with_name("encoder_runners.py")


class System:
    """A process that answers one request at a time."""

    def __init__(self, base: Path, pythons: dict[str, str], entry: dict[str, str]) -> None:
        self.name, runner = entry["name"], entry["runner"]
        python = base / pythons[runner] if runner in pythons else sys.executable
        command = [str(python), str(RUNNER), runner, str(base / entry["model"]), "--threads", str(usable_threads())]
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | ENVIRONMENT}
        self.process = subprocess.Popen(command, **given)

    def ask(self, **request: Any) -> Any:
        """The answer to a request. Raises SystemExit: the process ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.name} ended without an answer")
        return json.loads(line)


@contextmanager
def opened(path: Path) -> Iterator[list[System]]:
    content = parse_toml(path.read_bytes())
    systems = [System(path.parent, content.get("python", {}), entry) for entry in content["system"]]
    try:
        yield systems
    finally:
        for system in systems:
            system.process.kill()
            system.process.wait()


def shape(text: str) -> tuple[int, int]:
    documents, tokens = map(positive, text.split("x"))
    return documents, tokens


def measure_quality(systems: list[System], tokenizer: Tokenizer) -> dict[str, tuple[float, float, float]]:
    """Mean cosine, nDCG@10 and the fraction of equal first documents of each system."""
    queries, documents = zip(*read_passages(), strict=True)
    rows = [tokenizer.encode(text) for text in (*queries, *documents)]
    vectors = {system.name: np.array(system.ask(rows=rows), np.float32) for system in systems}
    wanted = vectors[systems[0].name]
    assert len(wanted) == 2 * PASSAGES
    found = {}
    for name, given in vectors.items():
        ranking = compare_orders(score_documents(list(given)), score_documents(list(wanted)))
        found[name] = float((given * wanted).sum(1).mean()), ranking.ndcg, ranking.top1_agreement
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(1, 32), (1, 128), (32, 32), (32, 128)])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="least time of a system's calls in a round")
    parser.add_argument("--json", type=Path, default=Path("encoders.json"), help="where every round goes")
    args = parser.parse_args()
    with opened(args.systems) as systems:
        quality = measure_quality(systems, Tokenizer.from_folder(args.tokenizer))
        disturbance = Disturbance([system.process.pid for system in systems])
        speeds: dict[str, dict[str, list[float]]] = {system.name: {} for system in systems}
        for documents, tokens in args.shapes:
            ways = {
                system.name: lambda _, system=system, given=(documents, tokens): system.ask(
                    batch=given[0], tokens=given[1], seconds=args.seconds
                )
                for system in systems
            }
            for name, found in in_turns(ways, args.rounds).items():
                speeds[name][f"{documents}x{tokens}"] = found
        busy = disturbance.cpus()
    columns, first = [*speeds[systems[0].name]], systems[0].name
    rows = [
        (
            name,
            *(f"{value:.4f}" for value in quality[name]),
            *(f"{np.median(each[it]):.4g} ({ratio(each[it], speeds[first][it])})" for it in columns),
        )
        for name, each in speeds.items()
    ]
    head = ("documents per second", "cosine", "nDCG@10", "same first", *columns)
    publish(args.json, busy, [table(head, *rows)], quality=quality, speeds=speeds)


if __name__ == "__main__":
    main()
