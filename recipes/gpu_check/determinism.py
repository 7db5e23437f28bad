"""Is the same computed twice: again, in a batch with others, and by a captured CUDA graph?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_check import models
from gpu_check.reference import Float, arbitrary, worst
from gpu_check.steps import Options

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 24
STEPS = 4
# Kernels for several rows add in another order. Relative to the deviation of the logits (reference.worst), float16 and
# activations in 8 bits stay below this; the row of another sequence gives about 1.
ROUNDING = 0.1


def determinism(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Tokens and relative differences of logits of the same prompts: twice, in a batch, and of one step repeated."""
    with models.opened(target, geometry, precision, options) as model:
        vocab, rows = model.manifest.geometry.vocab_size, min(PROMPTS, model.manifest.limits.max_batch)
        prompts = [arbitrary(PROMPT_TOKENS + i, vocab, i) for i in range(rows)]
        session, runner = model.runner.session, model.runner
        apart = graphs_apart(session, prompts)  # first, see there
        apart["batch"] = rows_apart(session, prompts)
        first = runner.prefill(prompts[0]).copy()
        apart["prefill again"] = worst(runner.prefill(prompts[0]), first)
        return {"rows": rows, "apart": apart, "tokens": tokens(model, prompts), "problems": problems(apart)}


def problems(apart: dict[str, float]) -> list[str]:
    """What is beyond rounding, in words; what is within is a figure, and so are tokens, which near choices can swap."""
    return [
        f"{name}: logits are {distance:.3g} apart (relative), at most {ROUNDING} is expected"
        for name, distance in apart.items()
        if not distance <= ROUNDING  # which NaN is not either
    ]


def rows_apart(session: Any, prompts: Sequence[Sequence[int]]) -> float:
    """A decode step of all rows at once beside one of each row alone."""
    fed(session, prompts)
    alone = np.concatenate([step(session, prompts[r : r + 1], r).copy() for r in range(len(prompts))])
    return worst(step(session, prompts, 0), alone)


def graphs_apart(session: Any, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """A step again and again: of one row (graph A), of all rows (B), of one row again; beside the first of its kind.

    An engine with CUDA graphs runs the first one plainly, captures, and replays, so nothing may have decoded on this
    session before. The cache gets the same values at the same position each time.
    """
    fed(session, prompts)
    first: dict[int, Float] = {}
    found = {}
    for name, count in {"graph A": 1, "graph B": len(prompts), "graph A again": 1}.items():
        logits = [step(session, prompts[:count], 0).copy() for _ in range(STEPS)]
        found[name] = max(worst(each, first.setdefault(count, logits[0])) for each in logits)
    return found


def fed(session: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Put each prompt but its last token into its row."""
    from llmc.runtime.sessions import Batch, Phase

    session.cache.reserve(len(prompts), max(map(len, prompts)) + 1)
    for row, ids in enumerate(prompts):
        indices = np.zeros((1, 0), np.int64)
        session.run(Batch(Phase.PREFILL, np.array([ids[:-1]], np.int64), np.zeros(1, np.int64), indices, row))


def step(session: Any, prompts: Sequence[Sequence[int]], row: int) -> Float:
    """Feed the last token of each prompt into the rows from ``row`` on; logits [B, 1, V]."""
    from llmc.runtime.sessions import Batch, Phase

    ids = np.array([[prompt[-1]] for prompt in prompts], np.int64)
    past = np.array([len(prompt) - 1 for prompt in prompts], np.int64)
    found: Float = session.run(Batch(Phase.DECODE, ids, past, np.zeros((len(prompts), 1), np.int64), row))
    return found


def tokens(model: Any, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Greedy answers: how many prompts have the same twice alone, and the same in a batch as alone."""
    options: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    first, second = ([model.generate(ids, **options).token_ids for ids in prompts] for _ in range(2))
    handles = [model.submit(model.request(ids, **options)) for ids in prompts]
    batched = [handle.result().token_ids for handle in handles]
    again, together = (sum(a == b for a, b in zip(first, other, strict=True)) for other in (second, batched))
    return {"prompts": len(prompts), "equal_again": again, "equal_in_batch": together}
