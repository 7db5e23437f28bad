"""What a build records is what replaying computes, to the bit, and the tolerance follows from what calls differ by."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.bundle import LARGEST_TOLERANCE, read_bundle, write_manifest
from llmc.errors import BuildError, BundleError, MissingExtraError, ResourceError
from llmc.optimize.build import build
from llmc.optimize.judge import replay as apart
from llmc.optimize.judge.golden import LONG_PROMPT, Golden, run_golden_prompts, run_long_prompt, tolerance
from llmc.optimize.judge.replay import replay_apart
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, load
from llmc.runtime.selftest import replay
from llmc.runtime.selftest.prompts import LONG_STEPS
from llmc.runtime.selftest.values import LOGIT_TOLERANCE
from llmc.runtime.sessions import Batch
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession

# Of a logit, per new token of a call. A prompt of the tests has about 20 tokens, 15 more follow.
SKEW = 0.02


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1, self_test=False) as model:
        yield model


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that round otherwise for calls of another size: the more new tokens, the larger every other logit."""
    run = OnnxRuntimeSession.run

    def skewed_run(session: OnnxRuntimeSession, batch: Batch) -> np.ndarray:
        logits = run(session, batch).copy()
        logits[..., ::2] += SKEW * batch.input_ids.size
        return logits

    monkeypatch.setattr(OnnxRuntimeSession, "run", skewed_run)


def recorded(model: Model, golden: Golden) -> None:
    """The model as if it had been built with these golden prompts."""
    limit = tolerance(LOGIT_TOLERANCE, golden.spread)
    model.manifest = replace(model.manifest, golden=golden.cases, golden_tolerance=limit)


@pytest.mark.usefixtures("skewed")
def test_where_calls_of_other_sizes_differ_by_more_than_the_least_tolerance_the_replay_is_equal_to_the_bit(
    model: Model, tiny_export: Path
):
    golden = run_golden_prompts(model, tiny_export)
    assert golden.spread > LOGIT_TOLERANCE
    recorded(model, golden)
    assert replay(model).largest_difference == 0
    chosen = [case.top_ids[0] for case in golden.cases]
    assert chosen == [case.tokens[0] for case in golden.cases]


def test_the_spread_is_the_largest_difference_between_calls_and_planted_ones_show(
    model: Model, tiny_export: Path, request: pytest.FixtureRequest
):
    alone = run_golden_prompts(model, tiny_export).spread
    request.getfixturevalue("skewed")
    longest = max(len(case.prompt) for case in model.manifest.golden)
    wanted = SKEW * (longest - 1)  # a whole prompt beside one token
    assert run_golden_prompts(model, tiny_export).spread == pytest.approx(wanted, abs=alone + 0.01)


def test_a_long_prompt_is_fed_in_chunks_and_in_steps_and_an_error_of_far_steps_shows(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    [case] = run_long_prompt(model)
    assert (len(case.prompt), len(case.tokens)) == (LONG_PROMPT, LONG_STEPS)
    assert LONG_PROMPT - LONG_STEPS >= 1024
    model.manifest = replace(model.manifest, golden=(case,))
    assert replay(model).equal_tokens == LONG_STEPS
    with pytest.raises(BundleError, match="no golden prompts"):
        replay(model, long=False)
    run = OnnxRuntimeSession.run

    def forgetful(session: OnnxRuntimeSession, batch: Batch) -> np.ndarray:
        logits = run(session, batch)
        far = batch.input_ids.size == 1 and batch.past_lengths.max() > 1024
        return logits + 2 * LOGIT_TOLERANCE * (np.arange(logits.shape[-1]) % 2) if far else logits

    monkeypatch.setattr(OnnxRuntimeSession, "run", forgetful)
    with pytest.raises(BundleError, match=r"logits differ by 0\.5"):
        replay(model)


@pytest.mark.parametrize(("context", "length"), [(2048, LONG_PROMPT), (256, 224), (64, 32), (56, None)])
def test_a_long_prompt_is_as_long_as_the_context_allows(model: Model, context: int, length: int | None):
    model.runner.max_context = context
    assert [len(case.prompt) for case in run_long_prompt(model)] == ([length] if length else [])


@pytest.mark.parametrize(("spread", "wanted"), [(0.0, 0.25), (0.12, 0.25), (0.3, 0.6), (9.0, LARGEST_TOLERANCE)])
def test_the_tolerance_is_twice_the_spread_within_its_bounds(spread: float, wanted: float):
    assert tolerance(LOGIT_TOLERANCE, spread) == pytest.approx(wanted)


# ------------------------------------------------------------------------------------------- in a process of its own


ANSWER = apart._answer  # which the tests have in their own process otherwise


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_answer", ANSWER)


@pytest.mark.usefixtures("own_process")
def test_a_finished_bundle_is_replayed_by_another_process_which_finds_a_planted_error(
    tiny_bundle: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "finished"))
    replay_apart(folder)
    manifest = read_bundle(folder)
    case = manifest.golden[0]
    wrong = tuple(logit + 1.2 * LARGEST_TOLERANCE for logit in case.top_logits)
    planted = replace(case, top_logits=wrong)
    write_manifest(replace(manifest, golden=(planted, *manifest.golden[1:])), folder)
    with pytest.raises(
        BuildError, match=r"loads the finished bundle refuses it \(logits differ by .*; nothing was publ"
    ):
        replay_apart(folder)


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", ResourceError, "was killed, as happens when memory runs out; nothing"),
        ("import os; os.abort()", BuildError, r"ended with -6 \(without a word\); nothing was published"),
        ("raise SystemExit('no room')", BuildError, r"ended with 1 \(no room\); nothing was published"),
        ("""print('["ResourceError", "8 GB are needed"]')""", ResourceError, "^8 GB are needed$"),
        ("""print('["MissingExtraError", "install it"]')""", MissingExtraError, "^install it$"),
    ],
    ids=["killed", "aborted", "another error", "no memory", "no engine"],
)
def test_the_end_of_that_process_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception], words: str
):
    monkeypatch.setattr(apart, "CODE", code)
    with pytest.raises(error, match=words):
        replay_apart(tmp_path)


def test_a_bundle_that_its_own_machine_refuses_is_not_published(
    source: Path, untouched: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(apart, "_answer", lambda folder, emulate: ("BundleError", "logits differ by 9"))
    with pytest.raises(BuildError, match=r"refuses it \(logits differ by 9\)"):
        build(BuildRequest(source, untouched, force=True))
