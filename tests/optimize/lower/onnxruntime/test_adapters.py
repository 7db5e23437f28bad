"""The graph for adapters: each row as if its own were in the weights, and no linear left out."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference, long_texts, replace_weights

from llmc.bundle import DECODER_FILE, FACTOR_A, FACTOR_B, read_export
from llmc.errors import BuildError

# Of logits up to about 20, in float32: two products where the merged weight has one. Without the factors of a single
# linear they differ by more than a hundred times as much.
TOLERANCE = 1e-4
RANK = 3
cases = pytest.mark.parametrize(
    "case", ["llama-biases", "cohere-parallel", "gemma3-two-ropes", "phi3-packed-window-fp16"], indirect=True
)


@pytest.fixture
def opening(lowering):
    """A lowering of the graph for adapters."""

    def start(export):
        lowered = lowering(export)
        lowered.context = replace(lowered.context, phase="decode", opened=True)
        return lowered

    return start


@pytest.fixture
def factors(case):
    """Of two rows, a [inputs, rank] and b [rank, outputs] of each linear that may be changed."""
    draw = np.random.default_rng(3).normal
    return [
        {
            it.name: (
                draw(0, 0.1, (it.inputs, RANK)).astype(np.float32),
                draw(0, 0.1, (RANK, it.outputs)).astype(np.float32),
            )
            for it in read_export(case.export).geometry.linears
            if it.is_open
        }
        for _ in range(2)
    ]


def feed(session, factors):
    """The graph's inputs for factors, of all rows."""
    found = {}
    for value in session.get_inputs():
        name = value.name
        if name.startswith(FACTOR_A):
            modules = name.removeprefix(FACTOR_A).split("+")
            found[name] = np.stack([np.concatenate([row[it][0] for it in modules], 1) for row in factors])
        elif name.startswith(FACTOR_B):
            found[name] = np.stack([row[name.removeprefix(FACTOR_B)][1] for row in factors])
    return found


def run(session, ids, feeds):
    """Logits of two rows with the same tokens."""
    tokens = {"input_ids": np.array([ids, ids]), "past_lengths": np.zeros(2, np.int64), **long_texts(session, 2)}
    found = session.run(["logits"], feeds | tokens | {"logit_indices": np.tile(np.arange(len(ids)), (2, 1))})
    return found[0]


def merged(case, lowered, decoder, folder, own, ids):
    """Logits of the portable graph with one row's factors in its weights."""
    model = ir.load(case.export / DECODER_FILE)

    def add(module, array):
        return array + (own[module][0] @ own[module][1]).T if module in own else array.astype(np.float32)

    replace_weights(model, add)
    folder.mkdir()
    ir.save(model, folder / DECODER_FILE)
    return decoder(folder, lowered.geometry)(ids)


@cases
def test_each_row_is_computed_with_its_own_factors(case, opening, decoder, factors, ids, tmp_path):
    lowered = opening(case.export)
    whole = decoder(lowered.save(), lowered.geometry)
    cache = {name: np.repeat(array, 2, 0) for name, array in whole.empty_cache().items()}
    own = feed(whole.session, factors)
    logits = run(whole.session, ids, cache | own)
    for row in range(2):
        wanted = merged(case, lowered, decoder, tmp_path / str(row), factors[row], ids)
        assert difference(logits[row], wanted) <= TOLERANCE
    lacking = own | {name: array * 0 for name, array in own.items() if name == f"{FACTOR_B}{[*factors[0]][1]}"}
    changed = run(whole.session, ids, cache | lacking)
    assert difference(changed, logits) > 100 * TOLERANCE


@cases
def test_linears_that_read_the_same_share_a_product(case, opening):
    lowered = opening(case.export)
    opened = [it.name for it in lowered.geometry.linears if it.is_open]
    assert lowered.apply("open linears") == len(opened)
    shared = [v.name.removeprefix(FACTOR_A).split("+") for v in lowered.graph.inputs if v.name.startswith(FACTOR_A)]
    assert sorted(module for modules in shared for module in modules) == sorted(opened)
    reads = [{lowered.geometry.linear[module].reads for module in modules} for modules in shared]
    assert all(len(found) == 1 for found in reads)
    assert len({min(found) for found in reads}) == len(shared)


@cases
def test_a_linear_that_the_graph_lacks_is_an_error(case, opening):
    lowered = opening(case.export).before("open linears")
    lowered.nodes("Linear")[3].op_type = "Linearly"
    with pytest.raises(BuildError, match="cannot be changed by adapters: the graph has no such linear"):
        lowered.apply("open linears")


def test_a_graph_for_requests_without_an_adapter_has_no_factors(exported, lowering):
    lowered = lowering(exported("llama-biases").export)
    assert lowered.apply("open linears") == 0
    assert not any(value.name.startswith((FACTOR_A, FACTOR_B)) for value in lowered.graph.inputs)
