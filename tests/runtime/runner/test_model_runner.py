"""How steps become calls: which graph, which rows, how many tokens; and that a dummy never shows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.bundle import Invariance, Manifest
from llmc.runtime.api.options import Determinism
from llmc.runtime.kv.rows import Rows, Slot
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.runner.model_runner import PREFILL_GRAPH_FROM, ModelRunner
from llmc.runtime.sessions import Phase

CAPACITY = 16


class Held(Slot):
    """A sequence as the runner sees it, of a request of its own or of the ``owner``."""

    def __init__(self, context: list[int], cached: int, owner: object = None) -> None:
        super().__init__(context, cached)
        self._owner = owner or self

    @property
    def owner(self) -> object:
        return self._owner


@pytest.fixture
def session(remembering: Any) -> Any:
    session = remembering()
    session.cache.reserve(4, CAPACITY)
    return session


def split(manifest: Manifest, precision: str = "int8", **found: Any) -> Manifest:
    """A manifest with a graph for each phase."""
    graph = replace(manifest.graphs["decode"], invariance=Invariance(**found))
    graphs = {"decode": graph, "prefill": replace(graph, file="prefill.onnx")}
    return replace(manifest, graphs=graphs, recipe=replace(manifest.recipe, precision=precision))


def runner_of(session: Any, manifest: Manifest, level: str, count: int) -> tuple[ModelRunner, Rows, list[Held]]:
    """A runner of a level, and ``count`` sequences that decode, filled as a prefill would."""
    rows = Rows(session.cache)
    limits: dict[str, int] = {"max_context": CAPACITY, "max_rows": 4, "prefill_chunk": 8}
    runner = ModelRunner(session, manifest, rows, Determinism(level), metrics=EngineMetrics(), **limits)
    held = [Held([100 * i + j for j in range(3 + i)], 2 + i) for i in range(count)]
    for sequence in held:
        rows.admit(sequence)
        rows.promote(sequence)
        session.cache[sequence.row, : sequence.cached] = sequence.context[: sequence.cached]
    return runner, rows, held


def shapes(session: Any) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(batch.phase.value, batch.first_row, batch.input_ids.shape) for batch in session.calls]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("level", ["fast", "batch", "strict"])
def test_every_level_gives_every_sequence_its_own_logits(session, manifest, level, count):
    found = split(manifest, rows=2, tokens=2, outputs=1)
    runner, _, held = runner_of(session, found, level, count)
    logits = runner.execute(held)
    for i, sequence in enumerate(held):
        assert np.array_equal(logits[i, 0], session.logits(sequence.context))
        assert session.cache[sequence.row, : sequence.cached + 1].tolist() == sequence.context


def test_an_odd_batch_in_pairs_runs_with_the_row_after_it_and_spoils_nothing(session, manifest):
    runner, rows, held = runner_of(session, split(manifest, rows=2, tokens=2), "batch", 3)
    feeding = Held([7, 8, 9, 10], 3)
    rows.admit(feeding)
    session.cache[feeding.row, :3] = [7, 8, 9]
    runner.execute(held)
    assert shapes(session) == [("decode", 0, (4, 1))]
    assert session.calls[0].past_lengths.tolist() == [2, 3, 4, 3]
    assert session.cache[feeding.row, :3].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("kept", "tokens"),
    [
        ({"rows": 1, "tokens": 2}, 2),
        ({"rows": 2, "tokens": 1, "single": True}, 2),  # a row alone is computed otherwise than beside another one
        ({"rows": 1, "tokens": 1, "single": True}, 1),
    ],
    ids=str,
)
def test_strict_runs_row_by_row_and_even_where_a_lone_token_is_computed_otherwise(session, manifest, kept, tokens):
    runner, _, held = runner_of(session, split(manifest, outputs=1, **kept), "strict", 2)
    runner.execute(held)
    assert shapes(session) == [("decode", 0, (1, tokens)), ("decode", 1, (1, tokens))]


@pytest.mark.parametrize("level", ["fast", "strict"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_drafts_are_verified_in_one_call_with_logits_before_between_and_after(session, manifest, level, count):
    runner, _, (sequence,) = runner_of(session, split(manifest, tokens=2, outputs=1), level, 1)
    drafts = sequence.drafts = [50 + i for i in range(count)]
    logits = runner.execute([sequence])[0]
    assert len(session.calls) == 1
    assert logits.shape[0] == count + 1
    for i in range(count + 1):
        assert np.array_equal(logits[i], session.logits([*sequence.context, *drafts[:i]]))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_many_rows_run_on_the_graph_of_prefill_where_that_is_faster_and_only_if_fast(session, manifest, precision):
    most = PREFILL_GRAPH_FROM[precision]
    for level, tokens, phase in (
        ("fast", most - 1, Phase.DECODE),
        ("fast", most, Phase.PREFILL),
        ("batch", most, Phase.DECODE),
        ("strict", most, Phase.DECODE),
    ):
        runner, *_ = runner_of(session, split(manifest, precision, rows=1, tokens=1, outputs=1), level, 1)
        assert runner.phase(tokens) is phase
    shared = replace(manifest, recipe=replace(manifest.recipe, precision=precision))
    runner, *_ = runner_of(session, shared, "fast", 1)
    assert runner.phase(most) is Phase.DECODE
