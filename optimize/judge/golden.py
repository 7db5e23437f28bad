"""The golden self-test: the bundle's answers and logits, compared with those of the unquantized model.

Logits are recorded by the calls that a replay makes. Calls of other shapes round differently; the tolerance for other
machines is a multiple of that measured difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import LARGEST_TOLERANCE, GoldenPrompt, Quality
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.errors import BundleError, RequestError
from llmc.optimize.calibrate.diffusion import find_targets, hide_half
from llmc.optimize.judge.quality import Float, Tally
from llmc.optimize.judge.reference import Reference
from llmc.optimize.progress import Progress, silent
from llmc.runtime import Generator, LoadedBundle
from llmc.runtime.selftest.prompts import LONG_STEPS, answer_greedily
from llmc.runtime.sessions import Batch, Phase

# Prose, code, another script and figures: enough to notice a wrong weight, and quick to replay.
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Deich. 東京は",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
PROMPT_TOKENS = 24
NEW_TOKENS = 16
# Tokens of the long prompt of TensorRT's targets, whose attention under a mask was measured wrong in float16 at 1,290
# positions (NVIDIA Model-Connect 785): what is decoded one by one, of it and after it, is beyond 1,024.
LONG_PROMPT = 1024 + 2 * LONG_STEPS
TOP_LOGITS = 10
TEXT = "golden prompts"  # the text's name in a quality report without a text

# Tolerance as a multiple of the measured difference between calls. In SmolLM2-135M with 4-bit weights in one graph that
# was 0.39, 0.61, 0.53 and 0.51, by prompt; other prompts may exceed the largest of these. Each of ten matrices that
# were zeroed one by one moved some logit by more than its double, 1.22.
SPREAD_FACTOR = 2.0
# Tokens of the pieces in which prompts are also fed: even, like the engine's.
PIECE = 8

Answered = tuple[list[int], tuple[int, ...]]  # a prompt and the tokens after it


@dataclass(frozen=True)
class Golden:
    """The cases of a self-test, the bundle's quality on them, and the largest difference between calls."""

    cases: tuple[GoldenPrompt, ...]
    spread: float
    quality: Quality


def tolerance(least: float, spread: float) -> float:
    """Largest difference of logits from the recorded ones, for calls that differ by ``spread`` on one machine."""
    return min(LARGEST_TOLERANCE, max(least, SPREAD_FACTOR * spread))


def run_golden_prompts(model: Generator, export: Path, progress: Progress = silent) -> Golden:
    """Run the golden prompts through the bundle and the unquantized model; perplexities are over the prompts alone."""
    progress("running the golden prompts")
    geometry, answered = model.manifest.geometry, greedy_answers(model)
    steps = not takes_whole_texts(geometry)
    reference, fed = Reference(export), list_fed(answered, steps)
    original, paths = Tally(), {phase: Tally() for phase in Phase}
    cases: list[GoldenPrompt] = []
    spreads: list[float] = []
    matches: list[int] = []
    normed = reference.compute_normed(fed, progress)
    for plain, (prompt, answer), ids, rows in zip(prompt_ids(model), answered, fed, normed, strict=True):
        wanted = reference.project(rows)
        got = {phase: path_logits(model, ids, phase) for phase in Phase}
        predicting, targets = find_targets(plain, ids, geometry)
        original.predict(wanted[predicting], targets)
        for phase, path in paths.items():
            path.predict(got[phase][predicting], targets)
            path.compare(wanted, got[phase])
        matches += [count_matching(answer, wanted[len(prompt) - 1 :])] if steps else []
        recorded = {phase: model.runner.prefill(prompt, graph=phase)[0, -1].copy() for phase in Phase}
        cases.append(_case(prompt, answer, recorded[Phase.PREFILL], got, wanted))
        others = {phase: [got[phase][len(prompt) - 1], *_other_calls(model, prompt, phase)] for phase in Phase}
        top = list(cases[-1].top_ids)
        spreads += [float(np.abs(each - recorded[phase])[top].max()) for phase in Phase for each in others[phase]]
    quality = Quality(
        text=TEXT,
        sha256="",
        positions=len(paths[Phase.PREFILL].kl),
        window=0,
        reference_perplexity=original.perplexity,
        phases={phase.value: path.quality for phase, path in paths.items()},
        greedy_match=float(np.mean(matches)) if matches else None,
        greedy_tokens=len(answered[0][1]) if matches else 0,
    )
    return Golden(tuple(cases), max(spreads), quality)


def run_long_prompt(model: Generator) -> tuple[GoldenPrompt, ...]:
    """A golden prompt of :data:`LONG_PROMPT` tokens, or as many as the context allows, and its answer in single steps;
    nothing if other prompts are as long. Quality is measured on the other prompts only."""
    runner, length = model.runner, min(LONG_PROMPT, model.runner.max_context - LONG_STEPS)
    if length <= PROMPT_TOKENS:
        return ()
    prompt = list(islice(cycle(chain.from_iterable(prompt_ids(model))), length))
    rows = [runner.prefill(prompt)[0, -1].copy()]
    for position in range(length, length + LONG_STEPS - 1):
        rows.append(runner.step(int(rows[-1].argmax()), position)[0, -1].copy())
    logits = np.stack(rows)
    if not np.isfinite(logits).all():
        raise _not_finite(model, "bundle")
    return (_record(prompt, tuple(logits.argmax(axis=1).tolist()), logits),)


