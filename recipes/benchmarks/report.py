"""Results as dataclasses, and as a Markdown table with the ratio of llmc to every peer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from machine import Machine

QUIET_CPUS = 0.1  # more than this busy with something else, and the figures are in doubt
PHASES = (("prefill_tok_s", "prefill {}"), ("decode_tok_s", "decode after {}"))


@dataclass(frozen=True)
class Round:
    """One process of one system. ``report`` is the JSON line of its runner, see ``harness.Report``.

    ``other_cpus`` is the mean number of CPUs busy with something else meanwhile (None: not known).
    """

    report: dict[str, Any]
    other_cpus: float | None

    @property
    def disturbed(self) -> bool:
        """Something else took CPU time meanwhile; systems suffer from it very unequally."""
        return self.other_cpus is not None and self.other_cpus > QUIET_CPUS


@dataclass(frozen=True)
class Row:
    """One system with all its rounds. ``trouble`` says why there are none, or why there are fewer than asked for."""

    name: str
    group: str
    runner: str
    model: str
    rounds: tuple[Round, ...]
    trouble: str

    @property
    def failed(self) -> bool:
        """It ran and broke, as opposed to never being set up."""
        return self.trouble.startswith("failed")

    def best(self, phase: str, prompt: int) -> float | None:
        """Highest rate of all rounds, in tokens per second."""
        results = [result for r in self.rounds for result in r.report["results"] if result["prompt"] == prompt]
        return max((float(result[phase]) for result in results), default=None)


@dataclass(frozen=True)
class Results:
    """Everything that is written to the JSON file. Lengths in tokens, ``date`` in UTC."""

    date: str
    command: str
    machine: Machine
    prompts: tuple[int, ...]
    new_tokens: int
    rows: tuple[Row, ...]


def table(results: Results) -> str:
    """One Markdown table per group: best tokens per second, and in brackets llmc's rate over the peer's."""
    groups = dict.fromkeys(row.group for row in results.rows)
    return "\n\n".join("\n".join(_group_lines(results, group)) for group in groups) + "\n\n" + _footer(results)


def _group_lines(results: Results, group: str) -> Iterator[str]:
    columns = [(phase, title, prompt) for phase, title in PHASES for prompt in results.prompts]
    rows = [row for row in results.rows if row.group == group]
    reference = next((row for row in rows if row.runner == "llmc" and row.rounds), None)
    yield "| " + " | ".join([group, *(title.format(prompt) for _, title, prompt in columns)]) + " |"
    yield "|---" + "|---:" * len(columns) + "|"
    for row in rows:
        cells = [_cell(row, reference, phase, prompt) for phase, _, prompt in columns]
        yield "| " + " | ".join([row.name, *cells]) + " |"


def _cell(row: Row, reference: Row | None, phase: str, prompt: int) -> str:
    rate = row.best(phase, prompt)
    if rate is None:
        return "failed" if row.failed else "not run"
    ours = reference.best(phase, prompt) if reference and row is not reference else None
    return f"{rate:.0f}" if ours is None else f"{rate:.0f} ({ours / rate:.2f}x)"


def _footer(results: Results) -> str:
    machine = results.machine
    rounds = [r for row in results.rows for r in row.rounds]
    disturbed = sum(r.disturbed for r in rounds)
    lines = [
        f"Tokens per second, best round; in brackets llmc / peer. {results.new_tokens} new tokens, greedy, "
        f"{machine.threads} threads, {machine.cpu}, {results.date}.",
        *([f"DISTURBED: {disturbed} of {len(rounds)} runs shared the CPUs; do not quote."] if disturbed else []),
        *(f"{row.name}: {row.trouble}" for row in results.rows if row.trouble),
    ]
    return "\n".join(lines)
