"""Rows of different lengths in one call of prefill's graph: each as if it were alone, and nothing else touched."""

from dataclasses import replace

import numpy as np
import pytest
from doubles.lowerings import VARIED, difference, long_texts

from llmc.optimize.judge.reference import empty_caches
from llmc.optimize.lower.context import PerToken, WeightOnly
from llmc.optimize.lower.onnxruntime import packed_rows
from llmc.optimize.quantize.grid import Grid

pytest.importorskip("onnxruntime", "1.32", reason="older engines take no rows of different lengths")

# As in test_lowering.py.
FLOAT_TOLERANCE = 1e-4
FAMILIES = (*VARIED, "gpt_oss-sinks-clamped-experts-bf16")
CAPACITY = 24
# Of each row: tokens before the call, and new ones; one begins, one goes on with a single token, one has none.
PASTS, NEW = (0, 9, 5, 3), (11, 1, 0, 7)


@pytest.fixture
def packing(lowering):
    """A lowering of prefill for an engine that takes rows of different lengths."""

    def start(export, *forms):
        lowered = lowering(export, *forms)
        lowered.context = replace(lowered.context, ragged_rows=True)
        return lowered

    return start


def packed(lowered) -> bool:
    """False where some attention is in basic operators, which know no padding."""
    takes_lengths = any(value.name == packed_rows.NEW_LENGTHS for value in lowered.graph.inputs)
    assert takes_lengths == (len(lowered.nodes("GroupQueryAttention")) == len(lowered.geometry.attentions))
    return takes_lengths


class Rows:
    """A graph that packs rows, and a cache with :data:`PASTS` of four texts in it."""

    def __init__(self, decoder, lowered, folder) -> None:
        self.session = decoder(folder, lowered.geometry).session
        self.caches = lowered.geometry.caches
        self.texts = np.random.default_rng(2).integers(0, 96, (len(PASTS), CAPACITY))
        self.cache = self.empty(len(PASTS))
        for row, past in enumerate(PASTS):
            if past:
                _, cache = self.run([row], [0], [past], self.empty(1))
                for name, array in cache.items():
                    self.cache[name][row] = array[0]

    def empty(self, rows):
        return empty_caches(self.caches, rows, CAPACITY, "float32")

    def run(self, rows, pasts, new, cache, outputs=1):
        """Logits [B, O, V] of the last new tokens of ``rows`` of the texts, and the cache."""
        ids = np.full((len(rows), max(new)), 7, np.int64)
        for i, (row, past, count) in enumerate(zip(rows, pasts, new, strict=True)):
            ids[i, :count] = self.texts[row, past : past + count]
        last = np.maximum(np.array(new, np.int64) - 1, 0)[:, None].repeat(outputs, 1)
        feeds = {"input_ids": ids, "past_lengths": np.array(pasts), "logit_indices": last, "new_lengths": np.array(new)}
        feeds |= long_texts(self.session, len(rows))
        logits, *presents = self.session.run(None, feeds | cache)
        return logits, dict(zip(cache, presents, strict=True))

    def together(self):
        """Logits and cache of one call of all rows."""
        return self.run(range(len(PASTS)), PASTS, NEW, self.cache)

    def alone(self, row):
        """Logits and cache of a call of one row."""
        cache = {name: array[row : row + 1] for name, array in self.cache.items()}
        return self.run([row], [PASTS[row]], [NEW[row]], cache)


def largest_difference(rows) -> float:
    """Of logits and of what the cache holds, between rows together and alone."""
    logits, cache = rows.together()
    found = []
    for row, (past, new) in enumerate(zip(PASTS, NEW, strict=True)):
        if not new:
            found += [difference(cache[name][row, :, :past], rows.cache[name][row, :, :past]) for name in cache]
            continue
        alone, kept = rows.alone(row)
        end = past + new
        found += [difference(cache[name][row, :, :end], kept[name][0, :, :end]) for name in cache]
        found.append(difference(logits[row], alone[0]))
    return max(found)


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_a_row_alone_equals_the_portable_graph(case, packing, decoder, portable_logits, ids):
    lowered = packing(case.export)
    folder = lowered.save()
    if not packed(lowered):
        return
    whole = decoder(folder, lowered.geometry)
    logits, cache, position = [], whole.empty_cache(), 0
    for size in (7, 1, 12):
        feeds = {
            "input_ids": np.array([ids[position : position + size]]),
            "past_lengths": np.array([position]),
            "logit_indices": np.arange(size)[None],
            "new_lengths": np.array([size]),
            **long_texts(whole.session, 1),
        }
        found, *presents = whole.session.run(None, feeds | cache)[: 1 + len(cache)]
        cache = dict(zip(cache, presents, strict=True))
        logits.append(found[0])
        position += size
    assert difference(np.concatenate(logits), portable_logits(case)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_rows_of_different_lengths_are_as_alone(case, packing, decoder):
    lowered = packing(case.export)
    folder = lowered.save()
    if packed(lowered):
        assert largest_difference(Rows(decoder, lowered, folder)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("form", [PerToken(), WeightOnly(Grid(4, 32))], ids=["W8A8", "4 bits"])
def test_so_they_are_with_integers(exported, packing, decoder, form):
    lowered = packing(exported("llama-biases").export, form)
    assert largest_difference(Rows(decoder, lowered, lowered.save())) <= FLOAT_TOLERANCE


def lengths_not_told(lowered) -> None:
    for node in lowered.nodes("GroupQueryAttention"):
        node.resize_inputs(16)


def rows_mixed_up(lowered) -> None:
    [wanted] = lowered.nodes("GatherElements")
    wanted.outputs[0].replace_all_uses_with(wanted.inputs[1])


@pytest.mark.parametrize("plant", [lengths_not_told, rows_mixed_up])
def test_a_planted_error_exceeds_the_tolerance(exported, packing, decoder, plant):
    lowered = packing(exported("llama-biases").export).finish()
    plant(lowered)
    assert largest_difference(Rows(decoder, lowered, lowered.write())) > 10 * FLOAT_TOLERANCE
