"""The steps, in the order in which they are worth most if time runs out, and what runs one in its own process."""

import contextlib
import importlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

GEOMETRIES = ("0.5b", "1b", "tiny")
BUNDLES = [
    f"{target}/{geometry}/{precision}"
    for target in ("cuda", "tensorrt", "tensorrt-rtx", "cpu")
    for geometry in GEOMETRIES
    for precision in ("fp16", "int8", "int4")
]
REFUSAL = "refusal/tensorrt-rtx/tiny/fp16"
# Run when they are named: what few GPUs take, and what shows that this script works.
UNASKED = {"tensorrt-rtx", "cpu", "tiny"}


@dataclass(frozen=True)
class Step:
    """A process: ``function`` (module:name) is given what follows the first slash of ``name``, and the options.

    ``limit_s`` is for a server, and small enough that a step which hangs leaves most of nine minutes to the others;
    ``--patience`` multiplies it.
    """

    name: str
    function: str
    limit_s: float


BUILD, MEASURE = ("models:build", 180.0), ("measure:measure", 100.0)
STEPS = [
    Step("machine", "machine:machine", 150),  # longer than the probe waits for a library
    Step("driver", "machine:driver", 60),
    *(step for name in BUNDLES for step in (Step(f"build/{name}", *BUILD), Step(f"measure/{name}", *MEASURE))),
    *(Step(f"baseline/{name}", "baseline:baseline", 150) for name in GEOMETRIES),
    *(Step(f"reference/{name}", "correctness:reference", 150) for name in GEOMETRIES),
    *(Step(f"verify/{name}", "correctness:verify", 150) for name in BUNDLES),
    *(Step(f"determinism/{name}", "correctness:determinism", 100) for name in BUNDLES),
    *(Step(f"buckets/{name}", "measure:buckets", 100) for name in BUNDLES),
    *(Step(f"kernels/{name}", "kernels:kernels", 100) for name in BUNDLES if name.startswith("cuda/")),
    Step(REFUSAL, "kernels:refusal", 150),
]


@dataclass(frozen=True)
class Options:
    """The folder of what steps make, and that of exports that were carried along."""

    work: Path
    models: Path | None


class NotHereError(Exception):
    """Something that the step needs is not on this machine."""


# The exit status of a step that ends with it.
NOT_HERE = 3


def chosen(patterns: Sequence[str], skipped: Sequence[str] = ()) -> list[Step]:
    """The steps that match a pattern, without patterns all but those that must be named; and none that is skipped."""

    def matches(step: Step, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(step.name, pattern) for pattern in patterns)

    def is_asked(step: Step) -> bool:
        if patterns:
            return matches(step, patterns)
        return step.name == REFUSAL or UNASKED.isdisjoint(step.name.split("/"))

    return [step for step in STEPS if is_asked(step) and not matches(step, skipped)]


def place(bundle: str, work: Path) -> Path:
    """The folder of a bundle."""
    return work / bundle.replace("/", "-")


def allowed(step: Step, work: Path) -> float:
    """Seconds that a step may take, building the bundle included that it would have to build."""
    kind, _, bundle = step.name.partition("/")
    lacks = kind != "build" and bundle in BUNDLES and not (place(bundle, work) / "llmc.json").is_file()
    return step.limit_s + lacks * BUILD[1]


def work(name: str, result: Path, options: Options) -> int:
    """Run one step and write its result; the exit status."""
    from llmc.errors import LlmcError, MissingExtraError
    from llmc.runtime.host.machine import resident_bytes

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    module, _, function = next(step.function for step in STEPS if step.name == name).partition(":")
    try:
        with watched() as clocks:  # modules are imported on use: a broken library must break its own steps only
            found = getattr(importlib.import_module(f"gpu_check.{module}"), function)(*name.split("/")[1:], options)
    except (NotHereError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    except LlmcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    content = {"result": found, "clocks": clocks, "resident_bytes": resident_bytes()[1]}
    result.write_text(json.dumps(content), encoding="utf-8")
    return 0


CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used,clocks_throttle_reasons.active"


@contextlib.contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Clocks, throttling, power and used memory of the first GPU by nvidia-smi, in a dict that is filled at the end."""
    found: dict[str, Any] = {}
    command = ["nvidia-smi", "--id=0", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with tempfile.TemporaryFile("w+") as said, contextlib.ExitStack() as stack:
        try:
            child = stack.enter_context(subprocess.Popen(command, stdout=said, stderr=said))
            stack.callback(child.kill)
        except OSError as error:
            found["missing"] = f"nvidia-smi: {error.strerror}"
        yield found
        stack.close()
        said.seek(0)
        found |= {"missing": None, **sampled(said.read())} if not found else {}


def sampled(text: str) -> dict[str, Any]:
    """Least, median and largest of each figure of nvidia-smi's lines; the reasons of throttling as it names them."""
    lines = [line.split(", ") for line in text.splitlines()]
    whole = [line for line in lines if len(line) == CLOCKS.count(",") + 1]
    if not whole:
        return {"missing": f"nvidia-smi said {text[:300]!r}"}
    found: dict[str, Any] = {"samples": len(whole), "throttling": sorted({line[-1] for line in whole})}
    for name, *column in zip(CLOCKS.split(",")[:-1], *(line[:-1] for line in whole), strict=True):
        values = [float(value) for value in column if value.replace(".", "", 1).isdigit()]
        found[name] = [min(values), statistics.median(values), max(values)] if values else None
    return found
