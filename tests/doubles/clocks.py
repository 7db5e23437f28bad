"""Clocks that do not depend on the machine, and patience with one that is busy."""

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest


def ticking() -> SimpleNamespace:
    """In place of ``time``: whatever is measured takes a second."""
    ticks = count()
    return SimpleNamespace(perf_counter=lambda: float(next(ticks)))


def even_costs(patch: pytest.MonkeyPatch) -> None:
    """Every call of a session takes a second and drafting none, so drafts pay as soon as one of them is right."""
    patch.setattr("llmc.runtime.runner.model_runner.time", ticking())
    patch.setattr("llmc.runtime.speculation.speculator.perf_counter", lambda: 0.0)


def even_pace(patch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt takes an engine as long as a step of decoding, so none has to be paid back by many."""
    patch.setattr("llmc.runtime.engine.scheduler.time", ticking())


def until(holds: Callable[[], object], pause_s: float = 0.002) -> None:
    """Wait for what takes far less than two minutes."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(pause_s)
