"""The form of attention that is given lengths instead of a mask: does it compute the same, and is it faster?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.determinism import fed, step
from gpu_check.measure import bucket_ends, step_at
from gpu_check.reference import LONG_PROMPT, NEW_TOKENS, POSITIONS, Float, arbitrary, worst
from llmc.runtime import Model, load
from llmc.runtime.sessions import Phase

# Relative (reference.relative): other kernels round otherwise; a key too many or too few gives 0.1 and more.
SAME = 0.02
ROWS = 4


def lengths(native: str, other: str) -> dict[str, Any]:
    """Logits and decode steps of two bundles that differ in the form of their engines alone."""
    found = [answers(Path(bundle)) for bundle in (native, other)]
    apart = {name: worst(found[1][name], found[0][name]) for name in ("prefill", "decode", "rows")}
    return {
        "forms": [part["form"] for part in found],
        "relative": apart,
        "steps": [part["steps"] for part in found],
        "problems": problems(apart),
    }


def problems(apart: dict[str, float]) -> list[str]:
    """What is wrong, in words."""
    wrong = {name: distance for name, distance in apart.items() if not distance <= SAME}  # which NaN is not either
    return [f"{name}: {distance:.3g} apart, at most {SAME} is expected" for name, distance in wrong.items()]


def answers(bundle: Path) -> dict[str, Any]:
    """Logits after a long prompt by both paths, of rows of different lengths, and times by bucket."""
    with load(bundle, self_test=False, prefix_cache_bytes=0) as model:
        vocab, engine = model.manifest.geometry.vocab_size, model.manifest.engine
        ids = arbitrary(min(LONG_PROMPT, model.runner.max_context - NEW_TOKENS), vocab)
        return {
            "form": engine and engine.form,
            "prefill": model.runner.logits(ids, Phase.PREFILL)[-POSITIONS:],
            "decode": model.runner.logits(ids, Phase.DECODE)[-POSITIONS:],
            "rows": ragged(model, [ids[: len(ids) // (i + 1)] for i in range(ROWS)]),
            "steps": [step_at(model, end) for end in bucket_ends(model)],
        }


def ragged(model: Model, prompts: Sequence[list[int]]) -> Float:
    """A decode step of rows with caches of different lengths [B, V]."""
    rows = prompts[: model.manifest.limits.max_batch]
    fed(model.runner.session, rows, max(map(len, rows)))
    return np.array(step(model.runner.session, rows, 0)[:, 0])
