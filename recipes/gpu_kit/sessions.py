"""Items that run bundles: placement, goldens, speed, first tokens, kernels, threads, loads, and a build."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import FAKE, LIMIT, TARGET, WORK, distance, expect, main, middle, report, timed, use_doubles
from weights import SPEC, WEIGHTS, write_weights

os.environ["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] = "1"
POSITIONS = (8, 12) if FAKE else (128, 1024, 4000)
STEPS = 4 if FAKE else 64
LENGTHS = (8, 24, 3) if FAKE else (100, 2040, 20)  # prompt lengths for first tokens: from, to, number
CHUNKS = (4, 16) if FAKE else (256, 2048)
CALLS = 6 if FAKE else 200  # per thread, of two
CUDNN = 8  # its bit among ONNX Runtime's attention kernels


@contextmanager
def open_model(name: str, recordings: int | None = None, fast: str = "1") -> Iterator[Any]:
    """Load a bundle; ``recordings`` is the most CUDA graphs to record, ``fast`` turns on integer kernels."""
    if FAKE:
        use_doubles()
    from llmc.runtime import load
    from llmc.runtime.sessions.onnxruntime import cuda, cuda_provider

    most = cuda.MOST_RECORDINGS if recordings is None else recordings
    with mock.patch.dict(cuda_provider.SESSION_ENTRIES, {cuda_provider.FAST_KERNELS: fast}):
        with mock.patch.object(cuda, "MOST_RECORDINGS", most):
            emulate = TARGET == "cpu" and not FAKE
            with load(find(name), self_test=False, emulate=emulate, prefix_cache_bytes=0) as model:
                yield model


def find(name: str) -> Path:
    """The folder of a bundle; missing weights are written now."""
    model, _, precision = name.partition("-")
    if FAKE and model in ("1b", "0.5b") and precision != "fp16":  # their steps take half a minute on CPUs
        name = f"llama-g4-{precision}"
    folder = WORK / "tiny" / name
    if not folder.exists():
        folder = WORK / "speed" / name
        if (folder / SPEC).exists() and not (folder / WEIGHTS).exists():
            write_weights(folder)
    return folder


def draw(model: Any, count: int, seed: int = 0) -> list[int]:
    return list(np.random.default_rng(seed).integers(3, model.manifest.geometry.vocab_size, count).tolist())


# ------------------------------------------------------------------------------------------------------- results


def library(name: str) -> None:
    """Import the library; list the files it loads and the provider of each operator."""
    import onnxruntime

    report(version=onnxruntime.__version__, file=onnxruntime.__file__, providers=onnxruntime.get_available_providers())
    capi = Path(onnxruntime.__file__).parent / "capi"
    for provider in capi.glob("libonnxruntime_providers_cuda.so"):
        linked = subprocess.run(["ldd", provider], capture_output=True, text=True).stdout
        report(not_on_the_path=[line.split()[0] for line in linked.splitlines() if "not found" in line])
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llmc").addHandler(handler)
    with open_model(name) as model:
        report(engine=model.engine_version, processor=model.processor)
        model.runner.prefill(draw(model, 16))
        if FAKE or TARGET == "cuda":
            session = model.runner.session._graph.session
            placed = Counter(
                f"{part.ep_name.removesuffix('ExecutionProvider')} {node.op_type}"
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
            )
            report(used=session.get_providers(), placed=placed)
            expect("CUDAExecutionProvider" in session.get_providers(), "not on the GPU")
        maps = {
            Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line
        }
        report(maps=sorted(each for each in maps if each.startswith(("libcu", "libonnx", "libnv"))))
    expect(not warnings, "; ".join(warnings))


def golden(name: str) -> None:
    """Compare with the CPU's logits: steps recorded or not, prompts in chunks, rows in a batch, a growing cache."""
    known = np.load(WORK / "tiny" / f"{name}.npz")
    ids, wanted = known["ids"].tolist(), known["logits"]
    logits = {}
    for way, recordings in (("plain", 0), ("recorded", None)):
        with open_model(name, recordings) as model:
            logits[way] = replay(model.runner, ids, len(wanted))
            compare(**{way: distance(logits[way], wanted)})
            if way == "recorded":
                report(graphs=getattr(model.runner.session, "_recordings", None))
                compare(chunks=distance(model.runner.prefill(ids[: 1 - len(wanted)], chunk=CHUNKS[0])[0], wanted[:1]))
                compare(rows=compare_rows(model.runner.session, ids))
    report(equal_bits=bool(np.array_equal(logits["plain"], logits["recorded"])))
    with open_model(name) as model:  # from the smallest cache up
        model.runner.prefill(ids[:250])
        grown = np.stack([model.runner.step(ids[position], position)[0, 0].copy() for position in range(250, 260)])
        model.runner.reserve(len(ids))
        whole = np.stack([model.runner.step(ids[position], position)[0, 0].copy() for position in range(250, 260)])
        compare(growth=distance(grown, whole))


