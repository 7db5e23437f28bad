"""The steps of a run, in the order in which they are worth most if it is cut off."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTRY = Path(__file__).resolve().parents[1] / "gpu_check.py"
TARGETS = ("tensorrt", "tensorrt-rtx", "cuda", "cpu")
ENGINES = ("tensorrt", "tensorrt-rtx")
GEOMETRIES = ("tiny", "0.5b", "1b")
PRECISIONS = ("fp16", "int8", "int4")
# Prompts of 2,048 tokens and 128 new ones, with room. The small model ends at 2,048.
CONTEXTS = {"tiny": 2048, "0.5b": 4096, "1b": 4096}
ROWS = 8
# Lengths that times are measured after; the standard library alone is needed to print them.
PROMPTS = (128, 512, 2048)
LIMIT_S = 1200.0
LEARN_S = 180.0


@dataclass(frozen=True)
class Options:
    """What was asked for. ``limit_s`` bounds a step, ``rounds`` are those of every measurement."""

    targets: tuple[str, ...]
    geometries: tuple[str, ...]
    precisions: tuple[str, ...]
    exports: Path | None
    work: Path
    rounds: int
    emulate: bool
    probes: bool
    limit_s: float = LIMIT_S

    @property
    def on_device(self) -> bool:
        """Whether a GPU is in play."""
        return not self.emulate and self.targets != ("cpu",)


@dataclass(frozen=True)
class Step:
    """One thing to do in a process of its own.

    Attributes:
        name: parts with slashes between them: what it is about, and its kind.
        needs: names of the steps that must be done before.
        uses: of those whose results it takes if they are there.
        makes: a folder or file that later steps read, and that goes when none is left that does.
        digest: what is kept of its result.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    limit_s: float = LIMIT_S
    makes: Path | None = None
    uses: tuple[str, ...] = ()
    digest: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def kind(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]


def steps(options: Options) -> list[Step]:
    """Everything to do: the machine, then one model after the other, the cheapest first."""
    found = [
        _worker("machine", LEARN_S),
        _worker("bandwidth", LEARN_S, on_device=options.on_device),
        *(_worker(f"{target}/library", LEARN_S, target=target, emulate=options.emulate) for target in options.targets),
    ]
    for geometry in options.geometries:
        found += _of_geometry(geometry, options)
    return found


def _of_geometry(geometry: str, options: Options) -> Iterator[Step]:
    export, reference = options.work / "exports" / geometry, options.work / f"{geometry}.npz"
    brought = None if options.exports is None else str(options.exports)
    made = {"geometry": geometry, "output": str(export), "exports": brought}
    yield _worker(f"{geometry}/export", options.limit_s, makes=export, **made)
    wanted = {"export": str(export), "output": str(reference)}
    yield _worker(f"{geometry}/reference", options.limit_s, (f"{geometry}/export",), makes=reference, **wanted)
    for precision in options.precisions:
        for target in options.targets:
            yield from _of_bundle(f"{target}/{geometry}/{precision}", export, reference, options)
    if options.on_device:
        compared = {"export": str(export), "rounds": options.rounds, "device": "cuda", "compiler": "inductor"}
        yield _worker(f"{geometry}/baseline", options.limit_s, (f"{geometry}/export",), **compared)


def _of_bundle(name: str, export: Path, reference: Path, options: Options) -> Iterator[Step]:
    """Build, verify and measure one bundle."""
    target, geometry, precision = name.split("/")
    bundle = options.work / name.replace("/", "-")
    here = {"bundle": str(bundle), "emulate": options.emulate}
    on_device = options.on_device and target != "cpu"
    yield Step(
        f"{name}/build",
        build_command(export, bundle, target, precision, CONTEXTS[geometry]),
        (f"{target}/library", f"{geometry}/export"),
        options.limit_s,
        makes=bundle,
        digest=built,
    )
    needs = (f"{name}/build", "bandwidth") if on_device else (f"{name}/build",)
    limit = options.limit_s
    compared = {"reference": str(reference), **here}
    yield _worker(f"{name}/verify", limit, needs, (f"{geometry}/reference",), **compared)
    yield _worker(f"{name}/determinism", limit, needs, **here)
    yield _worker(f"{name}/measure", limit, needs, on_device=on_device, rounds=options.rounds, **here)
    if options.probes:
        yield _worker(f"{name}/buckets", limit, needs, **here)
    if options.probes and target in ENGINES and geometry == options.geometries[0]:
        yield from _of_lengths(name, export, bundle, needs, options)


def _of_lengths(name: str, export: Path, bundle: Path, needs: tuple[str, ...], options: Options) -> Iterator[Step]:
    """The same bundle with attention in the form that is unproven, beside the proven one."""
    target, geometry, precision = name.split("/")
    other = options.work / f"{bundle.name}-lengths"
    command = build_command(export, other, target, precision, CONTEXTS[geometry])
    yield Step(
        f"{name}/lengths-build",
        (*command, "--form", "lengths"),
        (f"{name}/build",),
        options.limit_s,
        makes=other,
        digest=built,
    )
    if not options.emulate:  # the graphs are the same, only the engines differ
        compared = {"native": str(bundle), "other": str(other)}
        yield _worker(f"{name}/lengths", options.limit_s, (*needs, f"{name}/lengths-build"), **compared)


def _worker(
    name: str,
    limit_s: float,
    needs: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    *,
    makes: Path | None = None,
    **arguments: Any,
) -> Step:
    kind = name.rpartition("/")[2]
    command = (sys.executable, str(ENTRY), "--worker", kind, json.dumps(arguments))
    return Step(name, command, needs, limit_s, makes, uses)


def build_command(export: Path, bundle: Path, target: str, precision: str, context: int) -> tuple[str, ...]:
    """``llmc build`` as a user types it."""
    options = ("--target", target, f"--{precision}", "--max-context", str(context), "--max-batch", str(ROWS))
    build = (sys.executable, "-m", "llmc.cli", "build", str(export), "-o", str(bundle))
    return (*build, *options, "--force", "--json")


def built(report: dict[str, Any]) -> dict[str, Any]:
    """Of a build's report what a reader wants: the manifest holds prompts and hashes as well."""
    manifest = report["manifest"]
    files = {name: entry["size"] for name, entry in manifest["files"].items()}
    kept = ("target", "limits", "memory", "device", "engine", "graphs", "quality")
    return {
        "seconds": report["seconds"],
        "files": files,
        "bytes": sum(files.values()),
        **{name: manifest.get(name) for name in kept},
    }
