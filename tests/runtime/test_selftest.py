"""Verification finds what was changed or is computed otherwise, and forgives what another CPU rounds otherwise."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.plans import PLAN, plan_of

from llmc.bundle import LARGEST_TOLERANCE, GoldenPrompt, read_bundle, write_manifest
from llmc.errors import BundleError
from llmc.publish import file_entries
from llmc.runtime import Model, load, selftest
from llmc.runtime.loading import verify
from llmc.runtime.selftest import replay
from llmc.runtime.selftest.values import LOGIT_TOLERANCE, VerifyReport

BEYOND = 1.2 * LOGIT_TOLERANCE


@pytest.fixture
def copied_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1) as model:
        yield model


def record(model: Model, **changes: Any) -> GoldenPrompt:
    """Pretend that the bundle recorded something else for its first golden prompt."""
    case = replace(model.manifest.golden[0], **changes)
    model.manifest = replace(model.manifest, golden=(case, *model.manifest.golden[1:]))
    return case


def other_token(case: GoldenPrompt, at: int) -> tuple[int, ...]:
    return (*case.tokens[:at], case.tokens[at] + 1, *case.tokens[at + 1 :])


# -------------------------------------------------------------------------------------------------------------- files


def test_a_sound_bundle_is_reported_with_what_was_checked(tiny_bundle: Path):
    manifest, steps = read_bundle(tiny_bundle), []
    report = verify(tiny_bundle, threads=1, progress=steps.append)
    tokens = sum(len(case.tokens) for case in manifest.golden)
    assert (report.files, report.prompts, report.tokens) == (len(manifest.files), len(manifest.golden), tokens)
    assert 0 < report.equal_tokens <= tokens
    assert report.largest_difference == 0  # the very calls that were recorded, here
    assert steps == [
        *(f"hashed {name}" for name in manifest.files),
        *(f"golden prompt {i} of {report.prompts}" for i in range(1, report.prompts + 1)),
    ]


# ------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize(("quarter", "tolerance"), [(1, LOGIT_TOLERANCE), (3, LARGEST_TOLERANCE)])
def test_wrong_weights_whose_hash_is_right_are_found_by_the_logits(copied_bundle: Path, quarter: int, tolerance: float):
    """The planted error: were the tolerance too wide, this would pass. The layers of one quarter move logits by 1.8,
    the last quarter, with the head, by more than the widest tolerance."""
    weights = copied_bundle / "weights.bin"
    content = bytearray(weights.read_bytes())
    size = len(content) // 4
    content[quarter * size : (quarter + 1) * size] = bytes(size)
    weights.write_bytes(content)
    manifest = read_bundle(copied_bundle)
    files = manifest.files | file_entries(copied_bundle, ["weights.bin"])
    write_manifest(replace(manifest, files=files, golden_tolerance=tolerance), copied_bundle)
    with pytest.raises(
        BundleError, match=rf"logits differ by .* at most {tolerance} is expected; .*: build the bundle on"
    ):
        verify(copied_bundle, threads=1)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("error", [BEYOND, -BEYOND])
def test_one_logit_beyond_the_tolerance_fails(model: Model, place: int, error: float):
    logits = list(model.manifest.golden[0].top_logits)
    logits[place] += error
    record(model, top_logits=tuple(logits))
    with pytest.raises(BundleError, match=r"logits differ by 0\.\d+ from those recorded"):
        replay(model)


def test_a_prompt_that_shares_a_call_has_to_come_to_the_same(split_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    with load(split_bundle, threads=1) as model:
        runner = model.runner
        if not runner.session.packs_rows:
            pytest.skip("no prompts share a call here")
        beside = runner.prefill_beside

        def spoilt(other: Any, prompt: Any) -> np.ndarray:
            return beside(other, prompt) + np.float32(BEYOND)

        monkeypatch.setattr(runner, "prefill_beside", spoilt)
        with pytest.raises(BundleError, match="logits differ by"):
            replay(model)


# ------------------------------------------------------------------------------------------------------------- tokens


def test_another_token_where_the_first_choice_led_clearly_fails(model: Model):
    case = record(model, margins=(9.0,) * len(model.manifest.golden[0].margins))
    record(model, tokens=other_token(case, 3))
    with pytest.raises(
        BundleError, match=rf"greedy token 3 .* is {case.tokens[3]}, {case.tokens[3] + 1} .* lead of 9;"
    ):
        replay(model)


def test_defaults_of_the_checkpoint_change_no_golden_prompt(model: Model):
    first = model.manifest.golden[0].tokens
    defaults = {"repetition_penalty": 100.0, "banned_tokens": first, "do_sample": True}
    model.manifest = replace(model.manifest, generation=replace(model.manifest.generation, **defaults))
    report = replay(model)
    assert report.equal_tokens == report.tokens
    assert model.generate(model.manifest.golden[0].prompt, max_tokens=1, temperature=0).token_ids[0] not in first


def test_another_token_at_a_near_tie_passes_and_what_follows_is_not_judged(model: Model):
    margins = list((9.0,) * len(model.manifest.golden[0].margins))
    margins[3] = 1.9 * LOGIT_TOLERANCE  # both choices may be off by the tolerance, one up and one down
    case = record(model, margins=tuple(margins))
    everything = replay(model).tokens
    case = record(model, tokens=other_token(case, 3))
    record(model, tokens=other_token(case, 7))
    assert replay(model).equal_tokens == everything - (len(case.tokens) - 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ()},
        {"prompt": (99999,)},
        {"prompt": (5,) * 3000},
        {"tokens": (), "margins": ()},
        {"margins": ()},
        {"margins": (float("nan"),) * 16},
        {"top_ids": (99999,) * 10},
        {"top_ids": (), "top_logits": ()},
        {"top_logits": (1.0, 2.0)},
        {"top_logits": (float("nan"),) * 10},
    ],
    ids=lambda changes: " ".join(f"{name}:{len(value)}" for name, value in changes.items()),
)
def test_a_golden_prompt_that_makes_no_sense_is_corrupt(model: Model, changes: dict[str, Any]):
    """The manifest itself has no hash, and NaN margins would pass as near ties."""
    record(model, **changes)
    with pytest.raises(BundleError, match="golden prompt 1 of the manifest is corrupt; build the bundle again"):
        replay(model)


# ------------------------------------------------------------------------------------------------------------ at load


@pytest.fixture
def replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """With a cache of its own: the limits of all replays from here on."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    limits: list[int | None] = []

    def counted(*arguments: Any, limit: int | None = None, **named: Any) -> VerifyReport:
        limits.append(limit)
        return replay(*arguments, limit=limit, **named)

    monkeypatch.setattr(selftest, "replay", counted)
    return limits


