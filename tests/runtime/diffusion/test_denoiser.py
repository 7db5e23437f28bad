"""Masks become the tokens that the published rules make of them: see tests/doubles/diffusing.py."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import diffusing

from llmc.bundle.model.diffusion import Diffusion
from llmc.runtime import Model, SamplingParams, load
from llmc.runtime.diffusion.denoiser import Denoiser, measure_confidence

TOKENS = 50
# Each with a block that the tokens do not fill, or that they fill with too many steps.
SCHEDULES: dict[str, dict[str, Any]] = {
    "by default, all that are sure": {},
    "steps": {"diffusion_steps": 8},
    "steps that no block divides": {"diffusion_steps": 30, "block_length": 8},
    "a low threshold": {"confidence_threshold": 0.3},
    "a threshold in short blocks": {"confidence_threshold": 0.5, "block_length": 10},
}
NAMES = {"diffusion_steps": "steps", "confidence_threshold": "threshold"}
# Of shares of probabilities in float32, whose 4,096 terms add up to within 1e-6.
SHARE_TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=diffusing.SHIFTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, diffusion_models: Path) -> Iterator[Model]:
    with load(diffusion_models / f"{family}-fp32", threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_greedy_tokens_equal_the_rule(model, family, diffusion_models, schedule):
    asked = {NAMES.get(name, name): value for name, value in schedule.items()}
    rule = partial(
        diffusing.sample,
        *(diffusing.Plain(diffusion_models / family), diffusing.SHIFTS[family]),
        **(asked or {"threshold": 0.9}),
    )
    prompt = model.tokenizer.encode("import os\nx =")
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found = model.generate(prompt, **options, **schedule)
    assert list(found.token_ids) == rule(prompt, TOKENS)


def test_a_lower_threshold_takes_fewer_calls(model):
    asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    all_sure, unsure = (model.generate([5, 6, 7], confidence_threshold=it, **asked).metrics.calls for it in (1.0, 0.3))
    assert unsure < all_sure <= TOKENS


def test_a_wrong_shift_or_cache_would_be_noticed(family, diffusion_models):
    plain, shift = diffusing.Plain(diffusion_models / family), diffusing.SHIFTS[family]
    right = diffusing.sample(plain, shift, [5, 6, 7], TOKENS, threshold=0.9)
    assert right != diffusing.sample(plain, 1 - shift, [5, 6, 7], TOKENS, threshold=0.9)
    assert right != diffusing.sample(plain, shift, [5, 6, 7], TOKENS, threshold=0.9, cached=False)


def test_confidence_is_the_probability_of_the_token():
    row = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 4
    shares = np.exp(row.astype(np.float64) - row.max())
    assert measure_confidence(row, 9) == pytest.approx(shares[9] / shares.sum(), rel=SHARE_TOLERANCE)


def test_no_token_is_certain_that_others_could_be():
    row = np.zeros(4096, np.float32)
    row[9] = 30.0  # a sum in float32 loses the others
    doubt = 4095 * np.exp(-30.0)
    assert 1 - measure_confidence(row, 9) == pytest.approx(doubt, rel=SHARE_TOLERANCE)


def test_a_mask_is_never_chosen_and_logits_stay_as_they_are():
    denoiser = Denoiser(Diffusion(3, 0), SamplingParams(max_tokens=2, temperature=0), [5])
    logits = np.zeros((2, 8), np.float32)
    logits[:, 3], logits[:, 4] = 9.0, 1.0
    before = logits.copy()
    assert denoiser.window().outputs == [1, 2] and denoiser.take(logits) == []  # unsure, so one mask a step
    assert denoiser.window().outputs == [1] and denoiser.take(logits[1:]) == [4, 4]
    assert (logits == before).all()


def test_a_temperature_draws_as_often_as_the_distribution_says():
    logits = np.log(np.array([[0.5, 0.3, 0.2, 1e-9]], np.float32))
    drawn = []
    for seed in range(2000):
        params = SamplingParams(max_tokens=1, temperature=0.5, seed=seed)
        drawn += Denoiser(Diffusion(3, 0), params, [1]).take(logits.copy())
    wanted = np.array([0.25, 0.09, 0.04]) / 0.38  # squares, by the temperature
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    # Five standard deviations of a share of 2,000 draws.
    assert np.abs(shares - wanted).max() <= 5 * np.sqrt(0.25 / 2000)
