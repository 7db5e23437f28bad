"""Models with recurrent layers go the whole way: built, served at every level, continued from states that were kept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.speculators import Always

from llmc.bundle import read_bundle
from llmc.errors import UsageError
from llmc.optimize.build import build
from llmc.runtime import Model, load

NAMES = (
    *("qwen3_5-delta-and-gates", "lfm2-short-convolutions", "nemotron_h-one-part-per-layer"),
    "falcon_h1-both-mixers-multipliers",
)
GENERATOR = np.random.default_rng(3)
PROMPTS = [GENERATOR.integers(2, 96, length).tolist() for length in (40, 7, 70, 33)]
NEW = 8
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=NAMES)
def hybrid(request: pytest.FixtureRequest, exported: Callable[[str], Any]) -> Any:
    return exported(request.param)


@pytest.fixture(scope="module")
def bundle(hybrid: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "bundle"
    build(hybrid.export, folder, precision="fp32", max_context=128, max_batch=4)
    return folder


@pytest.fixture(scope="module")
def answers(hybrid: Any) -> list[tuple[int, ...]]:
    """What transformers answers greedily."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(hybrid.reference(np.array([ids]))[0, -1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


def generate(model: Model, prompt: list[int]) -> tuple[int, ...]:
    return model.generate(prompt, **GREEDY).token_ids


@pytest.mark.parametrize("level", ["fast", "batch", "strict"])
def test_answers_in_chunks_and_beside_others_are_those_of_transformers(
    bundle: Path, answers: list[tuple[int, ...]], level: str
):
    with load(bundle, determinism=level, prefill_chunk=16) as model:
        assert [generate(model, prompt) for prompt in PROMPTS] == answers
        handles = [model.stream(prompt, **GREEDY) for prompt in PROMPTS]
        assert [handle.result().token_ids for handle in handles] == answers


def test_the_next_turn_goes_on_from_kept_states_also_after_a_restart(bundle: Path, tmp_path: Path):
    with load(bundle, prefix_cache_bytes=0) as model:
        first = generate(model, PROMPTS[2])
        turn = [*PROMPTS[2], *first, *PROMPTS[1]]
        wanted, other = generate(model, turn), generate(model, [*PROMPTS[2][:31], *PROMPTS[3]])
    with load(bundle, prefix_cache_folder=str(tmp_path)) as model:
        generate(model, PROMPTS[2])
        result = model.generate(turn, **GREEDY)
        assert (result.token_ids, result.usage.cached_tokens) == (wanted, 32)
        result = model.generate([*PROMPTS[2][:31], *PROMPTS[3]], **GREEDY)
        assert (result.token_ids, result.usage.cached_tokens) == (other, 0)
    with load(bundle, prefix_cache_folder=str(tmp_path)) as model:
        result = model.generate(turn, **GREEDY)
        assert (result.token_ids, result.usage.cached_tokens) == (wanted, 64)


def test_samples_and_beams_copy_states(bundle: Path):
    with load(bundle, max_context=128) as model:
        alone = [model.generate(PROMPTS[0], max_tokens=6, temperature=1, seed=seed).token_ids for seed in (7, 8)]
        together = model.generate(PROMPTS[0], max_tokens=6, temperature=1, seed=7, n=2)
        assert together.outputs[0].token_ids == alone[0]
        beams = {"max_tokens": 6, "num_beams": 3, "num_return_sequences": 3, "ignore_eos": True}
        found = model.generate(PROMPTS[3], **beams)
        handles = [model.stream(PROMPTS[3], **beams), model.stream(PROMPTS[1], **GREEDY)]
        assert [o.token_ids for o in handles[0].result().outputs] == [o.token_ids for o in found.outputs]


def test_a_state_is_planned_once_for_each_row(bundle: Path):
    manifest = read_bundle(bundle)
    states = [cache for cache in manifest.geometry.caches if cache.kind == "state"]
    assert states and manifest.memory.state == sum(4 * int(np.prod(cache.shape)) for cache in states)
    short, long = (manifest.memory.parts(length, 2)["cache"] for length in (1, 101))
    assert long - short == 200 * manifest.memory.cache_per_token
    assert short == 2 * (manifest.memory.state + manifest.memory.cache_per_token)
    assert manifest.target.engine_minimum == "1.32"


class Foresight:
    """Drafts what comes, of which every third token is another one."""

    costs_by_token = False

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        length = len(tokens)
        text = next((text for text in self._texts if text[:length] == list(tokens)), [])
        return [token if place % 3 else (token + 1) % 96 for place, token in enumerate(text[length:], length)][:count]

    def forget(self, key: int) -> None: ...

    def close(self) -> None: ...


def test_rejected_drafts_leave_states_as_they_were(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    with load(bundle, prefix_cache_bytes=0) as model:
        wanted = [generate(model, prompt) for prompt in PROMPTS]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    monkeypatch.setattr("llmc.runtime.model.make_drafter", lambda *_: Foresight(texts))
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    with load(bundle, prefix_cache_bytes=0, draft="lookup") as model:
        results = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
        assert [result.token_ids for result in results] == wanted
        assert all(0 < result.metrics.accepted < result.metrics.drafted for result in results)
        handles = [model.stream(prompt, **GREEDY) for prompt in PROMPTS]
        assert [handle.result().token_ids for handle in handles] == wanted


def test_other_targets_are_refused_by_name(hybrid: Any, tmp_path: Path):
    with pytest.raises(UsageError, match=r"recurrent layers .* are lowered for cpu alone"):
        build(hybrid.export, tmp_path / "bundle", target="cuda")


def test_int8_and_int4_stay_near_the_unquantized_model(hybrid: Any, tmp_path: Path):
    """Random weights: a layer that reads another one's integers or states makes a KL above one."""
    for precision, bound in (("int8", 0.1), ("int4", 2.0)):
        report = build(hybrid.export, tmp_path / precision, precision=precision, max_context=64)
        assert report.manifest.quality is not None
        for phase in report.manifest.quality.phases.values():
            assert phase.mean_kl < bound
