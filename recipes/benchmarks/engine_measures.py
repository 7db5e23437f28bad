"""Common parts of the engine's benchmarks: arguments, an engine on a bundle, figures beside their targets, the JSON.

Everything is measured within one process on one loaded bundle, and what is compared takes turns, so ratios hold where
absolute times do not. Nothing is timed before it ran once.
"""

import argparse
import json
import resource
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from machine import Disturbance, this_machine

from llmc.runtime import Model, Request
from llmc.runtime.api.handle import Handle
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.engine.engine import Engine
from llmc.runtime.host.machine import available_memory, resident_bytes
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.speculation.drafters import Drafter

QUIET_CPUS = 0.1  # more than this busy with something else, and the figures are in doubt
FIRST_TOKEN, LAST_TOKEN = 10, 4000  # arbitrary tokens of prompts: no special ones, and known to every model


@dataclass(frozen=True)
class Check:
    """A figure beside its target: at least as much, or with ``at_most`` at most as much."""

    name: str
    figure: float
    target: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """True if the figure reaches the target."""
        return self.figure <= self.target if self.at_most else self.figure >= self.target

    def row(self) -> tuple[str, str, str, str]:
        """Cells of the table."""
        bound = f"at {'most' if self.at_most else 'least'} {self.target:g}"
        return self.name, f"{self.figure:.3g}", bound, "met" if self.met else "MISSED"


@dataclass
class Report:
    """Everything that is written to the JSON file. ``other_cpus``: CPUs busy with something else, None: not known."""

    model: str
    precision: str
    threads: int
    checks: list[Check] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    other_cpus: float | None = None

    @classmethod
    def of(cls, model: Model) -> "Report":
        """An empty report on a loaded bundle."""
        return cls(model.manifest.source.name, model.manifest.recipe.precision, model.threads)

    def write(self, path: Path | None) -> None:
        """Print the table of checks, and write the JSON file where one is asked for."""
        print_rows((f"{self.model}, {self.precision}", "figure", "target", ""), [check.row() for check in self.checks])
        if self.other_cpus is not None and self.other_cpus > QUIET_CPUS:
            print(f"\nDISTURBED: {self.other_cpus} CPUs were busy with something else; do not quote.")
        if path is not None:
            content = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": shlex.join(sys.argv),
                "machine": asdict(this_machine()),
                **asdict(self),
                "met": all(check.met for check in self.checks),
            }
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="folder of a bundle, built with --max-batch 8")
    parser.add_argument("--threads", type=int, help="threads for the model; default: as many as there are")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds, default {rounds}; medians count")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    return parser


@contextmanager
def engine_on(
    model: Model, *, prefixes: PrefixCache | None = None, drafter: Drafter | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine on a model of which nobody asks anything else; without a prefix cache unless one is given."""
    runner = model.runner
    engine = Engine(
        runner.session,
        model.manifest,
        model.tokenizer,
        max_context=runner.max_context,
        prefill_chunk=runner.prefill_chunk,
        options=EngineOptions(**options),
        memory=available_memory() + resident_bytes()[0],
        prefixes=prefixes,
        drafter=drafter,
    )
    try:
        yield engine
    finally:
        engine.close()


def submitted(engine: Engine, requests: Sequence[Request]) -> list[Handle]:
    """All of them before the engine's next step, so that none runs ahead while this thread waits for a processor."""
    handles: list[Handle] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return handles


def tokens(length: int, salt: int) -> list[int]:
    """Arbitrary token ids, the same for the same ``salt``."""
    return np.random.default_rng(salt).integers(FIRST_TOKEN, LAST_TOKEN, length).tolist()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 95th and 99th percentile, maximum; and how many there were."""
    p50, p95, p99, most = (float(value) * 1e3 for value in np.percentile(seconds, (50, 95, 99, 100)))
    return {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "max_ms": most, "count": len(seconds)}


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of the quotients within each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, numbers to the right."""
    print("| " + " | ".join(head) + " |")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


class OtherLoad(Disturbance):
    """Mean number of CPUs that were busy with something else than this process. Linux only, elsewhere None."""

    def __init__(self) -> None:
        super().__init__(resource.RUSAGE_SELF)
