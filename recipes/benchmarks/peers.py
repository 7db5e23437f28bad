"""Compare llmc with its peers at equal quality: bits and KL of a real model, speed, memory and disk, in one table.

    python peers.py systems.toml                      # one request: prefill and decode, sizes, memory
    python peers.py systems.toml --together 1 4 8 16  # requests at once: new tokens of all per second
    python peers.py systems.toml --image 1024 768     # seconds from a picture to the first token
    python peers.py systems.toml --first              # seconds to the first token, files out of the page cache

A TOML file lists the systems (see systems.example.toml); its paths are relative to it. KL is measured first: a system
without it is not timed. Then every round runs each system once, in a separate process and interpreter. A system without
interpreter or model is skipped, and the table says so. All systems use as many threads as this process may use CPUs
(``taskset`` limits them).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGBUS
from types import MappingProxyType

import numpy as np
from machine import QUIET_CPUS, Disturbance, positive, publish, ratio, table
from numpy.typing import NDArray
from runners import PHASES, RUNNERS, lengths

from llmc.errors import BundleError, LlmcError
from llmc.optimize.calibrate.text import read_samples
from llmc.optimize.judge.quality import Tally
from llmc.runtime.host.machine import usable_threads
from llmc.strict import decode, parse_toml

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
NOT_RUN = "not run"
# A KL higher by less is not worse: on a text of a few thousand tokens, a tenth is noise.
SAME_KL = 1.1
ALL_WINDOWS = 1 << 30
Figures = dict[str, float]


@dataclass(frozen=True)
class Entry:
    """One system of the TOML file: its model to time, and its version of the real model."""

    name: str
    runner: str
    model: str
    quality: str


@dataclass
class Row:
    """A system with its quality by phase and all its rounds; ``trouble`` is the reason if something is missing."""

    entry: Entry
    trouble: str
    quality: dict[str, Figures] = field(default_factory=dict)
    rounds: list[Figures] = field(default_factory=list)

    def as_good_as(self, other: "Row") -> bool:
        """True if its KL is not higher in either phase."""
        return all(self.quality[p]["mean_kl"] <= SAME_KL * other.quality[p]["mean_kl"] for p in PHASES)

    def cells(self, reference: "Row | None", columns: Sequence[str]) -> Iterator[str]:
        """Bits in decode, KL, and medians over rounds; in brackets, the reference's figure divided by this system's."""
        yield f"{self.quality['decode']['bits']:.2f}" if self.quality else ""
        for phase in PHASES:
            yield f"{self.quality[phase]['mean_kl']:.2g}" if self.quality else ""
        for column in columns:
            speeds = [figures[column] for figures in self.rounds]
            theirs = [figures[column] for figures in reference.rounds] if reference else []
            compared = f" ({ratio(theirs, speeds)})" if theirs and speeds and all(speeds) else ""
            yield f"{statistics.median(speeds):.4g}{compared}" if speeds else ""
        yield self.trouble or (reference.entry.name if reference else "")


@dataclass(frozen=True)
class Quality:
    """Model and text that quality is measured with."""

    checkpoint: str  # the Hugging Face folder that every system's quality model was made from
    text: str  # not used for training or calibration; empty for the part of llmc's own text that calibration skips


class Task:
    """The first windows of the text without overlap, and their logits from transformers in float32, in ``folder``.

    All systems see the same tokens: a window at once (prefill), and token by token (decode).
    """

    def __init__(self, quality: Quality, args: argparse.Namespace, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        base, self.folder = args.systems.parent, folder
        checkpoint, text = base / quality.checkpoint, base / quality.text if quality.text else None
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
        vocabulary = model.config.vocab_size
        chosen = {"samples": ALL_WINDOWS, "length": args.length, "vocab_size": vocabulary, "held_out": True}
        self.windows: NDArray[np.int64] = read_samples(text, checkpoint, **chosen).ids[: args.windows]
        np.save(folder / "windows.npy", self.windows)
        shape = (*self.windows.shape, vocabulary)
        self._reference = np.lib.format.open_memmap(folder / "reference.npy", "w+", np.float32, shape)
        with torch.inference_mode():
            for row, tokens in zip(self._reference, self.windows, strict=True):
                row[:] = model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]  # a tied head counts once
        self._weights = sum(matrix.numel() for matrix in matrices)

    def measure(self, run: Callable[..., str]) -> dict[str, Figures]:
        """Bits per weight, KL in nats and further figures by phase; ``run`` lets a system write its logits.
        Raises RuntimeError: the logits are not this model's."""
        sizes = json.loads(run("--logits", self.folder))
        return {phase: {"bits": 8 * sizes[phase] / self._weights, **self._compare(phase)} for phase in PHASES}

    def _compare(self, phase: str) -> Figures:
        """Compare logits; a window's first token is not predicted, and its last logits predict nothing in it."""
        tally, written = Tally(), np.load(self.folder / f"{phase}.npy", mmap_mode="r")
        if written.shape != self._reference.shape or not np.isfinite(written).all():
            raise RuntimeError(f"logits {written.shape} of {phase} are not finite ones of {self._reference.shape}")
        for wanted, logits, tokens in zip(self._reference, written, self.windows, strict=True):
            tally.compare(wanted[:-1], logits[:-1])
            tally.predict(logits[:-1], tokens[1:])
        return asdict(tally.quality)