def compare(**distances: float) -> None:
    report(**distances)
    for name, value in distances.items():
        expect(value <= LIMIT, f"{name} is {value:.3g} away, at most {LIMIT} expected")


def replay(runner: Any, ids: Sequence[int], count: int) -> Any:
    """Logits after the prompt and after each of the last ``count - 1`` tokens."""
    start = len(ids) - count + 1
    rows = [runner.prefill(ids[:start])[0, 0].copy()]
    return np.stack(rows + [runner.step(ids[position], position)[0, 0].copy() for position in range(start, len(ids))])


def compare_rows(session: Any, ids: Sequence[int]) -> float:
    """The distance between rows decoded together and each row alone."""
    from llmc.runtime.sessions import Batch, Phase

    past = [40, 47, 61, 90]
    session.cache.reserve(len(past), session.cache.capacity)
    for row, length in enumerate(past):
        session.run(
            Batch.of(Phase.PREFILL, np.array([ids[:length]]), np.zeros(1, np.int64), np.zeros((1, 0), np.int64), row)
        )
    tokens, zeros = np.array(ids[100:104])[:, None], np.zeros((4, 1), np.int64)
    together = session.run(Batch.of(Phase.DECODE, tokens, np.array(past), zeros))[:, 0].copy()
    calls = [
        Batch.of(Phase.DECODE, tokens[row : row + 1], np.array(past[row : row + 1]), zeros[:1], row) for row in range(4)
    ]
    return distance(np.stack([session.run(call)[0, 0].copy() for call in calls]), together)


# --------------------------------------------------------------------------------------------------------- speed


def speed(name: str, fast: str, *variables: str) -> None:
    """Milliseconds of a step and of a prompt, plain and recorded; of the engine's steps; and memory beside the plan."""
    os.environ.update(variable.split("=") for variable in variables)
    from llmc.runtime.sessions.onnxruntime import cuda

    free, begin = free_memory(), time.perf_counter()
    with open_model(name, 0, fast) as model:
        load_s = time.perf_counter() - begin
        runner, weights = model.runner, model.manifest.step_weight_bytes
        ids, more = draw(model, max(POSITIONS) + STEPS), {}
        runner.reserve(len(ids))
        for way, most in (("plain", 0), ("graph", 512)):
            cuda.MOST_RECORDINGS = most  # type: ignore[misc]
            runner.session.cache.reserve(1 + (way == "graph"), len(ids))  # grows, and drops bindings
            for past in POSITIONS:
                prompt = timed(lambda past=past: runner.prefill(ids[:past]), 3)
                positions = iter(range(past, past + STEPS))
                step = partial(lambda at: runner.step(ids[0], next(at)), positions)
                times = timed(step, STEPS)[2:]  # the first two record the graph
                report(**{f"{way}_{past}_ms": middle(times)})
                more[f"{way}_{past}"] = {
                    "gb_s": weights / middle(times) / 1e6,
                    "p95_ms": float(np.percentile(times, 95)),
                    "prefill_ms": middle(prompt),
                    "first_prefill_ms": prompt[0],
                }
            report(**{f"{way}_recordings": getattr(runner.session, "_recordings", None)})
        report(engine_ms=time_engine(model, ids), load_s=load_s, weight_mb=weights / 1e6, more=more)
        plan = model.manifest.device.total(runner.session.cache.capacity, runner.session.cache.rows)
        report(plan_mb=plan // 10**6, taken_mb=(free - free_memory()) // 10**6 if free else "needs a GPU")


def time_engine(model: Any, ids: list[int]) -> float:
    """Median milliseconds between greedy tokens of the engine."""
    from llmc.runtime.api.request import Request
    from llmc.runtime.bench.benchmark import Clock
    from llmc.runtime.sampling.params import SamplingParams

    clock = Clock()
    params = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)
    model.submit(Request(ids[: POSITIONS[0]], params, on_delta=clock.note)).result()
    return middle((1e3 * np.diff(clock.tokens)).tolist())