def greedy_answers(model: Generator) -> list[Answered]:
    """Token ids of the golden prompts, and of the bundle's greedy answers."""
    new_tokens = max(1, min(NEW_TOKENS, model.runner.max_context - PROMPT_TOKENS))
    prompts = [hide_half(np.array(ids), model.manifest.geometry).tolist() for ids in prompt_ids(model)]
    try:
        return [(prompt, answer_greedily(model, prompt, new_tokens)) for prompt in prompts]
    except RequestError as error:  # no token can be chosen
        raise _not_finite(model, "bundle") from error


def list_fed(answered: Sequence[Answered], steps: bool = True) -> list[list[int]]:
    """Tokens to feed for the logits of each answer: prompt and answer without its last token; the prompt alone if the
    answer was not made in steps of a token."""
    return [[*prompt, *(answer[:-1] if steps else ())] for prompt, answer in answered]


def count_matching(answer: Sequence[int], logits: Float) -> int:
    """Number of tokens of ``answer`` before the first that ``logits`` [n, V] would not choose."""
    same = logits.argmax(axis=1) == np.array(answer)
    return len(answer) if same.all() else int(same.argmin())


def path_logits(model: Generator, ids: Sequence[int], phase: Phase) -> Float:
    """Logits after every token of ``ids`` through one path; NaN and infinity raise BundleError."""
    logits = model.runner.logits(ids, phase)
    if not np.isfinite(logits).all():
        raise _not_finite(model, f"{phase.value} path")
    return logits


def _not_finite(model: LoadedBundle, what: str) -> BundleError:
    halves = model.manifest.cache == "float16" and model.manifest.target.name == "cpu"
    remedy = "cache = 'float32' in the recipe, if keys or values leave float16" if halves else "precision fp32"
    return BundleError(
        f"the {what} computes NaN or infinite logits, so nothing can be said about its quality",
        f"build again, with {remedy}",
        path=model.folder,
    )


def prompt_ids(model: LoadedBundle) -> list[list[int]]:
    """Token ids of :data:`PROMPTS`, or ids spread over the vocabulary if the tokenizer has no tokens for them."""
    vocab, length = model.manifest.geometry.vocab_size, min(PROMPT_TOKENS, max(1, model.max_context - 1))
    encoded = [model.tokenizer.encode(text)[:length] for text in PROMPTS]
    usable = [ids for ids in encoded if ids and max(ids) < vocab]
    return usable or [[(start + i * vocab // length) % vocab for i in range(length)] for start in range(len(PROMPTS))]


def _other_calls(model: Generator, prompt: list[int], graph: Phase) -> Iterator[Float]:
    """Logits [V] after the prompt by other calls that an engine may make: in pieces, and with the last token beside
    another row's."""
    runner, last = model.runner, len(prompt) - 1
    if takes_whole_texts(model.manifest.geometry):
        return
    yield runner.prefill(prompt, chunk=PIECE, graph=graph)[0, -1].copy()
    if model.manifest.limits.max_batch == 1:
        return
    runner.session.cache.grow(2, len(prompt), runner.max_context)
    ids, past, none = np.array([prompt], np.int64), np.zeros(1, np.int64), np.zeros((1, 0), np.int64)
    for row in (0, 1) if last else ():
        runner.session.run(Batch.of(graph, ids[:, :last], past, none, row))
    both = Batch.of(graph, np.repeat(ids[:, last:], 2, axis=0), np.full(2, last), np.zeros((2, 1), np.int64))
    yield runner.session.run(both)[0, 0].copy()


def _case(
    prompt: list[int], answer: tuple[int, ...], prefill: Float, got: dict[Phase, Float], wanted: Float
) -> GoldenPrompt:
    after = len(prompt) - 1
    # The first token comes from the prefill's logits, all others from decode steps.
    logits = np.concatenate([prefill[None], got[Phase.DECODE][after + 1 :]])
    top = _top(wanted[after])
    reference = {"reference_ids": tuple(top.tolist()), "reference_logits": tuple(wanted[after, top].tolist())}
    return replace(_record(prompt, answer, logits), **reference)


def _record(prompt: list[int], answer: tuple[int, ...], logits: Float) -> GoldenPrompt:
    """A prompt and the answer that ``logits`` [n, V] chose, without the unquantized model's logits."""
    top, two = _top(logits[0]), np.sort(logits, axis=1)[:, -2:]
    if len(two) < len(answer):  # tokens that were made together have no logits to tell a near tie by
        two = np.zeros((len(answer), 2), np.float32)
    return GoldenPrompt(
        prompt=tuple(prompt),
        tokens=answer,
        margins=tuple((two[:, 1] - two[:, 0]).tolist()),
        top_ids=tuple(top.tolist()),
        top_logits=tuple(logits[0, top].tolist()),
        reference_ids=(),
        reference_logits=(),
    )


def _top(logits: Float) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")[:TOP_LOGITS]
