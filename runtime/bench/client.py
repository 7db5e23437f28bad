"""A client that times its requests: arbitrary tokens, answered greedily by the engine that users get."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc import __version__
from llmc.errors import LlmcError
from llmc.runtime.api.handle import Handle
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta
from llmc.runtime.host.machine import cpu_model, resident_bytes
from llmc.runtime.model import Model
from llmc.runtime.observe.metrics import RequestMetrics
from llmc.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run: the bundle, the requests, the machine, what it took; ``rss_peak_bytes`` is of this process."""

    bundle: str
    model: str
    precision: str
    prompt_length: int
    new_tokens: int
    threads: int
    load_s: float
    rss_peak_bytes: int
    llmc_version: str
    engine: str
    engine_version: str
    python_version: str
    cpu: str


def common(model: Model) -> dict[str, Any]:
    """The fields of a :class:`Report` that model and machine tell."""
    manifest = model.manifest
    return {
        "bundle": str(model.folder),
        "model": manifest.source.name,
        "precision": manifest.recipe.precision,
        "threads": model.threads,
        "rss_peak_bytes": resident_bytes()[1],
        "llmc_version": __version__,
        "engine": manifest.target.engine,
        "engine_version": model.engine_version,
        "python_version": platform.python_version(),
        "cpu": cpu_model(),
    }


@dataclass(eq=False)
class Visit:
    """A request as its client sees it; times are those of ``time.monotonic``.

    Attributes:
        due: when it arrives.
        sent: when it was handed to the engine, which is later if the client is late.
        tokens: when each token came.
        handle: the engine's, None if it turned the request away.
        metrics: what the engine measured, None if the request was not answered.
        error: why it was not answered.
    """

    due: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    handle: Handle | None = None
    metrics: RequestMetrics | None = None
    error: LlmcError | None = None

    def note(self, delta: Delta) -> None:
        """Tokens came; called on the engine's thread."""
        self.tokens += [time.monotonic()] * len(delta.token_ids)


def visit(model: Model, prompt: Callable[[int], list[int]], offsets: Sequence[float], new_tokens: int) -> list[Visit]:
    """Send every request when it is due, then wait for all answers; ``prompt`` gives the tokens of each, by number."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)

    def submit(index: int, visit: Visit) -> Handle:
        return model.submit(Request(prompt(index), params, on_delta=visit.note))

    visits = send(offsets, submit)
    for each in visits:
        if each.handle is None:
            continue
        try:
            each.metrics = each.handle.result().metrics
        except LlmcError as error:
            each.error = error
    return visits


def send(offsets: Sequence[float], submit: Callable[[int, Visit], Handle]) -> list[Visit]:
    """Call ``submit`` for every request when it is due, late ones at once; its LlmcErrors are kept."""
    start = time.monotonic()
    visits = [Visit(start + offset) for offset in offsets]
    for index, each in enumerate(visits):
        if (wait := each.due - time.monotonic()) > 0:
            time.sleep(wait)
        each.sent = time.monotonic()
        try:
            each.handle = submit(index, each)
        except LlmcError as error:
            each.error = error
    return visits


def due_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the first arrival to each of a Poisson process of ``rate`` per second, without end."""
    generator, moment = np.random.default_rng(seed), 0.0
    while True:
        yield moment
        moment += float(generator.exponential(1 / rate))


def draw_prompt(vocab_size: int, length: int, seed: int, index: int) -> list[int]:
    """Draw tokens evenly, so that no two prompts share a prefix worth caching."""
    tokens: list[int] = np.random.default_rng([seed, 1, index]).integers(0, vocab_size, length).tolist()
    return tokens
