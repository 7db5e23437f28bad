"""What the session expects of ONNX Runtime's CUDA provider; run by test_real_provider.py in a process of its own.

The provider runs on a stub of CUDA that logs what it is asked for, so results are worthless.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from doubles.null_cuda import Log

from llmc.bundle import read_bundle
from llmc.errors import GpuError, ResourceError
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.onnxruntime.cuda import CudaSession

BUNDLES = Path(os.environ["BUNDLES"])
COPIES = ("do cudaMemcpy", "record cudaMemcpy")  # by the library, not by the session
CHUNK = 1024
FAST, PLAIN = ("fpA_intB", "FpAIntB"), ("MatMulFloat", "Dequantize", "cublas")
ILLEGAL_ADDRESS = 700

precisions = pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.fail(0)
    log.take()


@pytest.fixture
def opened(log: Log) -> Iterator[Callable[[str], CudaSession]]:
    """Opens sessions with room for two rows of 256 positions; the log is empty then."""
    sessions: list[CudaSession] = []

    def start(precision: str) -> CudaSession:
        folder = BUNDLES / precision
        sessions.append(CudaSession(folder, read_bundle(folder), 1))
        sessions[-1].cache.reserve(2, 256)
        log.take()
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


def prefill(session: CudaSession, length: int) -> None:
    ids = np.zeros((1, length), np.int64)
    session.run(Batch.of(Phase.PREFILL, ids, np.zeros(1, np.int64), np.array([[length - 1]])))


def decode(session: CudaSession, past: int, rows: int = 1) -> None:
    zeros = np.zeros((rows, 1), np.int64)
    session.run(Batch.of(Phase.DECODE, zeros, np.full(rows, past), zeros))


def kernels(lines: list[str]) -> list[str]:
    """Names of the kernels and products that ran."""
    words = [line.split(" ", 2) for line in lines if line.startswith(("do kernel", "do cublas", "replay kernel"))]
    return [name if kind == "kernel" else kind for _, kind, name in words]


def total(lines: list[str], *functions: str) -> int:
    """Bytes that were taken or freed with these functions."""
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in functions)


@precisions
def test_all_that_takes_time_is_on_the_gpu_and_can_be_recorded(opened, precision, caplog, capfd):
    session = opened(precision)
    assert session._graph.records
    assert session.processor.startswith("null (9.0)")
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_operators_on_the_cpu_are_named(opened, monkeypatch, caplog):
    monkeypatch.setattr("llmc.runtime.sessions.onnxruntime.cuda_provider.HOST_OPERATORS", frozenset())
    opened("fp16")
    assert "ONNX Runtime computes Cast on the CPU, which is slow" in caplog.text


@precisions
def test_a_step_is_recorded_at_its_second_visit_without_copies_from_the_host(opened, log, precision):
    session, launches = opened(precision), []
    for rows in (1, 2):
        for past in range(4):
            decode(session, past, rows)
            lines = log.take()
            launches.append(sum(line.startswith("launch_graph") for line in lines))
            assert not [line for line in lines if line.startswith(COPIES) and "device<-device" not in line]
            assert not any(line.startswith("forbidden") for line in lines)
    assert launches == [0, 1, 1, 1] * 2
    session.cache.reserve(2, 512)
    log.take()
    for past in range(3):
        decode(session, past)
    assert sum(line.startswith("begin_capture") for line in log.take()) == 1


def test_prompts_of_any_length_take_no_more_memory_than_loading_took(opened, log, monkeypatch):
    def grown() -> int:
        session = opened("fp16")
        session.cache.reserve(1, CHUNK)
        log.take()
        for length in range(CHUNK // 16, CHUNK + 1, CHUNK // 16):
            prefill(session, length)
            decode(session, length - 1)
        return total(log.take(), "cudaMalloc")

    assert grown() == 0
    monkeypatch.setattr(CudaSession, "_take_memory", lambda session: None)
    assert grown() > 0


def test_closing_frees_everything(log):
    session = CudaSession(BUNDLES / "fp16", read_bundle(BUNDLES / "fp16"), 1)
    session.cache.reserve(2, 256)
    for past in range(3):
        decode(session, past)
    session.close()
    lines = log.take()
    assert total(lines, "cudaMalloc", "cuMemAlloc") == total(lines, "cudaFree", "cuMemFree") > 0
    assert total(lines, "cudaMallocHost", "cuMemHostAlloc") == total(lines, "cudaFreeHost", "cuMemFreeHost") > 0
    assert sum(line.startswith("destroy_graph") for line in lines) == 1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_product_of_integers_has_a_fast_kernel(opened, log, precision):
    """With a bias (qkv) and without, of a prompt and of a step."""
    session = opened(precision)
    for call in (prefill, decode):
        call(session, 200)
        names = kernels(log.take())
        assert sum(any(part in name for part in FAST) for name in names) == 5
        assert not [name for name in names if any(part in name for part in PLAIN)]


@pytest.mark.parametrize("capability", ["80", "87", "89", "90"])
def test_steps_have_the_kernel_for_grouped_heads_and_prompts_flash_attention(opened, log, monkeypatch, capability):
    monkeypatch.setenv("NULL_CUDA_CAPABILITY", capability)
    session = opened("fp16")
    prefill(session, 200)
    assert any("flash_fwd" in name for name in kernels(log.take()))
    decode(session, 200)
    assert any("grp4_fp16" in name for name in kernels(log.take()))


def test_a_lost_context_is_found_though_the_library_gives_no_number(opened, log):
    session = opened("fp16")
    decode(session, 0)
    log.fail(ILLEGAL_ADDRESS)
    for _ in range(2):
        with pytest.raises(GpuError, match="CUDA_ERROR_ILLEGAL_ADDRESS, 700") as caught:
            decode(session, 1)
        assert caught.value.lost


@pytest.mark.parametrize("megabytes", [3, 8])
def test_too_little_memory_is_said(log, monkeypatch, megabytes):
    monkeypatch.setenv("NULL_CUDA_MEMORY_MB", str(megabytes))
    monkeypatch.setattr("llmc.runtime.sessions.cuda.session.check_memory", lambda *_: 1 << 40)
    with pytest.raises(ResourceError, match=r"out of GPU memory \((CUDA failure 2: out of|Failed to allocate) memory"):
        CudaSession(BUNDLES / "fp16", read_bundle(BUNDLES / "fp16"), 1)


def test_threads_open_grow_and_record_beside_each_other(log):
    def work(_: int) -> None:
        for _ in range(3):
            session = CudaSession(BUNDLES / "fp16", read_bundle(BUNDLES / "fp16"), 1)
            for capacity in range(64, 512, 64):
                session.cache.reserve(1, capacity)
                for past in range(3):
                    decode(session, past)
            session.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert not any(line.startswith("forbidden") for line in log.take())


def test_recordings_are_those_of_a_thread(opened, log):
    session = opened("fp16")
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            for past in range(3):
                pool.submit(decode, session, past).result()
        assert sum(line.startswith("begin_capture") for line in log.take()) == 1


def test_recordings_that_another_library_spoils_cost_no_answer(opened, log):
    session, done = opened("fp16"), threading.Event()

    def wait_for_the_device() -> None:
        while not done.is_set():
            log.library.cudaStreamSynchronize(None)

    thread = threading.Thread(target=wait_for_the_device)
    thread.start()
    for capacity in range(64, 1024, 64):
        session.cache.reserve(1, capacity)
        for past in range(4):
            decode(session, past)
    done.set()
    thread.join()


def test_the_library_is_the_real_one():
    assert "CUDAExecutionProvider" in onnxruntime.get_available_providers()
