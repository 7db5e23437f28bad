"""The measures of quality, and what the quantized bundles of the small model must reach by them."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.bundle import read_bundle
from llmc.optimize.build import build
from llmc.optimize.quality import Comparison, compare, log_softmax, negative_log_likelihood
from llmc.optimize.reference import Reference
from llmc.runtime import Model, load
from llmc.runtime.sessions import Phase

# Nats: both sides compute in float64 from the same float32 logits, in another order.
TRANSCRIPTION_TOLERANCE = 1e-9

# ----------------------------------------------------------------------------------------------------------- formulas


def transcribed_log_softmax(row: list[float]) -> list[float]:
    """Logarithm of the softmax, one number after the other, summed exactly."""
    largest = max(row)
    total = math.log(math.fsum(math.exp(x - largest) for x in row)) + largest
    return [x - total for x in row]


def transcribed_divergence(reference: list[float], candidate: list[float]) -> float:
    """KL(reference || candidate) in nats."""
    p, q = transcribed_log_softmax(reference), transcribed_log_softmax(candidate)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 40))
logits = arrays.arrays(np.float32, shapes, elements=st.floats(-60, 60, width=32))
pairs = shapes.flatmap(
    lambda shape: st.tuples(*[arrays.arrays(np.float32, shape, elements=st.floats(-60, 60, width=32))] * 2)
)


@settings(deadline=None)
@given(logits)
def test_log_softmax_equals_its_transcription(rows):
    wanted = [transcribed_log_softmax(row) for row in rows.tolist()]
    np.testing.assert_allclose(log_softmax(rows), wanted, atol=TRANSCRIPTION_TOLERANCE, rtol=0)


@settings(deadline=None)
@given(pairs)
def test_divergence_equals_its_transcription_and_is_never_negative(pair):
    reference, candidate = pair
    wanted = math.fsum(map(transcribed_divergence, reference.tolist(), candidate.tolist()))
    found = compare(reference, candidate)
    assert found.kl == pytest.approx(wanted, abs=TRANSCRIPTION_TOLERANCE)
    assert found.kl >= -TRANSCRIPTION_TOLERANCE
    assert found.positions == len(reference)


@settings(deadline=None)
@given(logits, st.randoms(use_true_random=False))
def test_likelihood_equals_its_transcription(rows, random):
    targets = [random.randrange(rows.shape[1]) for _ in rows]
    wanted = -math.fsum(transcribed_log_softmax(row)[t] for row, t in zip(rows.tolist(), targets, strict=True))
    assert negative_log_likelihood(rows, np.array(targets)) == pytest.approx(wanted, abs=TRANSCRIPTION_TOLERANCE)


def test_logits_of_any_size_have_a_finite_softmax():
    rows = np.array([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]], np.float32)
    np.testing.assert_allclose(np.exp(log_softmax(rows)), [[1, 0, 0], [1 / 3] * 3])


def test_a_constant_added_to_all_logits_changes_nothing():
    rows = np.random.default_rng(0).normal(0, 3, (5, 50)).astype(np.float32)
    assert compare(rows, rows + 8).kl == pytest.approx(0, abs=1e-10)
    assert compare(rows, rows + 8).agreements == 5


def test_agreement_counts_positions_with_the_same_most_likely_token():
    one = np.array([[1, 2, 3], [3, 2, 1], [1, 5, 1]], np.float32)
    other = np.array([[0, 0, 9], [1, 2, 1], [0, 1, 0]], np.float32)
    assert compare(one, other).top1_agreement == pytest.approx(2 / 3)


def test_means_are_over_the_positions_of_all_texts():
    total = Comparison(3, 0.6, 1) + Comparison(1, 0.2, 1) + Comparison()
    assert (total.mean_kl, total.top1_agreement) == (pytest.approx(0.2), 0.5)
    assert (Comparison().mean_kl, Comparison().top1_agreement) == (0.0, 0.0)


def test_a_planted_error_exceeds_the_transcription_tolerance():
    rng = np.random.default_rng(0)
    reference, candidate = (rng.normal(0, 1, (3, 20)).astype(np.float32) for _ in range(2))
    found = compare(reference, candidate).kl
    for p, q in ((candidate, reference), (reference, candidate + np.eye(3, 20, dtype=np.float32) * 1e-5)):
        wrong = math.fsum(map(transcribed_divergence, p.tolist(), q.tolist()))
        assert abs(found - wrong) > TRANSCRIPTION_TOLERANCE


# ----------------------------------------------------------------------------- the contract, on text of another corpus

RECIPES = Path(__file__).parents[2] / "recipes"
WINDOW = 256
WINDOWS = 12


@dataclasses.dataclass(frozen=True)
class Bound:
    """Largest relative change of the perplexity, and largest mean KL in nats, that a precision may cost."""

    perplexity: float
    kl: float


INT8 = Bound(perplexity=0.005, kl=0.001)
INT4 = Bound(perplexity=0.04, kl=0.025)
# With the tied embedding in 4 bits too, which saves half of the bytes that the head reads: 0.034.
INT4_HEAD = Bound(perplexity=0.04, kl=0.04)


@dataclasses.dataclass(frozen=True)
class Text:
    """Windows of tokens, each with one more to predict, and the unquantized model's logits after each token."""

    windows: list[list[int]]
    reference: list[np.ndarray]

    def cost(self, model: Model, phase: Phase) -> Bound:
        """What ``model`` loses against the unquantized one."""
        got = [model.engine.logits(window[:-1], phase) for window in self.windows]
        total = sum(map(compare, self.reference, got), start=Comparison())
        lost = sum(self.likelihoods(got)) - sum(self.likelihoods(self.reference))
        return Bound(abs(math.exp(lost / total.positions) - 1), total.mean_kl)

    def likelihoods(self, logits: list[np.ndarray]) -> list[float]:
        targets = [np.array(window[1:]) for window in self.windows]
        return [negative_log_likelihood(*pair) for pair in zip(logits, targets, strict=True)]


