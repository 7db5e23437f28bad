"""What a bundle guarantees about calls of different sizes is measured on it, and differences of one bit are noticed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.bundle import Invariance, Manifest, read_bundle
from llmc.optimize.judge.invariance import measure_guarantees
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.sessions import Batch, Phase, open_session

VOCAB = 64


class Exact:
    """A session without a model: all that it computes is a hash of one row's tokens up to a position.

    ``flaw`` may change what is computed for a call, given the array [B, O, V].
    """

    changes_kernels = False
    read_blocks = KVCache.read_blocks

    def __init__(self, flaw: Callable[[Batch, np.ndarray], None] = lambda call, logits: None) -> None:
        self.tokens = np.zeros((0, 0), np.int64)
        self.flaw = flaw

    @property
    def cache(self) -> "Exact":
        """Itself: its tokens are the cache."""
        return self

    def reserve(self, rows: int, capacity: int) -> None:
        self.tokens = np.zeros((rows, capacity), np.int64)

    def read(self, row: int, start: int, end: int) -> np.ndarray:
        return self.tokens[row, start:end].astype(np.float32)

    def read_states(self, row: int, end: int) -> np.ndarray:
        return np.empty(0, np.float32)

    def write_states(self, row: int, end: int, values: np.ndarray) -> None: ...

    def run(self, batch: Batch) -> np.ndarray:
        rows, sequence = batch.input_ids.shape
        logits = np.zeros((rows, batch.logit_indices.shape[1], VOCAB), np.float32)
        for row, past in enumerate(batch.past_lengths):
            known = self.tokens[batch.first_row + row]
            known[past : past + sequence] = batch.input_ids[row]
            for i, index in enumerate(batch.logit_indices[row]):
                logits[row, i] = np.random.default_rng(known[: past + index + 1]).normal(size=VOCAB)
        self.flaw(batch, logits)
        return logits


def one_bit(values: np.ndarray) -> None:
    values.view(np.int32)[...] ^= 1


def odd_rows(call: Batch, logits: np.ndarray) -> None:
    """As kernels that take rows in pairs: the last of an odd number is computed otherwise."""
    if logits.shape[0] % 2 and call.input_ids.shape[1] == 1:
        one_bit(logits[-1:])


def odd_tokens(call: Batch, logits: np.ndarray) -> None:
    tokens = call.input_ids.shape[1]
    for output in np.flatnonzero(call.logit_indices[0] == tokens - 1) if tokens % 2 and tokens > 1 else ():
        one_bit(logits[:, output : output + 1])


def odd_outputs(call: Batch, logits: np.ndarray) -> None:
    if call.input_ids.shape[1] > 1 and logits.shape[1] % 2:
        one_bit(logits[:, -1:])


def six_rows(call: Batch, logits: np.ndarray) -> None:
    if logits.shape[0] == 6:
        one_bit(logits[3:4, :, -1:])


def one_token(call: Batch, logits: np.ndarray) -> None:
    if call.input_ids.shape[1] == 1:
        one_bit(logits)


def first_call_only(call: Batch, logits: np.ndarray) -> None:
    if call.phase is Phase.PREFILL and call.input_ids.shape[1] == 4:
        one_bit(logits)


def long_calls(*sizes: int) -> Callable[[Batch, np.ndarray], None]:
    """As attention in tiles: the last token of calls of these sizes is computed otherwise."""

    def flaw(call: Batch, logits: np.ndarray) -> None:
        tokens = call.input_ids.shape[1]
        for output in np.flatnonzero(call.logit_indices[0] == tokens - 1) if tokens in sizes else ():
            one_bit(logits[:, output : output + 1, -1:])

    return flaw


ALL = Invariance(rows=1, tokens=1, outputs=1, single=True)
FLAWS = [
    (lambda call, logits: None, ALL, ALL),
    (odd_rows, replace(ALL, rows=2), replace(ALL, rows=2)),
    (odd_tokens, replace(ALL, tokens=2), replace(ALL, tokens=2)),
    (odd_outputs, replace(ALL, outputs=2), replace(ALL, outputs=2)),
    (six_rows, replace(ALL, rows=0), replace(ALL, rows=0)),
    (one_token, replace(ALL, single=False), replace(ALL, single=False)),
    (first_call_only, replace(ALL, tokens=0), ALL),
    (long_calls(67), replace(ALL, tokens=2), ALL),
    (long_calls(66), replace(ALL, tokens=0), ALL),
    (long_calls(130), replace(ALL, tokens=0), ALL),
    (long_calls(65, 129), ALL, ALL),  # which no runtime makes
]


def with_limits(manifest: Manifest, max_context: int = 512, max_batch: int = 8) -> Manifest:
    geometry = replace(manifest.geometry, vocab_size=VOCAB)
    limits = replace(manifest.limits, max_context=max_context, max_batch=max_batch, prefill_chunk=512)
    graphs = {phase: replace(manifest.graphs["decode"], file=f"{phase}.onnx") for phase in ("prefill", "decode")}
    return replace(manifest, geometry=geometry, limits=limits, graphs=graphs)


@pytest.mark.parametrize(("flaw", "prefill", "decode"), FLAWS)
def test_a_difference_of_one_bit_is_found_and_named(manifest, flaw, prefill, decode):
    found = measure_guarantees(Exact(flaw), with_limits(manifest))
    assert {phase: graph.invariance for phase, graph in found.graphs.items()} == {"prefill": prefill, "decode": decode}


def far_alone(call: Batch, logits: np.ndarray) -> None:
    """As products over a float16 cache: a lone token is computed otherwise after some hundreds of positions."""
    if call.input_ids.shape[1] == 1 and call.past_lengths[0] > 400:
        one_bit(logits[..., :1])


def test_a_lone_token_is_compared_with_several_after_a_long_prefix_too(manifest):
    graphs = measure_guarantees(Exact(far_alone), with_limits(manifest, max_context=1024)).graphs
    assert {graph.invariance for graph in graphs.values()} == {replace(ALL, single=False)}


@pytest.fixture(params=["tiny_bundle", "fp32_bundle"])
def built(request: pytest.FixtureRequest) -> Iterator[Path]:
    yield request.getfixturevalue(request.param)


def test_a_build_records_what_a_loaded_bundle_shows(built):
    manifest = read_bundle(built)
    session = open_session(built, manifest, 1)
    again = measure_guarantees(session, manifest)
    session.close()
    assert again == manifest
    for graph in manifest.graphs.values():
        assert graph.invariance.rows and graph.invariance.tokens and graph.invariance.outputs  # at least even calls


def test_pairs_of_rows_and_tokens_compute_the_same_in_other_company(built):
    """The guarantee, tried with other tokens, lengths and sizes than those it was measured with."""
    manifest = read_bundle(built)
    session = open_session(built, manifest, 1)
    session.cache.reserve(8, 256)
    prompt = [5, 800, 31, 77, 2000, 41, 9, 1234, 99, 3]
    alone = session.run(call([prompt], 0)).copy()
    session.run(call([prompt[:4]], 0, row=2))
    pieces = session.run(call([prompt[4:]], 4, row=2)).copy()
    assert np.array_equal(pieces[0], alone[0, 4:])
    for row in (0, 1, 3, 4, 5):
        session.run(call([prompt], 0, row=row))
    six = session.run(call([[7]] * 6, len(prompt), phase=Phase.DECODE)).copy()
    two = session.run(call([[7]] * 2, len(prompt), row=2, phase=Phase.DECODE)).copy()
    assert np.array_equal(six[:2], two)
    session.close()


def call(ids: list[list[int]], past: int, row: int = 0, phase: Phase = Phase.PREFILL) -> Batch:
    rows, tokens = len(ids), len(ids[0])
    return Batch.of(phase, np.array(ids), np.full(rows, past), np.tile(np.arange(tokens), (rows, 1)), row)
