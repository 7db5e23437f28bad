"""Is the same computed twice: again, in a batch with others, and by a captured CUDA graph?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.reference import Float, arbitrary, worst
from llmc.runtime import Model, load
from llmc.runtime.sessions import Batch, Phase, Session

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 24
STEPS = 4
# Kernels for several rows add in another order. Relative to the deviation of the logits (reference.relative), float16
# and activations in 8 bits stay below this; the row of another sequence gives about 1.
ROUNDING = 0.1


def determinism(bundle: str, emulate: bool) -> dict[str, Any]:
    """Tokens and logits of the same prompts: twice alone, in a batch, and of one step run again and again."""
    with load(Path(bundle), self_test=False, emulate=emulate, prefix_cache_bytes=0) as model:
        vocab, rows = model.manifest.geometry.vocab_size, min(PROMPTS, model.manifest.limits.max_batch)
        prompts = [arbitrary(PROMPT_TOKENS + i, vocab, i) for i in range(rows)]
        session, capacity = model.runner.session, PROMPT_TOKENS + rows + 1
        found = {
            "rows": rows,
            "graph_apart": graph_apart(session, prompts, capacity),  # first, see there
            "rows_apart": rows_apart(session, prompts, capacity),
            "prefill_twice": prefill_twice(model, prompts[0]),
            "tokens": tokens(model, prompts),
        }
    return found | {"problems": problems(found)}


def prefill_twice(model: Model, prompt: Sequence[int]) -> float:
    """Largest difference of logits after a prompt that is fed twice."""
    first = model.runner.prefill(prompt).copy()
    return float(np.abs(model.runner.prefill(prompt) - first).max())


def rows_apart(session: Session, prompts: Sequence[Sequence[int]], capacity: int) -> dict[str, float]:
    """A decode step of all rows at once beside one of each row alone: largest and worst relative difference."""
    fed(session, prompts, capacity)
    alone = np.concatenate([step(session, prompts[r : r + 1], r).copy() for r in range(len(prompts))])
    together = step(session, prompts, 0)
    return {"largest": float(np.abs(alone - together).max()), "relative": worst(together[:, 0], alone[:, 0])}


def graph_apart(session: Session, prompts: Sequence[Sequence[int]], capacity: int) -> dict[str, float]:
    """One decode step again and again: an engine with CUDA graphs runs the first one plainly, captures, and replays.

    So nothing may have decoded on this session before. The cache gets the same values at the same position each time.
    Largest differences from the first step, for one row and for all.
    """
    found = {}
    for count in sorted({1, len(prompts)}):
        fed(session, prompts, capacity)
        first, *later = [step(session, prompts[:count], 0).copy() for _ in range(STEPS)]
        found[f"rows_{count}"] = max(float(np.abs(logits - first).max()) for logits in later)
    return found


def fed(session: Session, prompts: Sequence[Sequence[int]], capacity: int) -> None:
    """Put each prompt but its last token into its row."""
    session.cache.reserve(len(prompts), capacity)
    for row, ids in enumerate(prompts):
        indices = np.zeros((1, 0), np.int64)
        session.run(Batch(Phase.PREFILL, np.array([ids[:-1]], np.int64), np.zeros(1, np.int64), indices, row))


def step(session: Session, prompts: Sequence[Sequence[int]], row: int) -> Float:
    """Feed the last token of each prompt into the rows from ``row`` on; logits [B, 1, V]."""
    ids = np.array([[prompt[-1]] for prompt in prompts], np.int64)
    past = np.array([len(prompt) - 1 for prompt in prompts], np.int64)
    return session.run(Batch(Phase.DECODE, ids, past, np.zeros((len(prompts), 1), np.int64), row))


def tokens(model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Greedy answers: how many prompts have the same twice alone, and the same in a batch as alone."""
    options: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    first, second = ([model.generate(ids, **options).token_ids for ids in prompts] for _ in range(2))
    handles = [model.submit(model.request(ids, **options)) for ids in prompts]
    batched = [handle.result().token_ids for handle in handles]
    return {
        "prompts": len(prompts),
        "equal_again": sum(a == b for a, b in zip(first, second, strict=True)),
        "equal_in_batch": sum(a == b for a, b in zip(first, batched, strict=True)),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong, in words. A batch may round otherwise (level "fast"): tokens of near choices then differ."""
    wrong = []
    if found["prefill_twice"] != 0:
        wrong.append(f"a prompt that is fed twice gives logits {found['prefill_twice']:.3g} apart")
    if any(apart != 0 for apart in found["graph_apart"].values()):
        wrong.append(f"a step that is run again gives logits {max(found['graph_apart'].values()):.3g} apart")
    if not found["rows_apart"]["relative"] <= ROUNDING:
        wrong.append(
            f"a row in a batch gives logits {found['rows_apart']['relative']:.3g} (relative) from it alone, at most "
            f"{ROUNDING} is expected"
        )
    if found["tokens"]["equal_again"] != found["tokens"]["prompts"]:
        wrong.append(f"only {found['tokens']['equal_again']} of {found['tokens']['prompts']} answers come out again")
    return wrong
