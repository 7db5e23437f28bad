"""Common parts of the engine's benchmarks: the command line, the bundle, figures beside their targets, the JSON.

Everything is measured within one process on one bundle, and what is compared takes turns, so ratios hold where absolute
times do not. Nothing is timed before it ran once.
"""

import argparse
import json
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import QUIET_CPUS, Disturbance, provenance, table

from llmc.bundle import read_bundle
from llmc.errors import LlmcError
from llmc.runtime import Model, Request, load
from llmc.runtime.api.handle import Handle
from llmc.runtime.engine.engine import Engine
from llmc.runtime.host.machine import usable_threads

FIRST_TOKEN, LAST_TOKEN = 10, 4000  # arbitrary tokens of prompts: no special ones, and known to every model
LONGEST_WAIT = 600.0  # seconds


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


@dataclass(frozen=True)
class Found:
    """The findings of a script: figures beside targets, what else goes into the JSON file, what else is printed."""

    checks: Sequence[Check]
    details: dict[str, Any]
    tables: Sequence[Sequence[Sequence[str]]] = ()  # each with its head first

    @property
    def met(self) -> bool:
        """True if all figures reach their targets."""
        return all(check.met for check in self.checks)

    def write(self, path: Path | None, other_cpus: float | None = None, **bundle: Any) -> None:
        """Print the tables, and write the JSON file where one is asked for.

        Args:
            path: the file.
            other_cpus: CPUs that were busy with something else, None: not known.
            bundle: what was measured: its ``model`` and ``precision``, and the threads.
        """
        head = (f"{bundle['model']}, {bundle['precision']}", "figure", "target", "")
        print("\n\n".join(table(*rows) for rows in ([head, *(check.row() for check in self.checks)], *self.tables)))
        if other_cpus is not None and other_cpus > QUIET_CPUS:
            print(f"\nDISTURBED: {other_cpus} CPUs were busy with something else; do not quote.")
        if path is not None:
            found = {"checks": [asdict(check) for check in self.checks], "details": self.details, "met": self.met}
            content = {**provenance(), **bundle, **found, "other_cpus": other_cpus}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(
    measure: Callable[[argparse.Namespace], Found], description: str | None, rounds: int = 3, **options: Any
) -> Found:
    """Read the command line, measure, print and write what was found.

    Args:
        measure: takes the arguments, of which ``precision`` is the bundle's.
        description: for ``--help``.
        rounds: timed rounds by default.
        options: more options: of each the default (False for a flag, a tuple for a list), and its line for ``--help``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="folder of a bundle, built with --max-batch 8")
    parser.add_argument("--threads", type=int, default=usable_threads(), help="for the model; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds, default %(default)s; medians count")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    for name, (default, text) in options.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default)}
        kind = {"nargs": "+", "type": type(default[0]) if default else str} if type(default) is tuple else kind
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, default=default, help=text)
    args = parser.parse_args()
    try:
        children = bool(getattr(args, "peers", ""))  # which run in processes of their own
        manifest = read_bundle(args.bundle)
        meanwhile = Disturbance(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
        args.precision = manifest.recipe.precision
        found = measure(args)
    except LlmcError as error:
        sys.exit(f"{parser.prog}: {error}")
    named = {"model": manifest.source.name, "precision": args.precision, "threads": args.threads}
    found.write(args.json, meanwhile.cpus(), **named)
    return found


def opened(args: argparse.Namespace, **options: Any) -> Model:
    """The bundle loaded, without a prefix cache unless ``options`` ask for one."""
    if "prefix_cache_folder" not in options:
        options["prefix_cache_bytes"] = 0
    return load(args.bundle, threads=args.threads, self_test=False, **options)


def submitted(engine: Engine, requests: Sequence[Request]) -> list[Handle]:
    """All of them before the engine's next step, so that none runs ahead while this thread waits for a processor."""
    handles: list[Handle] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return handles


def run_batch(engine: Engine, requests: Sequence[Request]) -> None:
    """All at once, to the end."""
    for handle in submitted(engine, requests):
        handle.result(LONGEST_WAIT)


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
