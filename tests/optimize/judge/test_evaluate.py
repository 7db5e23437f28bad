"""Quality on a text, against transformers and torch; what is scored, what is refused, what planted errors do to it."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from doubles.refusals import about

from llmc.bundle import Quality, read_bundle
from llmc.errors import BundleError, UsageError
from llmc.optimize.calibrate.text import CalibrationSamples
from llmc.optimize.judge.evaluate import evaluate, read_windows
from llmc.runtime import Model, load
from llmc.runtime.sessions import Phase

WINDOW = 64
WINDOWS = 8
# Relative: the reference adds up in another order than transformers does, which moves logits by 2e-5.
PERPLEXITY_TOLERANCE = 1e-4
# Nats, for means of 0.0005 to 0.03: the same differences of logits, squared and doubled.
KL_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def text_file(tiny_checkpoint: Path) -> Path:
    """The validation text, which the small model was not trained on."""
    return tiny_checkpoint.parent / "validation.txt"


@pytest.fixture(scope="module")
def bundles(tiny_in: Callable[[str], Path], fp32_bundle: Path) -> dict[str, Path]:
    """A bundle of each precision."""
    return {"int8": tiny_in("int8"), "int4": tiny_in("int4"), "fp32": fp32_bundle}


@pytest.fixture(scope="module")
def text(bundles: dict[str, Path], text_file: Path) -> CalibrationSamples:
    with load(bundles["int4"]) as model:
        return read_windows(text_file, model, WINDOW, WINDOWS)


@pytest.fixture
def model(bundles: dict[str, Path]) -> Iterator[Model]:
    with load(bundles["int4"], threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def original_logits(tiny_checkpoint: Path, text: CalibrationSamples) -> np.ndarray:
    """transformers' logits [windows, W, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
            .eval()(torch.tensor(text.ids))
            .logits.numpy()
        )


@pytest.fixture(scope="module")
def qualities(bundles, text, tiny_export, tmp_path_factory) -> dict[str, Quality]:
    cache, found = tmp_path_factory.mktemp("cache"), {}
    for name, folder in bundles.items():
        with load(folder, threads=1) as model:
            found[name] = evaluate(model, text, reference=tiny_export, cache=cache).quality
    return found


def torch_figures(
    reference: np.ndarray, candidate: np.ndarray, ids: np.ndarray
) -> tuple[float, float, float, float, float]:
    """Perplexities of both, mean and 99th percentile of KL, and agreement, by torch's own operators in float64."""
    import torch
    import torch.nn.functional as F

    p, q = (
        torch.tensor(logits[:, :-1], dtype=torch.float64).log_softmax(-1).flatten(0, 1)
        for logits in (reference, candidate)
    )
    targets = torch.tensor(ids[:, 1:]).flatten()
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    perplexities = (F.nll_loss(x, targets).exp().item() for x in (p, q))
    return *perplexities, kl.mean().item(), kl.quantile(0.99).item(), same.item()


@pytest.fixture
def wanted(model: Model, text: CalibrationSamples, original_logits: np.ndarray) -> Callable[[Phase], tuple[float, ...]]:
    def figures(phase: Phase) -> tuple[float, ...]:
        got = np.stack([model.runner.logits(row, phase) for row in text.ids.tolist()])
        return torch_figures(original_logits, got, text.ids)

    return figures


@pytest.mark.parametrize("phase", Phase)
def test_figures_equal_those_of_transformers_and_torch(qualities, wanted, phase):
    quality = qualities["int4"]
    found, (reference, perplexity, mean_kl, p99_kl, agreement) = quality.phases[phase.value], wanted(phase)
    assert quality.reference_perplexity == pytest.approx(reference, rel=PERPLEXITY_TOLERANCE)
    assert found.perplexity == pytest.approx(perplexity, rel=PERPLEXITY_TOLERANCE)
    assert found.mean_kl == pytest.approx(mean_kl, abs=KL_TOLERANCE)
    assert found.p99_kl == pytest.approx(p99_kl, abs=10 * KL_TOLERANCE)
    assert found.top1_agreement == pytest.approx(agreement, abs=1 / quality.positions)


def test_tokens_scored_one_too_early_exceed_the_tolerances(qualities, model, text, original_logits):
    got = np.stack([model.runner.logits(row) for row in text.ids.tolist()])
    shifted = np.roll(text.ids, -1, axis=1)
    reference, perplexity, *_ = torch_figures(original_logits, got, shifted)
    found = qualities["int4"]
    assert abs(found.reference_perplexity / reference - 1) > PERPLEXITY_TOLERANCE
    assert abs(found.phases["prefill"].perplexity / perplexity - 1) > PERPLEXITY_TOLERANCE


