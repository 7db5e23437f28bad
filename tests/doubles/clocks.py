"""Clocks that do not depend on the machine."""

from itertools import count
from types import SimpleNamespace

import pytest


def even_costs(patch: pytest.MonkeyPatch) -> None:
    """Every call of a session takes a second and drafting none, so drafts pay as soon as one of them is right."""
    ticks = count()
    patch.setattr("llmc.runtime.calls.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    patch.setattr("llmc.runtime.speculation.speculator.perf_counter", lambda: 0.0)