@pytest.fixture(scope="module")
def text(tiny_checkpoint: Path, tiny_export: Path, tiny_bundle: Path) -> Text:
    """Windows spread over the validation text, which the small model was not trained on."""
    with load(tiny_bundle) as model:
        ids = model.tokenizer.encode((tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - WINDOW - 1, WINDOWS).astype(int)
    windows = [ids[start : start + WINDOW + 1] for start in starts]
    reference = Reference(tiny_export)
    batches = [windows[i : i + 4] for i in range(0, WINDOWS, 4)]
    return Text(windows, [row for batch in batches for row in reference.logits([window[:-1] for window in batch])])


@pytest.fixture(scope="module")
def bundles(tiny_export: Path, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle of each recipe that comes with llmc."""
    folder = tmp_path_factory.mktemp("quality")
    for name in ("int4", "int4-quality", "int4-small-memory"):
        build(tiny_export, folder / name, recipe=RECIPES / f"{name}.toml")
    return {"int8": tiny_bundle} | {path.name: path for path in folder.iterdir()}


def within(cost: Bound, bound: Bound) -> bool:
    return cost.perplexity <= bound.perplexity and cost.kl <= bound.kl


PATHS = [
    ("int8", Phase.PREFILL, INT8),
    ("int8", Phase.DECODE, INT8),
    ("int4-quality", Phase.PREFILL, INT4),
    ("int4-quality", Phase.DECODE, INT4),
    ("int4", Phase.PREFILL, INT4),
    ("int4", Phase.DECODE, INT4_HEAD),
    ("int4-small-memory", Phase.PREFILL, INT4_HEAD),
]


@pytest.mark.parametrize(("name", "phase", "bound"), PATHS)
def test_a_quantized_bundle_stays_close_to_the_unquantized_model(text, bundles, name, phase, bound):
    with load(bundles[name], threads=1) as model:
        cost = text.cost(model, phase)
    assert within(cost, bound), cost


def test_the_reference_predicts_the_text(text):
    """Otherwise the contract would be about noise; training.json records 27.3 for the whole text."""
    perplexity = math.exp(sum(text.likelihoods(text.reference)) / (WINDOW * WINDOWS))
    assert perplexity < 40


@pytest.fixture
def broken(bundles, tmp_path):
    """Copies a bundle and multiplies the scales of one layer's output projection: a small error, yet an error."""

    def break_(name: str, factor: float) -> Path:
        import onnx_ir as ir

        folder = shutil.copytree(bundles[name], tmp_path / name)
        graph = read_bundle(folder).graphs["decode"].file
        for tensor_name, value in ir.load(folder / graph).graph.initializers.items():
            if "layers.2.self_attn.o_proj" in tensor_name and tensor_name.endswith(".scales"):
                tensor = value.const_value
                scales = np.memmap(folder / "weights.bin", np.float32, "r+", tensor.offset, (tensor.length // 4,))
                scales *= np.float32(factor)
                scales.flush()
                return folder
        raise AssertionError("no scales found")

    return break_


@pytest.mark.parametrize(("name", "factor", "bound"), [("int8", 1.3, INT8), ("int4-quality", 1.3, INT4)])
def test_a_planted_error_exceeds_the_contract(text, broken, name, factor, bound):
    with load(broken(name, factor), threads=1) as model:
        cost = text.cost(model, Phase.DECODE)
    assert not within(cost, bound)


def test_the_manifest_holds_the_quality_of_the_golden_prompts(bundles):
    for folder in bundles.values():
        quality = json.loads((folder / "llmc.json").read_text())["quality"]
        assert quality["positions"] > 100
        assert 0 < quality["prefill_mean_kl"] < 1
        assert 0 < quality["decode_top1_agreement"] <= 1