def test_windows_do_not_overlap_and_lose_their_first_token(text, text_file, model, qualities):
    whole = model.tokenizer.encode(text_file.read_text(encoding="utf-8"), add_special_tokens=False)
    pieces = {tuple(whole[start : start + WINDOW]) for start in range(0, len(whole), WINDOW)}
    rows = [tuple(row) for row in text.ids.tolist()]
    assert len(set(rows)) == WINDOWS
    assert set(rows) <= pieces
    assert qualities["int4"].positions == WINDOWS * (WINDOW - 1)
    assert (qualities["int4"].window, qualities["int4"].text) == (WINDOW, "validation.txt")
    assert len(qualities["int4"].sha256) == 64


def test_each_path_is_fed_as_it_runs(model, text, monkeypatch):
    calls = []
    run = model.runner.session.run
    monkeypatch.setattr(model.runner.session, "run", lambda batch: calls.append(batch) or run(batch))
    few = dataclasses.replace(text, ids=text.ids[:2])
    evaluate(model, few)
    prefill = [call for call in calls if call.phase is Phase.PREFILL]
    decode = [call for call in calls if call.phase is Phase.DECODE]
    assert [call.input_ids.shape for call in prefill] == [(1, WINDOW - 1)] * 2
    assert [call.input_ids.shape for call in decode] == [(1, 1)] * 2 * (WINDOW - 1)
    assert [call.past_lengths[0] for call in decode] == [*range(WINDOW - 1)] * 2  # from an empty cache each


def test_full_precision_matches_to_the_last_greedy_token(qualities):
    assert qualities["fp32"].greedy_match == qualities["fp32"].greedy_tokens == 16
    assert 0 <= qualities["int4"].greedy_match < 16


def test_windows_fit_a_short_context_by_themselves(bundles, text_file):
    with load(bundles["int4"], max_context=50) as model:
        assert read_windows(text_file, model).ids.shape[1] == 50


def test_a_reference_of_another_model_is_refused(model, text, tiny_export, monkeypatch):
    other = dataclasses.replace(model.manifest.source, fingerprint="0" * 64)
    monkeypatch.setattr(model, "manifest", dataclasses.replace(model.manifest, source=other))
    with pytest.raises(UsageError, check=about("reference")):
        evaluate(model, text, reference=tiny_export)


@dataclasses.dataclass(frozen=True)
class Bound:
    """Largest relative change of the perplexity, and largest mean KL in nats, that a path may cost."""

    perplexity: float
    kl: float


# Measured on windows of 256: mean KL 0.0006 and 0.0002 in int8; in int4, which is not calibrated here, 0.0006 through
# prefill, whose body has 8 bits, and 0.013 through decode.
BOUNDS = {
    ("int8", "prefill"): Bound(0.01, 0.0012),
    ("int8", "decode"): Bound(0.01, 0.0012),
    ("int4", "prefill"): Bound(0.01, 0.0012),
    ("int4", "decode"): Bound(0.04, 0.02),
    ("fp32", "prefill"): Bound(1e-5, 1e-8),
    ("fp32", "decode"): Bound(1e-5, 1e-8),
}


def within(quality: Quality, phase: str, bound: Bound) -> bool:
    path = quality.phases[phase]
    change = abs(path.perplexity / quality.reference_perplexity - 1)
    return change <= bound.perplexity and path.mean_kl <= bound.kl


@pytest.mark.parametrize(("name", "phase"), BOUNDS)
def test_a_bundle_stays_close_to_the_unquantized_model(qualities, name, phase):
    assert within(qualities[name], phase, BOUNDS[name, phase]), qualities[name].phases[phase]


def rescale(folder: Path, name: str, factor: float) -> None:
    """Multiply the scales of a linear of the decode graph: a small error, yet an error."""
    graph = ir.load(folder / read_bundle(folder).graphs["decode"].file).graph
    [tensor] = [v.const_value for k, v in graph.initializers.items() if name in k and k.endswith(".scales")]
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(tensor.offset)
        file.write((tensor.numpy() * np.float32(factor)).tobytes())


@pytest.mark.parametrize(("name", "factor"), [("int8", 1.3), ("int4", 1.6)])
def test_a_planted_error_exceeds_the_bounds(bundles, text, tiny_export, tmp_path, name, factor):
    folder = shutil.copytree(bundles[name], tmp_path / name)
    rescale(folder, "layers.2.self_attn.o_proj", factor)
    with load(folder, threads=1, self_test=False) as model:
        quality = evaluate(model, text, reference=tiny_export, greedy=False).quality
    assert not within(quality, "decode", BOUNDS[name, "decode"])
    assert math.isfinite(quality.perplexity)


def test_a_bundle_that_computes_nan_is_refused(split_bundle, text, tmp_path):
    folder = shutil.copytree(split_bundle, tmp_path / "nan")
    rescale(folder, "layers.2.self_attn.o_proj", float("nan"))
    few = dataclasses.replace(text, ids=text.ids[:1])
    with (
        load(folder, threads=1, self_test=False) as model,
        pytest.raises(BundleError, match="decode path computes NaN"),
    ):
        evaluate(model, few)
