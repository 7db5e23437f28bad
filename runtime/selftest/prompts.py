"""Golden prompts: the logits after each, and the tokens that they choose."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenPrompt
from llmc.errors import BundleError
from llmc.runtime.api.request import Request
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.selftest.values import VerifyReport, corrupt, differs

# Decode steps behind the start of a long golden prompt, and after it.
LONG_STEPS = 32


def _check(model: Any, case: GoldenPrompt, number: int) -> None:
    """Refuse a case that no build wrote: the manifest is not hashed, and NaN, for one, would compare as a near tie."""
    ids = (*case.prompt, *case.tokens, *case.top_ids)
    numbers = (*case.margins, *case.top_logits)
    sound = (
        len(case.prompt) > 0
        and len(case.tokens) == len(case.margins) > 0
        and len(case.top_ids) == len(case.top_logits) > 0
        and all(0 <= token < model.manifest.geometry.vocab_size for token in ids)
        and all(map(math.isfinite, numbers))
        and len(case.prompt) + len(case.tokens) <= model.runner.max_context
    )
    if not sound:
        raise corrupt(model.folder, f"prompt {number}")


def _first_logits(model: Any, case: GoldenPrompt) -> float:
    """Largest difference between the top logits after the prompt and the recorded ones."""
    recorded = np.array(case.top_logits, np.float32)
    tolerance = model.manifest.golden_tolerance
    # As views that the next call overwrites, so look at one after the other.
    differences = []
    for logits in _ways(model, case):
        difference = float(np.abs(logits[list(case.top_ids)] - recorded).max())
        # NaN compares false with everything, so ask for what must hold.
        if not difference <= tolerance:
            raise differs(model, f"logits differ by {difference:.3g} from those")
        differences.append(difference)
    return differences[0]


def _ways(model: Any, case: GoldenPrompt) -> Iterator[NDArray[np.float32]]:
    """Logits [V] after the prompt: fed alone, and, where prompts may share a call, beside a shorter one; of a long
    one also with its last tokens in decode steps."""
    runner, prompt = model.runner, case.prompt
    yield runner.prefill(prompt)[0, -1]
    if len(prompt) > 2 * LONG_STEPS:
        *_, logits = decode_tokens(runner, prompt, LONG_STEPS)
        yield logits
    shares = runner.session.packs_rows and model.manifest.limits.max_batch > 1
    if shares and 1 < len(prompt) <= runner.prefill_chunk // 2:
        yield runner.prefill_beside(prompt[: len(prompt) // 2], prompt)


def decode_tokens(runner: Any, prompt: Sequence[int], count: int) -> Iterator[NDArray[np.float32]]:
    """Feed a prompt with its last ``count`` tokens one by one; the logits [V] after each of these, as views."""
    start = len(prompt) - count
    runner.prefill(prompt[:start])
    for position in range(start, len(prompt)):
        yield runner.step(prompt[position], position)[0, -1]


def answer_greedily(model: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The ``count`` tokens after a prompt that the logits alone choose, whatever the checkpoint's defaults are."""
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    tokens: tuple[int, ...] = model.submit(Request(prompt, params)).result().token_ids
    return tokens


def _same_tokens(model: Any, case: GoldenPrompt, tokens: tuple[int, ...]) -> int:
    """Count the greedy tokens that equal the recorded ones, up to a near tie that was decided differently."""
    answer = answer_greedily(model, case.prompt, len(tokens))
    for i, (here, there, margin) in enumerate(zip(answer, tokens, case.margins, strict=False)):
        if here != there and margin > 2 * model.manifest.golden_tolerance:
            raise BundleError(
                f"greedy token {i} of a golden prompt is {here}, {there} was recorded with a lead of {margin:.3g}",
                "this machine computes something else: build the bundle on it",
                path=model.folder,
            )
        if here != there:
            return i
    return len(tokens)


def replay_prompts(
    model: Any, progress: Callable[[str], None], limit: int | None, count: int | None, long: bool
) -> VerifyReport:
    """See :func:`llmc.runtime.selftest.replay`; ``count`` of the prompts are run."""
    cases = tuple(case for case in model.manifest.golden if long or len(case.prompt) <= 2 * LONG_STEPS)
    if not cases:
        raise BundleError("the manifest has no golden prompts", "build the bundle again", path=model.folder)
    largest, equal, compared = 0.0, 0, 0
    for number, case in enumerate(cases, 1):
        _check(model, case, number)
    chosen = sorted(cases, key=lambda case: len(case.prompt))[:count] if count else cases
    for number, case in enumerate(chosen, 1):
        progress(f"golden prompt {number} of {len(chosen)}")
        largest = max(largest, _first_logits(model, case))
        wanted = case.tokens[:limit]
        compared += len(wanted)
        equal += _same_tokens(model, case, wanted)
    return VerifyReport(len(model.manifest.files), len(chosen), compared, equal, largest)