def read_systems(path: Path) -> tuple[Quality, dict[str, Path], tuple[Entry, ...]]:
    """Read the TOML file: the reference, the interpreter of each runner (default for llmc: this one), the systems."""
    document = parse_toml(path.read_bytes())
    try:
        quality = decode(Quality, document.pop("quality", {}), "quality")
        pythons = decode(dict[str, str], document.pop("python", {}), "python")
        entries = decode(dict[str, tuple[Entry, ...]], document).get("system", ())
    except BundleError as error:
        raise ValueError(f"{path}: {error}; see systems.example.toml") from error
    unknown = (pythons.keys() | {entry.runner for entry in entries}) - RUNNERS.keys()
    if unknown or not entries:
        problem = f"unknown runners {sorted(unknown)}, expected {', '.join(RUNNERS)}" if unknown else "no [[system]]"
        raise ValueError(f"{path}: {problem}; see systems.example.toml")
    interpreters = {name: path.parent / python for name, python in pythons.items()}
    return quality, {"llmc": Path(sys.executable), **interpreters}, entries


def find_missing(python: Path | None, *models: Path) -> str:
    if python is None:
        return f"{NOT_RUN}: its runner has no interpreter"
    absent = [str(path) for path in (python, *models) if not path.exists()]
    return f"{NOT_RUN}: {', '.join(absent)} not found" if absent else ""


