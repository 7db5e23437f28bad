"""The golden self-test: what the built bundle answers, and what the unquantized model would have said."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenPrompt, Quality
from llmc.optimize.progress import Progress, silent
from llmc.optimize.quality import Comparison, Float, compare
from llmc.optimize.reference import Reference
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


def golden_prompts(model: Model, export: Path, progress: Progress = silent) -> tuple[tuple[GoldenPrompt, ...], Quality]:
    """Run the golden prompts through the bundle and through the unquantized model."""
    progress("running the golden prompts")
    prompts = _prompts(model)
    new_tokens = max(1, min(NEW_TOKENS, model.engine.max_context - PROMPT_TOKENS))
    answers = [model.generate(ids, max_tokens=new_tokens, temperature=0, ignore_eos=True).token_ids for ids in prompts]
    # One token less than generated: the logits after the last one belong to no answer.
    sequences = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    reference = Reference(export).logits(sequences, progress)
    cases, totals = [], {phase: Comparison() for phase in Phase}
    for prompt, answer, sequence, wanted in zip(prompts, answers, sequences, reference, strict=True):
        got = {phase: model.engine.logits(sequence, phase) for phase in Phase}
        for phase in Phase:
            totals[phase] += compare(wanted, got[phase])
        cases.append(_case(prompt, answer, got[Phase.PREFILL], got[Phase.DECODE], wanted))
    return tuple(cases), _quality(totals)


def _prompts(model: Model) -> list[list[int]]:
    """Token ids of :data:`PROMPTS`; where the tokenizer makes nothing of them, ids spread over the vocabulary."""
    vocab, length = model.manifest.geometry.vocab_size, min(PROMPT_TOKENS, max(1, model.engine.max_context - 1))
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


def _quality(totals: dict[Phase, Comparison]) -> Quality:
    prefill, decode = totals[Phase.PREFILL], totals[Phase.DECODE]
    return Quality(
        positions=prefill.positions,
        prefill_mean_kl=prefill.mean_kl,
        decode_mean_kl=decode.mean_kl,
        prefill_top1_agreement=prefill.top1_agreement,
        decode_top1_agreement=decode.top1_agreement,
    )
