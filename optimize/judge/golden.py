"""The golden self-test: what the built bundle answers, and what the unquantized model would have said."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenPrompt, Quality
from llmc.errors import BundleError
from llmc.optimize.judge.quality import Float, Tally
from llmc.optimize.judge.reference import Reference
from llmc.optimize.progress import Progress, silent
from llmc.runtime import Model
from llmc.runtime.sessions import Phase

# Prose, code, another script and figures: enough to notice a wrong weight, short enough to replay in no time.
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Deich. 東京は",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
PROMPT_TOKENS = 24
NEW_TOKENS = 16
TOP_LOGITS = 10
TEXT = "golden prompts"  # what quality was measured on when there is no text

Answered = tuple[list[int], tuple[int, ...]]  # a prompt and the tokens after it


def golden_prompts(model: Model, export: Path, progress: Progress = silent) -> tuple[tuple[GoldenPrompt, ...], Quality]:
    """Run the golden prompts through the bundle and through the unquantized model.

    Perplexities are over the prompts alone: the bundle's own answers say what it likes, not what is likely.

    Raises:
        BundleError: the bundle computes NaN or infinity.
    """
    progress("running the golden prompts")
    answered = greedy_answers(model)
    reference = Reference(export)
    original, paths = Tally(), {phase: Tally() for phase in Phase}
    cases: list[GoldenPrompt] = []
    matches: list[int] = []
    for (prompt, answer), normed in zip(answered, reference.normed(fed(answered), progress), strict=True):
        wanted = reference.project(normed)
        got = {phase: path_logits(model, [*prompt, *answer[:-1]], phase) for phase in Phase}
        following = np.array(prompt[1:], np.int64)
        original.predict(wanted[: len(following)], following)
        for phase, path in paths.items():
            path.predict(got[phase][: len(following)], following)
            path.compare(wanted, got[phase])
        matches.append(matching(answer, wanted[len(prompt) - 1 :]))
        cases.append(_case(prompt, answer, got[Phase.PREFILL], got[Phase.DECODE], wanted))
    quality = Quality(
        text=TEXT,
        sha256="",
        positions=paths[Phase.PREFILL].comparison.positions,
        window=0,
        reference_perplexity=original.perplexity,
        phases={phase.value: path.quality for phase, path in paths.items()},
        greedy_match=float(np.mean(matches)),
        greedy_tokens=len(answered[0][1]),
    )
    return tuple(cases), quality


def greedy_answers(model: Model) -> list[Answered]:
    """The golden prompts, and the tokens that the bundle chooses after each."""
    new_tokens = max(1, min(NEW_TOKENS, model.runner.max_context - PROMPT_TOKENS))
    options = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return [(prompt, model.generate(prompt, **options).token_ids) for prompt in prompt_ids(model)]


def fed(answered: Sequence[Answered]) -> list[list[int]]:
    """The tokens to feed for the logits of every answer; those after its last token belong to no answer."""
    return [[*prompt, *answer[:-1]] for prompt, answer in answered]


def matching(answer: Sequence[int], logits: Float) -> int:
    """Number of tokens of ``answer`` before the first that ``logits`` [n, V] would not choose."""
    same = logits.argmax(axis=1) == np.array(answer)
    return len(answer) if same.all() else int(same.argmin())


def path_logits(model: Model, ids: Sequence[int], phase: Phase) -> Float:
    """Logits after every token of ``ids`` through one path.

    Raises:
        BundleError: they are NaN or infinite.
    """
    logits = model.runner.logits(ids, phase)
    if not np.isfinite(logits).all():
        raise BundleError(
            f"{model.folder}: the {phase.value} path computes NaN or infinite logits, so nothing can be said about its "
            "quality; build the bundle again, with precision fp32 if it stays so"
        )
    return logits


def prompt_ids(model: Model) -> list[list[int]]:
    """Token ids of :data:`PROMPTS`; where the tokenizer makes nothing of them, ids spread over the vocabulary."""
    vocab, length = model.manifest.geometry.vocab_size, min(PROMPT_TOKENS, max(1, model.runner.max_context - 1))
    encoded = [model.tokenizer.encode(text)[:length] for text in PROMPTS]
    usable = [ids for ids in encoded if ids and max(ids) < vocab]
    return usable or [[(start + i * vocab // length) % vocab for i in range(length)] for start in range(len(PROMPTS))]


def _case(prompt: list[int], answer: tuple[int, ...], prefill: Float, decode: Float, wanted: Float) -> GoldenPrompt:
    after = len(prompt) - 1
    top, reference_top = (_top(logits[after]) for logits in (prefill, wanted))
    # The first token comes from the prefill's logits, all others from decode steps.
    two = np.sort(np.concatenate([prefill[after : after + 1], decode[after + 1 :]]), axis=1)[:, -2:]
    return GoldenPrompt(
        prompt=tuple(prompt),
        tokens=answer,
        margins=tuple(float(margin) for margin in two[:, 1] - two[:, 0]),
        top_ids=tuple(top.tolist()),
        top_logits=tuple(prefill[after, top].tolist()),
        decode_logits=tuple(decode[after, top].tolist()),
        reference_ids=tuple(reference_top.tolist()),
        reference_logits=tuple(wanted[after, reference_top].tolist()),
    )


def _top(logits: Float) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")[:TOP_LOGITS]