def run_script(
    python: str | Path,
    script: str,
    *arguments: object,
    timeout_s: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run one of these scripts in another interpreter; return its last printed line, since libraries print, too."""
    command = [str(python), str(HERE / script), *map(str, arguments)]
    environment = os.environ | ENVIRONMENT | dict(environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script} failed: no result after {timeout_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        full = " (no room for a page of a mapped file: is the disk full?)" if error.returncode == -SIGBUS else ""
        raise RuntimeError(f"{script} failed with exit code {error.returncode}{full}: {last}") from error
    return (done.stdout.splitlines() or [""])[-1]


def judge_all(args: argparse.Namespace, quality: Quality, pythons: dict[str, Path], rows: Sequence[Row]) -> None:
    """Measure the quality of each system that can run, or take it from the JSON file of an earlier run."""
    able = [row for row in rows if not row.trouble]
    if args.quality:
        earlier = {row["entry"]["name"]: row for row in json.loads(args.quality.read_text(encoding="utf-8"))["rows"]}
        for row in able:
            known = earlier.get(row.entry.name, {})
            row.quality = known["quality"] if known.get("entry", {}).get("quality") == row.entry.quality else {}
            row.trouble = "" if row.quality else f"{NOT_RUN}: {args.quality} has no KL of it"
        return
    with tempfile.TemporaryDirectory() as folder:
        task = Task(quality, args, Path(folder))
        for row in able:
            model = args.systems.parent / row.entry.quality
            given = (pythons[row.entry.runner], "runners.py", row.entry.runner, model, "--threads", usable_threads())
            try:
                row.quality = task.measure(partial(run_script, *given, timeout_s=args.timeout))
            except RuntimeError as error:
                row.trouble = str(error)
            summary = row.trouble or {phase: f"KL {row.quality[phase]['mean_kl']:.5f}" for phase in PHASES}
            print(f"quality: {row.entry.name}: {summary}", file=sys.stderr)


def run_round(args: argparse.Namespace, python: Path, entry: Entry) -> Figures:
    model = args.systems.parent / entry.model
    work = ["--threads", usable_threads(), "--prompts", *args.prompts, "--new-tokens", args.new_tokens]
    for name in ("warm_up", "together", "image"):
        if value := getattr(args, name):
            work += [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [value])]
    if not args.first:
        return dict(json.loads(run_script(python, "runners.py", entry.runner, model, *work, timeout_s=args.timeout)))
    drop(model)
    results: Figures = {}
    with tempfile.TemporaryDirectory() as cache:  # llmc's own, empty like at the first load on a machine
        for state in ("cold", "again"):
            command = (python, "runners.py", entry.runner, model, *work, "--first")
            line = run_script(*command, timeout_s=args.timeout, environment={"LLMC_CACHE": cache})
            results |= {f"{state}, {name}": figure for name, figure in json.loads(line).items()}
    return results


def drop(model: Path) -> None:
    """Drop a model's files from the page cache, unless a process has them mapped."""
    for path in [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_all(args: argparse.Namespace, pythons: dict[str, Path], rows: Sequence[Row]) -> None:
    """Run all systems in turn, several times; one that fails is not tried again."""
    for number in range(1, args.rounds + 1):
        for row in (row for row in rows if not row.trouble):
            disturbance = Disturbance()
            try:
                row.rounds.append(run_round(args, pythons[row.entry.runner], row.entry))
            except RuntimeError as error:
                row.trouble = str(error)
            busy = disturbance.cpus()
            noise = f" (disturbed: {busy} CPUs busy with something else)" if busy > QUIET_CPUS else ""
            summary = row.trouble or ", ".join(f"{name} {figure:g}" for name, figure in row.rounds[-1].items())
            print(f"round {number}/{args.rounds}: {row.entry.name}: {summary}{noise}", file=sys.stderr)


def find_reference(row: Row, rows: Sequence[Row]) -> Row | None:
    """The llmc system with the fewest bits in decode that is as good as this peer."""
    if row.entry.runner == "llmc" or not row.rounds:
        return None
    ours = [
        row_of_llmc
        for row_of_llmc in rows
        if row_of_llmc.entry.runner == "llmc" and row_of_llmc.rounds and row_of_llmc.as_good_as(row)
    ]
    return min(ours, key=lambda row_of_llmc: row_of_llmc.quality["decode"]["bits"], default=None)


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    columns = list(next((row.rounds[0] for row in rows if row.rounds), {}))
    yield "system", "bits per weight", "KL, prefill", "KL, decode", *columns, "compared with"
    for row in rows:
        yield row.entry.name, *row.cells(find_reference(row, rows), columns)


def main() -> int:
    """Measure, write the JSON file and print the table; return 1 if a system failed or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, help="TOML file that lists the systems")
    lengths(parser)
    parser.add_argument("--first", action="store_true", help="the time until the first token, opening included")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each system runs")
    parser.add_argument("--windows", type=positive, default=24, help="windows of text that quality is measured on")
    parser.add_argument("--length", type=positive, default=256, help="tokens of a window")
    parser.add_argument("--quality", type=Path, help="JSON file of an earlier run, whose KL is taken over")
    parser.add_argument("--timeout", type=float, default=1800, help="limit of one process, in seconds")
    parser.add_argument("--json", type=Path, default=Path("peers.json"), help="where every round goes")
    args = parser.parse_args()
    disturbance = Disturbance()
    try:
        quality, pythons, entries = read_systems(args.systems)
        models = [[args.systems.parent / model for model in (entry.model, entry.quality)] for entry in entries]
        rows = [Row(e, find_missing(pythons.get(e.runner), *paths)) for e, paths in zip(entries, models, strict=True)]
        judge_all(args, quality, pythons, rows)
    except (LlmcError, OSError, ValueError) as error:
        parser.error(str(error))
    time_all(args, pythons, rows)
    publish(args.json, disturbance.cpus(), [table(*lines(rows))], rows=[asdict(row) for row in rows])
    failed = any(row.trouble and not row.trouble.startswith(NOT_RUN) for row in rows)
    return int(failed or not any(row.rounds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
