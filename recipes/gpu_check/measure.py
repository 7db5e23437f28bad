"""How fast a bundle is: time to first token, decoding alone and in a batch, by bucket of the cache; device memory."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_check.plan import PROMPTS, ROWS
from gpu_check.reference import arbitrary
from llmc.bundle import Manifest
from llmc.runtime import Model, load

NEW_TOKENS = 128
# Steps per bucket, and where there is no engine, the lengths of the cache that are looked at.
STEPS = 32
LENGTHS = (128, 512, 1024, 2048, 4096)


def measure(bundle: str, emulate: bool, on_device: bool, rounds: int) -> dict[str, Any]:
    """Times of greedy generation through the public API, medians of ``rounds``, each after a run that is not counted.

    No prefix is cached, and every prompt begins with another token.
    """
    with driver(on_device) as gpu:
        before = free_bytes(gpu)
        start = time.perf_counter()
        with load(Path(bundle), self_test=False, emulate=emulate, prefix_cache_bytes=0) as model:
            load_s = time.perf_counter() - start
            loaded = free_bytes(gpu)
            new = min(NEW_TOKENS, model.runner.max_context // 2)
            prompts = fitting(model.runner.max_context, new)
            found = {
                "load_s": load_s,
                "rounds": rounds,
                "new_tokens": new,
                "alone": [alone(model, length, new, rounds, 100 * i) for i, length in enumerate(prompts)],
                "runner_step_s": runner_step(model, prompts[0], new),
                "batch": batch(model, prompts[0], new, rounds),
                **step_bytes(model.manifest),
            }
            after = free_bytes(gpu)
    taken = None if before is None else {"loaded": before - loaded, "after_runs": before - after}
    return found | {"device_bytes": taken}


@contextmanager
def driver(on_device: bool) -> Iterator[Any]:
    """The CUDA driver, with its context made, or None where there is no GPU in play."""
    if not on_device:
        yield None
        return
    from llmc.runtime.host.cuda import open_driver

    gpu = open_driver()
    try:
        yield gpu
    finally:
        gpu.close()


def free_bytes(gpu: Any) -> Any:
    """Free bytes of the GPU, None where there is none."""
    return None if gpu is None else gpu.memory_info()[0]


def fitting(context: int, new_tokens: int) -> list[int]:
    """The lengths of prompts that leave room for the new tokens; the longest one is shortened if it does not."""
    kept = [length for length in PROMPTS if length + new_tokens <= context]
    return kept if len(kept) == len(PROMPTS) else [*kept, context - new_tokens]


def alone(model: Model, length: int, new_tokens: int, rounds: int, salt: int) -> dict[str, Any]:
    """One request at a time."""
    vocab = model.manifest.geometry.vocab_size

    def timings(number: int) -> Any:
        prompt = arbitrary(length, vocab, salt + number)
        return model.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True).timings

    timings(0)  # allocates, and captures the steps of every bucket that the timed runs come to
    runs = [timings(number) for number in range(1, rounds + 1)]
    return {
        "prompt": length,
        "ttft_s": statistics.median(run.ttft_s for run in runs),
        "tpot_s": statistics.median(run.tpot_s for run in runs),
        "best_ttft_s": min(run.ttft_s for run in runs),
        "best_tpot_s": min(run.tpot_s for run in runs),
    }


def runner_step(model: Model, length: int, new_tokens: int) -> float:
    """Median seconds of a step below the engine, all logits fetched: what is above it is the engine's own time."""
    model.runner.prefill(arbitrary(length, model.manifest.geometry.vocab_size))
    return median_step(model, range(length, length + new_tokens))


def median_step(model: Model, positions: Sequence[int]) -> float:
    """Median seconds of decode steps at ``positions``."""
    seconds = []
    for position in positions:
        start = time.perf_counter()
        model.runner.step(10, position)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def batch(model: Model, length: int, new_tokens: int, rounds: int) -> dict[str, Any] | None:
    """Several requests at once; None where the bundle has not so many rows."""
    if model.manifest.limits.max_batch < ROWS:
        return None
    vocab = model.manifest.geometry.vocab_size

    def together(salt: int) -> tuple[float, float]:
        requests = [
            model.request(arbitrary(length, vocab, salt + i), max_tokens=new_tokens, temperature=0, ignore_eos=True)
            for i in range(ROWS)
        ]
        start = time.perf_counter()
        results = [handle.result() for handle in [model.submit(request) for request in requests]]
        return time.perf_counter() - start, statistics.median(result.timings.tpot_s for result in results)

    together(1000)
    runs = [together(2000 + 100 * number) for number in range(rounds)]
    tpot = statistics.median(step for _, step in runs)
    return {
        "rows": ROWS,
        "prompt": length,
        "tpot_s": tpot,
        "decode_tokens_per_s": ROWS / tpot,
        "tokens_per_s": ROWS * new_tokens / statistics.median(seconds for seconds, _ in runs),
    }


def step_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes that a decode step must read: of the weights, and of the cache for each position that it attends to."""
    plan = manifest.memory if manifest.device is None else manifest.device
    return {
        "weight_bytes": manifest.graphs["decode"].step_weight_bytes,
        "cache_bytes_per_position": plan.cache_per_token,
    }


def buckets(bundle: str, emulate: bool) -> dict[str, Any]:
    """Median seconds of a decode step whose last position is the last one of each bucket of the cache.

    What the cache holds does not matter for that, so nothing is fed before.
    """
    with load(Path(bundle), self_test=False, emulate=emulate, prefix_cache_bytes=0) as model:
        engine = model.manifest.engine
        return {"form": engine and engine.form, "steps": [step_at(model, end) for end in bucket_ends(model)]}


def bucket_ends(model: Model) -> list[int]:
    """The last positions of the engine's buckets; without an engine, some lengths."""
    engine, context = model.manifest.engine, model.runner.max_context
    return sorted({min(end, context) for end in (engine.buckets if engine is not None else LENGTHS)})


def step_at(model: Model, end: int) -> dict[str, Any]:
    """The step that fills position ``end - 1``."""
    same = [end - 1] * STEPS
    median_step(model, same)  # allocates, and captures what can be captured
    return {"positions": end, "step_s": median_step(model, same)}
