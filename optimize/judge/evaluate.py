"""Quality on a text: perplexity, and the distance of each path's distributions from the unquantized model's.

The text is cut into windows that do not overlap; each starts from an empty cache. All tokens but a window's first are
predicted once through the prefill path (in chunks) and once through the decode path (one token per call).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmc.bundle import Quality
from llmc.bundle.model.kinds import refuse, takes_whole_texts
from llmc.errors import UsageError
from llmc.optimize.calibrate.diffusion import find_targets, hide_half
from llmc.optimize.calibrate.text import JUDGED_WINDOW, CalibrationSamples, read_samples
from llmc.optimize.judge import golden
from llmc.optimize.judge.quality import Double, Float, Tally
from llmc.optimize.judge.reference import Ids, Reference, keep_states
from llmc.optimize.progress import Progress, make_counter, silent
from llmc.runtime import Generator
from llmc.runtime.sessions import Phase

# A window takes one decode step per token: with 0.5 billion weights in int4 it cost 19 seconds of CPU time, 9 of them
# in the steps and 4 in the unquantized model. So 6 windows, 1,530 positions, take about a minute on two cores.
MAX_WINDOWS = 6
# Positions of each phase that are named as its worst, and tokens before each that are quoted.
WORST_POSITIONS, QUOTED = 8, 12


@dataclass(frozen=True)
class Loss:
    """A position where the bundle's distribution is far from the unquantized model's. Texts may be hostile."""

    phase: str
    window: int  # number of the window, from 0
    position: int  # number of the token in the window after which the next one is predicted, from 0
    kl: float  # KL(reference || bundle) in nats
    before: str  # the last tokens up to the position, as text
    expected: str  # the unquantized model's most likely next token, as text
    chosen: str  # the bundle's


@dataclass(frozen=True)
class Evaluation:
    """The quality of a bundle on a text, and the positions of each phase with the largest KL, largest first."""

    quality: Quality
    losses: tuple[Loss, ...]  # empty without a reference


def read_windows(
    path: Path | None, model: Generator, window: int | None = None, max_windows: int = MAX_WINDOWS
) -> CalibrationSamples:
    """Windows of a text, at most ``max_windows``, evenly spread over it.

    ``window`` is in tokens; default: :data:`JUDGED_WINDOW`, or the whole context where it is shorter. ``path`` is plain
    text, or chats as JSONL; None takes the part of llmc's own text that calibration does not see.

    Raises:
        UsageError: a number is out of range, or the text cannot be read or is too short.
    """
    context = model.runner.max_context
    window = min(JUDGED_WINDOW, context) if window is None else window
    if not 2 <= window <= context:
        raise UsageError("window", f"is {window}, expected 2 ... {context}, the context that the bundle is loaded with")
    if max_windows < 1:
        raise UsageError("max_windows", f"is {max_windows}, expected at least 1")
    vocab = model.manifest.geometry.vocab_size
    return read_samples(path, model.folder, samples=max_windows, length=window, vocab_size=vocab, held_out=True)


def open_reference(model: Generator, export: Path) -> Reference:
    reference = Reference(export)
    ours, theirs = model.manifest.source, reference.manifest.source
    if ours.fingerprint != theirs.fingerprint:
        raise UsageError(
            "reference",
            f"{export} is an export of {theirs.name} ({theirs.fingerprint[:12]}), but {model.folder} was built from "
            f"{ours.name} ({ours.fingerprint[:12]})",
            "give the export of the same checkpoint",
        )
    return reference


def evaluate(
    model: Generator,
    text: CalibrationSamples,
    *,
    reference: Path | None = None,
    cache: Path | None = None,
    greedy: bool = True,
    progress: Progress = silent,
) -> Evaluation:
    """Judge both paths of a bundle on windows of a text, see :func:`read_windows`.

    Args:
        model: the loaded bundle.
        text: the windows.
        reference: the export that the bundle was built from; without it there is only the perplexity.
        cache: folder that keeps the unquantized model's hidden states for the next bundle on the same text.
        greedy: whether to compare greedy answers to the golden prompts as well.
        progress: called with each step and how far it is.

    Raises:
        UsageError: the reference is of another model, or the bundle a draft head.
        BundleError: the bundle computes NaN or infinity, or the reference is broken.
    """
    geometry = model.manifest.geometry
    refuse(geometry, "answers")
    unquantized = open_reference(model, reference) if reference is not None else None
    fed = hide_half(text.ids[:, :-1], geometry)
    states = keep_states(unquantized, fed, cache, progress) if unquantized else None
    original, paths = Tally(), {phase: Tally() for phase in Phase}
    worst: dict[Phase, list[Loss]] = {phase: [] for phase in Phase}
    done = make_counter(progress, f"judging the bundle on {text.name}", len(text.ids) * len(Phase))
    for number, ids in enumerate(text.ids):
        wanted = unquantized.project(states[number]) if unquantized and states is not None else None
        rows, targets = find_targets(ids, fed[number], geometry)
        if wanted is not None:
            original.predict(wanted[rows], targets)
        for phase, path in paths.items():
            logits = golden.path_logits(model, fed[number].tolist(), phase)
            path.predict(logits[rows], targets)
            if wanted is not None:
                kl = path.compare(wanted, logits)
                found = _list_losses(model, phase, number, fed[number], kl, wanted, logits)
                worst[phase] = heapq.nlargest(WORST_POSITIONS, [*worst[phase], *found], key=lambda loss: loss.kl)
            done()
    steps = greedy and not takes_whole_texts(geometry)
    matches = _matches(model, unquantized, progress) if unquantized and steps else []
    quality = Quality(
        text=text.name,
        sha256=text.sha256,
        positions=text.ids[:, 1:].size,
        window=text.ids.shape[1],
        reference_perplexity=original.perplexity if unquantized else None,
        phases={phase.value: path.quality for phase, path in paths.items()},
        greedy_match=float(np.mean([count for count, _ in matches])) if matches else None,
        greedy_tokens=max((length for _, length in matches), default=0),
    )
    return Evaluation(quality, tuple(loss for losses in worst.values() for loss in losses))


def _list_losses(
    model: Generator, phase: Phase, window: int, fed: Ids, kl: Double, wanted: Float, logits: Float
) -> Iterator[Loss]:
    """The positions of a window with the largest KL [n], from logits [n, V] of both models."""
    decode = partial(model.tokenizer.decode, skip_special_tokens=False)
    for position in np.argsort(-kl, kind="stable")[:WORST_POSITIONS].tolist():
        before = fed[max(0, position + 1 - QUOTED) : position + 1].tolist()
        text, best = decode(before), [int(rows[position].argmax()) for rows in (wanted, logits)]
        # SentencePiece drops a space that a text begins with, so decode the token behind the others.
        after = [(decode([*before, token]), decode([token])) for token in best]
        shown = [whole[len(text) :] if whole.startswith(text) else alone for whole, alone in after]
        yield Loss(phase.value, window, position, float(kl[position]), text, *shown)


def _matches(model: Generator, reference: Reference, progress: Progress) -> list[tuple[int, int]]:
    """For each golden prompt, how many greedy tokens the unquantized model would choose too, and of how many."""
    answered = golden.greedy_answers(model)
    states = reference.compute_normed(golden.list_fed(answered), progress)
    return [
        (golden.count_matching(answer, reference.project(normed[len(prompt) - 1 :])), len(answer))
        for (prompt, answer), normed in zip(answered, states, strict=True)
    ]
