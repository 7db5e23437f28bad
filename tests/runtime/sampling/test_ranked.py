"""What is chosen from the most probable tokens is what the whole row of logits gives, or the row is asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.errors import NonFiniteError
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.ranked import Ranked
from llmc.runtime.sampling.samplers import Sampler, make_sampler

SIZE, COUNT = 3000, 256
DRAWS = 12  # positions, and as many draws
# Sums of 3,000 in float32 against those in float64: 2e-7 here. A candidate that is missing costs more than 1e-4.
LOGPROB_TOLERANCE = 2e-6
GENERATOR = np.random.default_rng(5)


def spread(scale: float) -> Logits:
    return (GENERATOR.standard_normal(SIZE) * scale).astype(np.float32)


def rounded(scale: float, step: float) -> Logits:
    """With many ties, as float16 and a softcap make them."""
    return (np.round(spread(scale) / step) * step).astype(np.float32)


def few_possible() -> Logits:
    row = np.full(SIZE, -np.inf, np.float32)
    row[GENERATOR.choice(SIZE, 40, replace=False)] = spread(1.0)[:40]
    return row


ROWS: dict[str, Logits] = {
    "peaked": spread(6.0),
    "usual": spread(2.5),
    "flat": spread(0.5),
    "ties": rounded(2.5, 0.25),
    "a tie of 400 at the top": np.where(np.arange(SIZE) % 7 == 3, np.float32(9), np.minimum(spread(2.0), 8)),
    "a tie of two at the top": np.where(np.isin(np.arange(SIZE), (2900, 17)), np.float32(20), spread(2.0)),
    "a tie across the last candidate": np.where(np.arange(SIZE) % 11 < 9, np.float32(1), spread(1.0) + 2),
    "all equal": np.zeros(SIZE, np.float32),
    "40 possible": few_possible(),
    "far apart": (spread(1.0) * 1e37).astype(np.float32),
    "a small vocabulary": spread(2.0)[:200],
}
XTC: dict[str, Any] = {"xtc_probability": 0.7, "xtc_threshold": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{f"top_k {k}": {"top_k": k} for k in (1, 20, 255, 256, 1000)},
    **{f"top_p {p}": {"top_p": p} for p in (0.1, 0.5, 0.9, 0.999)},
    **{f"temperature {t}, top_p 0.8": {"temperature": t, "top_p": 0.8} for t in (0.3, 0.7, 1.3, 2.5)},
    **{f"top_k {k}, top_p 0.5": {"top_k": k, "top_p": 0.5} for k in (256, 257)},
    "cold": {"temperature": 1e-40, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "hot min_p": {"min_p": 0.02, "temperature": 1.5},
    "top_p and min_p": {"top_p": 0.99, "min_p": 0.05},
    "published for Qwen": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "all cuts": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "top_n_sigma": 2.0, **XTC},
    "late cuts": {"top_p": 0.7, "typical_p": 0.8, **XTC},
    "none": {},
    "temperature": {"temperature": 0.8},
    "typical_p": {"typical_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc": XTC,
    "mirostat": {"mirostat": 2},
    "penalty": {"repetition_penalty": 1.3, "top_k": 20},
    "ban": {"banned_tokens": tuple(range(0, 200, 2)), "temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "drawn logprobs": {"top_k": 20, "logprobs": 20},
}
# Of these rows and settings the candidates must be enough.
ENOUGH = [
    *((row, "greedy") for row in ROWS if row not in ("a tie of 400 at the top", "all equal")),
    *((row, name) for row in ("peaked", "usual", "far apart") for name in ("top_k 20", "published for Qwen", "min_p")),
    *(("usual", name) for name in ("top_k 255", "top_p 0.5", "temperature 0.3, top_p 0.8", "all cuts", "logprobs")),
    *(("peaked", name) for name in ("top_p 0.9", "temperature 0.7, top_p 0.8", "top_p and min_p", "late cuts", "cold")),
    ("40 possible", "top_p 0.9"),
    ("usual", "drawn logprobs"),
]


class Device:
    """A row that stays where it is until it is asked for. Of equal tokens any may be the first, and the last one."""

    def __init__(self, row: Logits) -> None:
        self.row = row
        self.fetched = 0

    def rank(self) -> Ranked:
        row = self.row.astype(np.float64)
        order = np.lexsort((GENERATOR.random(row.size), -row))[:COUNT]
        weights = np.exp((row - row.max()).astype(np.float32))
        return Ranked(order, self.row[order], float(weights.sum()), row.size, self.whole)

    def whole(self) -> Logits:
        self.fetched += 1
        return self.row


def sampler(size: int, settings: dict[str, Any], seed: int = 3) -> Sampler:
    params = SamplingParams(max_tokens=100, seed=seed, **settings)
    return make_sampler(SamplingContext(params, size, prompt_length=4, eos_token_ids=(5,)))


def choose(
    row: Logits, settings: dict[str, Any], change: Callable[[Ranked], Ranked] = lambda ranked: ranked
) -> tuple[list[Any], list[Any], int]:
    """Choices from the row, those from its candidates, and how often these were not enough."""
    whole, ranking, device = sampler(row.size, settings), sampler(row.size, settings), Device(row)
    tokens = [1, 2, 3, 4]
    found: tuple[list[Any], list[Any]] = [], []
    for _ in range(DRAWS):
        found[0].append(whole(row, tokens))
        found[1].append(ranking(change(device.rank()), tokens))
        tokens.append(found[0][-1].token)
    return *found, device.fetched


@pytest.mark.parametrize("row", ROWS)
def test_candidates_give_the_tokens_of_the_whole_row(row):
    for name, settings in SETTINGS.items():
        wanted, found, _ = choose(ROWS[row], settings)
        assert [choice.token for choice in found] == [choice.token for choice in wanted], name
        for choice, want in zip(found, wanted, strict=True):
            if want.logprobs is not None:
                assert [token for token, _ in choice.logprobs.top] == [token for token, _ in want.logprobs.top], name
                mine, whole = (
                    [it.logprob, *(logprob for _, logprob in it.top)] for it in (choice.logprobs, want.logprobs)
                )
                assert mine == pytest.approx(whole, abs=LOGPROB_TOLERANCE, rel=LOGPROB_TOLERANCE), name


def test_the_row_stays_on_the_gpu_where_candidates_decide():
    for row, name in ENOUGH:
        assert choose(ROWS[row], SETTINGS[name])[2] == 0, (row, name)


@pytest.mark.parametrize("name", ["none", "temperature", "typical_p", "xtc", "mirostat", "penalty", "ban"])
def test_requests_that_need_all_logits_say_so(name):
    assert not sampler(SIZE, SETTINGS[name]).takes_ranked
    assert choose(ROWS["usual"], SETTINGS[name])[2] == DRAWS


@pytest.mark.parametrize("name", ["greedy", "top_k 20", "top_p 0.9", "min_p", "published for Qwen"])
def test_requests_that_candidates_may_decide_say_so(name):
    assert sampler(SIZE, SETTINGS[name]).takes_ranked


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["greedy", "top_k 20", "top_p 0.9", "logprobs"])
def test_logits_that_are_not_finite_are_refused_as_in_the_whole_row(name, bad):
    row = ROWS["usual"].copy()
    row[1234] = bad
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError):
        sampler(SIZE, SETTINGS[name])(Device(row).rank(), [1])


def without_the_third(ranked: Ranked) -> Ranked:
    kept = np.arange(COUNT) != 2
    return replace(ranked, ids=ranked.ids[kept], values=ranked.values[kept])


def of_half_the_sum(ranked: Ranked) -> Ranked:
    return replace(ranked, total=ranked.total / 2)


def ids_in_turn(ranked: Ranked) -> Ranked:
    return replace(ranked, ids=np.roll(ranked.ids, 1))


PLANTED = [(without_the_third, "top_k 20"), (of_half_the_sum, "top_p 0.5"), (ids_in_turn, "greedy")]


@pytest.mark.parametrize(("plant", "name"), PLANTED)
def test_candidates_that_are_wrong_give_other_tokens(plant, name):
    wanted, found, _ = choose(ROWS["usual"], SETTINGS[name], plant)
    assert [choice.token for choice in found] != [choice.token for choice in wanted]


def test_a_nucleus_that_ends_within_the_error_of_the_sum_is_left_to_the_row():
    """Half of all weight is the first token's to 5e-7, so the sum's last digits decide whether a second one stays."""
    row = np.full(SIZE, np.float32(np.log(1 / (SIZE - 1))))
    row[7] = 1e-6
    _, _, fetched = choose(row, {"top_p": 0.5})
    assert fetched == DRAWS
