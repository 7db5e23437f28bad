"""Speed of a bundle: first calls, single steps, answers alone and in a batch; with recorded steps and without."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

from gpu_check import models
from gpu_check.correctness import arbitrary
from gpu_check.steps import Options
from llmc.runtime.host import cuda
from llmc.runtime.sessions.onnxruntime import cuda as onnxruntime_steps
from llmc.runtime.sessions.tensorrt import steps as tensorrt_steps

ROUNDS = 5
PROMPTS = (128, 512, 2048)
NEW_TOKENS = 128
# Steps per bucket, and where there is no engine, the lengths of the cache that are looked at.
STEPS = 32
LENGTHS = (128, 512, 1024, 2048, 4096)


def measure(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Times of greedy generation through the public API and of steps below it; the GPU's memory that is taken.

    No prefix is cached, and every prompt begins with another token.
    """
    bundle = (target, geometry, precision, options)
    models.check_here(target)
    models.built(*bundle)
    with contextlib.ExitStack() as stack:
        gpu = None if target == "cpu" else stack.enter_context(contextlib.closing(cuda.open_driver()))
        before, start = gpu and gpu.memory_info()[0], time.perf_counter()
        with models.opened(*bundle) as model:
            load_s, loaded = time.perf_counter() - start, gpu and gpu.memory_info()[0]
            new = min(NEW_TOKENS, model.runner.max_context // 2)
            prompts = fitting(model.runner.max_context, new)
            found: dict[str, Any] = {
                "load_s": load_s,
                "new_tokens": new,
                "first_calls_s": first_calls(model, prompts[0]),
                "step": steps(model, range(prompts[0], prompts[0] + new)),
                "alone": [alone(model, length, new, 100 * i) for i, length in enumerate(prompts)],
                "batch": batch(model, prompts[0], new),
                "captures": captures(model.runner.session),
                **step_bytes(model.manifest),
            }
            if gpu:
                found["device_bytes"] = {"loaded": before - loaded, "after_runs": before - gpu.memory_info()[0]}
        records = target in ("cuda", "tensorrt")  # TensorRT-RTX does so by itself
        if target != "cpu":  # kernels that were compiled on first use are kept: the difference is what compiling took
            start = time.perf_counter()
            with without_graphs() if records else contextlib.nullcontext(), models.opened(*bundle) as model:
                found |= {"load_again_s": time.perf_counter() - start, "calls_again_s": first_calls(model, prompts[0])}
                if records:
                    found["step_without_graphs"] = steps(model, range(prompts[0], prompts[0] + new))
    return found


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Sessions on a GPU launch every kernel by itself."""
    with patch.object(onnxruntime_steps, "MOST_RECORDINGS", 0), patch.object(tensorrt_steps, "RECORDED_TOKENS", 0):
        yield


def captures(session: Any) -> int | None:
    """Number of calls that a session has recorded, or TensorRT-RTX may; None where it does not record."""
    if hasattr(session, "_steps"):
        return sum(bool(step.graph or step.own) for step in session._steps._kept.values())
    return getattr(session, "_recordings", None)


def fitting(context: int, new_tokens: int) -> list[int]:
    """The lengths of prompts that leave room for the new tokens; the longest one is shortened if it does not."""
    kept = [length for length in PROMPTS if length + new_tokens <= context]
    return kept if len(kept) == len(PROMPTS) else [*kept, context - new_tokens]


def first_calls(model: Any, length: int) -> dict[str, float]:
    """Seconds of the first prefill and steps, in which kernels are made, memory is taken and steps are recorded."""
    prompt = arbitrary(length, model.manifest.geometry.vocab_size)
    found = {f"prefill_{i}": seconds_of(lambda: model.runner.prefill(prompt)) for i in (1, 2)}
    return found | {f"step_{i}": seconds_of(lambda: model.runner.step(10, length)) for i in (1, 2, 3)}


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def steps(model: Any, positions: Sequence[int]) -> dict[str, float]:
    """Seconds of decode steps at ``positions``, below the engine, all logits fetched."""
    return spread([seconds_of(lambda position=position: model.runner.step(10, position)) for position in positions])


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the time that 19 of 20 are within, and the best."""
    ordered = sorted(seconds)
    within = -(-19 * len(ordered) // 20)
    return {"p50_s": statistics.median(ordered), "p95_s": ordered[within - 1], "best_s": ordered[0]}


def alone(model: Any, length: int, new_tokens: int, salt: int) -> dict[str, Any]:
    """One request at a time."""
    asked = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    prompts = [arbitrary(length, model.manifest.geometry.vocab_size, salt + i) for i in range(1 + ROUNDS)]
    # The first allocates, and captures the steps of every bucket that the timed runs come to.
    _, *runs = [model.generate(prompt, **asked).timings for prompt in prompts]
    times = {"ttft": spread([run.ttft_s for run in runs]), "tpot": spread([run.tpot_s for run in runs])}
    return {"prompt": length, **times}


def batch(model: Any, length: int, new_tokens: int) -> dict[str, Any] | None:
    """Several requests at once; None where the bundle has not so many rows."""
    rows, vocab = models.ROWS, model.manifest.geometry.vocab_size
    if model.manifest.limits.max_batch < rows:
        return None

    def tpot(salt: int) -> float:
        prompts = [arbitrary(length, vocab, salt + i) for i in range(rows)]
        asked = [model.request(ids, max_tokens=new_tokens, temperature=0, ignore_eos=True) for ids in prompts]
        results = [handle.result() for handle in [model.submit(request) for request in asked]]
        return statistics.median(result.timings.tpot_s for result in results)

    _, *found = [tpot(1000 + 100 * number) for number in range(1 + ROUNDS)]
    return {"rows": rows, "prompt": length, "tpot": spread(found), "tokens_per_s": rows / statistics.median(found)}


def step_bytes(manifest: Any) -> dict[str, int]:
    """Bytes that a decode step must read: of the weights, and of the cache for each position that it attends to."""
    plan = manifest.memory if manifest.device is None else manifest.device
    weights = manifest.graphs["decode"].step_weight_bytes
    return {"weight_bytes": weights, "cache_bytes_per_position": plan.cache_per_token}


def buckets(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Seconds of a decode step whose last position is the last one of each bucket of the cache, and their slope.

    What the cache holds does not matter for that, so nothing is fed before.
    """
    with models.opened(target, geometry, precision, options) as model:
        engine, context, found = model.manifest.engine, model.runner.max_context, []
        ends = sorted({min(end, context) for end in (engine.buckets if engine is not None else LENGTHS)})
        for end in ends:
            steps(model, [end - 1] * STEPS)  # allocates, and captures what can be captured
            found.append({"positions": end, **steps(model, [end - 1] * STEPS)})
        slope = statistics.linear_regression(ends, [step["p50_s"] for step in found]).slope if len(ends) > 1 else None
        return {"steps": found, "s_per_position": slope, **step_bytes(model.manifest)}
