"""Bundles of diffusion models: one graph, calibrated and judged on texts of which half is masks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import diffusing
from doubles.geometries import uniform

from llmc.bundle import Budget, read_bundle
from llmc.bundle.model.diffusion import Diffusion
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.diffusion import find_targets, hide_half
from llmc.optimize.judge.layers import layer_errors
from llmc.optimize.judge.reference import Reference
from llmc.optimize.recipe import BuildRequest, Request
from llmc.runtime.loading import load, verify

# Of logits in float32, as in tests/export/test_diffusion.py.
LOGIT_TOLERANCE = 4e-4
# Mean KL in nats of these random models, whose logits are wide: 0.04 (LLaDA, int8) and 3.0 (Dream, int4) were measured,
# and 3.8 of a Llama with LLaDA's weights in int4. A causal mask makes it 9.1 and 6.8.
KL = {"int8": 0.1, "int4": 4.5}
# Decibels that each layer keeps in 8 bits: 27 at least were measured, as of that Llama. One that sees others has none.
LEAST = 20
IDS = np.random.default_rng(1).integers(4, diffusing.VOCAB, (2, 30))


@pytest.mark.parametrize("family", diffusing.SHIFTS)
def test_the_reference_sees_all_tokens_of_a_text_and_no_padding(family: str, diffusion_models: Path):
    texts = [IDS[0].tolist(), IDS[1, :11].tolist()]
    reference = Reference(diffusion_models / f"{family}-export")
    for normed, text in zip(reference.compute_normed(texts), texts, strict=True):
        wanted = diffusing.Transformers(diffusion_models / family)(text)
        assert np.abs(reference.project(normed) - wanted).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize(("family", "precision"), [("llada", "int8"), ("Dream", "int4")])
def test_integers_stay_close_to_the_model(family: str, precision: str, diffusion_models: Path, tmp_path: Path):
    export = diffusion_models / f"{family}-export"
    budget, calibration = Budget(max_kl=KL[precision]), {"decoder": StreamedDecoder, "samples": 2, "length": 32}
    made = build(BuildRequest(export, tmp_path / "b", precision=precision, budget=budget, **calibration)).manifest
    assert (made.recipe.phases, made.limits.prefill_chunk) == ("shared", made.limits.max_context)
    assert made.quality is not None and (made.quality.mean_kl or 9) < KL[precision]
    assert verify(tmp_path / "b").equal_tokens == sum(len(case.tokens) for case in made.golden)
    if precision == "int8":
        for error in layer_errors(tmp_path / "b", read_bundle(tmp_path / "b"), Reference(export), IDS[:1]):
            assert error.decibels > LEAST, error


def test_texts_are_judged_where_their_tokens_are_hidden():
    ids, plain = np.arange(10, 110), uniform("qwen2", 1, 64, 64, 2, 2, 16, 96, 128, False, (0,))
    masked = replace(plain, diffusion=Diffusion(3, 1))
    fed = hide_half(ids, masked)
    rows, targets = find_targets(ids, fed, masked)
    assert 30 < len(rows) < 70 and (targets == ids[rows + 1]).all() and (fed[rows + 1] == 3).all()
    assert (hide_half(ids, plain) == ids).all()


def test_two_graphs_and_a_cache_of_halves_give_the_same_tokens(diffusion_models: Path, tmp_path: Path):
    recipe = Request(precision="int8", phases="split", cache="float16")
    build(BuildRequest(diffusion_models / "llada-export", tmp_path / "split", recipe=recipe))
    build(BuildRequest(diffusion_models / "llada-export", tmp_path / "shared", recipe=Request(precision="int8")))
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with load(tmp_path / "split") as split, load(tmp_path / "shared") as shared:
        assert split.generate([5, 6], **options).token_ids == shared.generate([5, 6], **options).token_ids