def free_memory() -> int:
    """Free bytes of the GPU, by its own tool; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0


def first_token(name: str, kernels: str = "") -> None:
    """Milliseconds to the first token of prompts with new lengths, in small and large chunks."""
    from llmc.runtime.sessions.onnxruntime import cuda_provider

    if kernels == "cudnn":
        cuda_provider.ATTENTION_KERNELS |= CUDNN  # type: ignore[misc]
    low, high, count = LENGTHS
    lengths = np.random.default_rng(1).permutation(np.arange(low, high))[: count * len(CHUNKS)].reshape(len(CHUNKS), -1)
    with open_model(name) as model:
        ids = draw(model, high)
        for chunk in CHUNKS:
            model.runner.prefill(ids, chunk=chunk)  # allocates for the longest
        for chunk, row in zip(CHUNKS, lengths.tolist(), strict=True):
            times = [timed(lambda n=n, chunk=chunk: model.runner.prefill(ids[:n], chunk=chunk), 1)[0] for n in row]
            report(**{f"chunk_{chunk}": {"median_ms": middle(times), "worst_ms": max(times)}})
            print(sorted(zip(row, times, strict=True)))
            if not FAKE:
                expect(max(times) <= 3 * middle(times), f"chunks of {chunk}: the worst is over 3 medians")


def kernels(name: str) -> None:
    """Kernels of 20 unrecorded steps: microseconds and calls per step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] if FAKE else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    count = 2 if FAKE else 20
    with open_model(name, 0) as model:
        ids = draw(model, POSITIONS[1] + count + 2)
        model.runner.prefill(ids[: POSITIONS[1]])
        with profile(activities=kinds) as seen:
            for position in range(POSITIONS[1], POSITIONS[1] + count):
                model.runner.step(ids[0], position)
    events = [event for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: -event.device_time_total)
    report(kernels_per_step=sum(event.count for event in events) / count if events else "needs a GPU")
    report(step_us=sum(event.device_time_total for event in events) / count)
    report(us_per_step={e.key[:60]: round(e.device_time_total / count, 1) for e in events[:25]})


# ------------------------------------------------------------------------------------------------------- the rest


def threads(*names: str) -> None:
    """Run two bundles in two threads, with prompts, steps and growing caches at the same time: CUDA's error 900."""
    failures: Counter[str] = Counter()

    def work(model: Any, seed: int) -> None:
        ids = draw(model, 600, seed)
        for call in range(CALLS):
            try:
                model.runner.prefill(ids[: 20 + call % 7])
                for position in range(30, 34):
                    model.runner.step(ids[position], position + 2 * call)
            except Exception as error:  # noqa: BLE001  # counted
                failures[f"{type(error).__name__}: {error}"[:200]] += 1

    with open_model(names[0]) as one, open_model(names[1]) as two:
        started = [threading.Thread(target=work, args=(model, seed)) for seed, model in enumerate((one, two))]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    report(calls=2 * CALLS, failures=dict(failures))
    expect(not failures, f"{sum(failures.values())} calls failed")


def loads(name: str) -> None:
    """Check that two loads of one bundle compute the same bits."""
    known, logits = np.load(WORK / "tiny" / f"{name}.npz"), []
    for fast in "0011":
        with open_model(name, fast=fast) as model:
            logits.append(replay(model.runner, known["ids"].tolist(), len(known["logits"])))
    compare(two_loads=distance(logits[1], logits[0]), two_loads_fpa=distance(logits[3], logits[2]))
    report(equal_bits=np.array_equal(*logits[:2]), equal_bits_fpa=np.array_equal(*logits[2:]))


def build() -> None:
    """Build the tiny export with its gate, on the device if there is one."""
    command = [sys.executable, "-m", "llmc.cli", "build", str(WORK / "export"), "-o", str(WORK / "built"), "--force"]
    ended = subprocess.run(
        [*command, "--target", TARGET, "--int8", "--max-context", "512"], capture_output=True, text=True
    )
    print(ended.stdout, ended.stderr)
    report(code=ended.returncode, said=(ended.stderr or ended.stdout).strip().splitlines()[-1:])
    expect(ended.returncode == 0, "the build failed")


def doctor() -> None:
    command = [sys.executable, "-m", "llmc.cli", "doctor"]
    ended = subprocess.run(command, capture_output=True, text=True)
    print(ended.stdout, ended.stderr)
    report(lines=[line.removeprefix("target ") for line in ended.stdout.splitlines() if line.startswith("target cu")])


ALL = (library, golden, speed, first_token, kernels, threads, loads, build, doctor)
ITEMS = {item.__name__: item for item in ALL}
if __name__ == "__main__":
    main(ITEMS)