def loaded(folder: Path, wanted: bool | None = None) -> None:
    load(folder, threads=1, self_test=wanted).close()


def test_the_first_load_tests_and_later_ones_remember(tiny_bundle: Path, replays: list[int | None]):
    loaded(tiny_bundle)
    assert replays == [selftest.QUICK_TOKENS]
    loaded(tiny_bundle)
    assert len(replays) == 1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_first_load_of_an_engine_on_its_gpu_replays_all_that_was_recorded(
    model: Model, replays: list[int | None], on_gpu: bool
):
    memory = plan_of() if on_gpu else None  # there is none while its graph runs on the CPU
    model.manifest = replace(model.manifest, engine=PLAN, device=memory)
    selftest.check_once(model, None)
    assert replays == [None if on_gpu else selftest.QUICK_TOKENS]


def test_the_first_load_replays_the_shortest_prompt_alone(copied_bundle: Path, replays: list[int | None]):
    """Unless it is asked for: then the damaged record of a longer one is found."""
    manifest = read_bundle(copied_bundle)
    shortest, *longer = sorted(manifest.golden, key=lambda case: len(case.prompt))
    wrong = [replace(case, top_logits=tuple(x + 9 for x in case.top_logits)) for case in longer]
    write_manifest(replace(manifest, golden=(*wrong, shortest)), copied_bundle)
    loaded(copied_bundle)
    with pytest.raises(BundleError, match="logits differ"):
        loaded(copied_bundle, True)
    far = tuple(logit + 9 for logit in shortest.top_logits)
    write_manifest(replace(manifest, golden=(replace(shortest, top_logits=far),)), copied_bundle)
    with pytest.raises(BundleError, match="logits differ"):
        loaded(copied_bundle)


def test_another_bundle_engine_or_processor_is_tested_anew(
    copied_bundle: Path, replays: list[int | None], monkeypatch: pytest.MonkeyPatch
):
    loaded(copied_bundle)
    write_manifest(replace(read_bundle(copied_bundle), golden_tolerance=0.3), copied_bundle)
    loaded(copied_bundle)
    monkeypatch.setattr("llmc.runtime.sessions.onnxruntime.cpu.cpu_model", lambda: "another")
    loaded(copied_bundle)
    monkeypatch.setattr(selftest, "cpu_flags", lambda: ["another"])
    loaded(copied_bundle)
    assert len(replays) == 4
