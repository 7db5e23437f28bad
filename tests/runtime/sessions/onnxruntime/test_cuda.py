"""The CUDA session on doubles: a GPU in host memory, and ONNX Runtime's CPU kernels behind its CUDA provider."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.cuda import ORIN, SERVER, FakeDriver, GlobalCapture
from doubles.onnxruntime_cuda import EngineError, FakeOnnxRuntime

from llmc.bundle import Manifest, read_bundle
from llmc.errors import GpuError, LlmcError, MissingExtraError, ResourceError, UsageError
from llmc.runtime import load
from llmc.runtime.sampling.truncation import ACCURACY
from llmc.runtime.sessions import Batch, Phase, Session, emulate_target, open_session
from llmc.runtime.sessions.onnxruntime.cuda import CudaSession
from llmc.runtime.sessions.onnxruntime.cuda_provider import check_provider

ROWS = 3
CHUNK = 130  # the longest prompt; a call of so many tokens is run while loading
GENERATOR = np.random.default_rng(0)
PROMPTS = [GENERATOR.integers(3, 4096, length).tolist() for length in (5, 130, 37)]
ANSWERS = [GENERATOR.integers(3, 4096, 6).tolist() for _ in PROMPTS]


# --------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def built(layer_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A layer of the small model built for the CUDA target in a precision, once."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    folder, made = tmp_path_factory.mktemp("cuda"), dict[str, Path]()

    def get(precision: str) -> Path:
        if precision not in made:
            limits: dict[str, Any] = {"max_context": 512, "max_batch": ROWS}
            made[precision] = build(
                BuildRequest(layer_export, folder / precision, target="cuda", precision=precision, **limits)
            ).output
        return made[precision]

    return get


@pytest.fixture(params=["fp16", "int4", "fp32"])
def bundle(request: pytest.FixtureRequest, built: Callable[[str], Path]) -> Path:
    """A bundle in every kind of arithmetic."""
    return built(request.param)


@pytest.fixture
def fp16_bundle(built: Callable[[str], Path]) -> Path:
    return built("fp16")


@pytest.fixture
def opened() -> Iterator[Callable[..., CudaSession]]:
    """Opens sessions with room for three rows, and sees to it that nothing is left behind."""
    sessions: list[CudaSession] = []

    def start(
        folder: Path,
        driver: FakeDriver | None = None,
        change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        **options: Any,
    ) -> CudaSession:
        driver = FakeDriver() if driver is None else driver
        runtime = FakeOnnxRuntime(driver, **options)
        manifest = read_bundle(folder)
        manifest = replace(manifest, limits=replace(manifest.limits, prefill_chunk=CHUNK))
        session = CudaSession(folder, change(manifest), 1, driver=driver, runtime=runtime)
        sessions.append(session)
        session.cache.reserve(ROWS, 256)
        runtime.runs.clear()  # of what it takes to load
        return session

    yield start
    for session in sessions:
        session.close()
        session.close()
        assert session._driver.closed
        assert session._lost or session._driver.leaks == []  # on a lost GPU nothing can be freed


@pytest.fixture
def reference(bundle: Path) -> Iterator[Session]:
    """The same graph on the CPU."""
    session = open_session(bundle, emulate_target(read_bundle(bundle)), 1)
    session.cache.reserve(ROWS, 256)
    yield session
    session.close()


def prefill(session: Session, prompt: list[int], row: int = 0) -> np.ndarray:
    last = np.array([[len(prompt) - 1]])
    return session.run(Batch.of(Phase.PREFILL, np.array([prompt]), np.zeros(1, np.int64), last, row))[0, 0].copy()


def decode(session: Session, tokens: list[int], past: list[int], first_row: int = 0) -> np.ndarray:
    ids, zeros = np.array(tokens, np.int64)[:, None], np.zeros((len(tokens), 1), np.int64)
    return session.run(Batch.of(Phase.DECODE, ids, np.array(past, np.int64), zeros, first_row))[:, 0].copy()


# ------------------------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("device", [SERVER, ORIN], ids=lambda device: device.name)
def test_every_call_equals_the_same_graph_on_the_cpu(bundle, opened, reference, device):
    """A prompt in each row, a ragged batch of steps, recorded from the second on, drafts, and no logits at all."""
    session = opened(bundle, FakeDriver(device))
    calls = [
        Batch.of(Phase.PREFILL, np.array([p]), np.zeros(1, int), np.array([[3, 0]]), r) for r, p in enumerate(PROMPTS)
    ]
    past = np.array([len(prompt) for prompt in PROMPTS])
    zeros = np.zeros((3, 1), int)
    steps = [np.array([[answer[i]] for answer in ANSWERS]) for i in range(4)]
    calls += [Batch.of(Phase.DECODE, step, past + i, zeros) for i, step in enumerate(steps)]
    drafted = np.array([answer[:3] for answer in ANSWERS])
    calls.append(Batch.of(Phase.DECODE, drafted, past, np.tile(np.arange(3), (3, 1))))
    calls.append(Batch.of(Phase.PREFILL, drafted[:1], past[:1] + 3, np.zeros((1, 0), int)))
    calls.append(Batch.of(Phase.PREFILL, np.array([PROMPTS[1]]), past[:1], np.arange(130)[None]))
    for call in calls:
        found, wanted = session.run(call), reference.run(call)
        assert np.array_equal(found, wanted)
        assert found.dtype == np.float32


@pytest.mark.parametrize("device", [SERVER, ORIN], ids=lambda device: device.name)
def test_candidates_are_the_most_probable_tokens_of_the_rows_which_stay_on_the_gpu(bundle, opened, reference, device):
    session = opened(bundle, FakeDriver(device))
    past = np.array([len(prompt) for prompt in PROMPTS])
    calls = [
        Batch.of(Phase.PREFILL, np.array([p]), np.zeros(1, int), np.array([[len(p) - 1]]), row)
        for row, p in enumerate(PROMPTS)
    ]
    steps = [np.array([[answer[i]] for answer in ANSWERS]) for i in range(4)]  # the last ones are replayed
    calls += [Batch.of(Phase.DECODE, step, past + i, np.zeros((3, 1), int)) for i, step in enumerate(steps)]
    calls += [Batch.of(Phase.DECODE, np.array([[5, 6, 7]]), past[1:2], np.arange(3)[None], 1)]  # drafts
    for call in calls:
        before = session._driver.copied["host", "device"]
        ranked, rows = session.run_ranked(call), reference.run(call)
        assert ranked.shape == rows.shape[:2] == call.logit_indices.shape
        down, fetched = session._driver.copied["host", "device"] - before, []
        assert down <= (0 if device.integrated else 256 * (4 + 8) * ranked.size + 512)
        for found, row in zip(ranked.flat, rows.reshape(-1, rows.shape[-1]), strict=True):
            assert np.array_equal(found.values, np.sort(row)[:-257:-1])
            assert np.array_equal(row[found.ids], found.values) and len(set(found.ids)) == 256
            assert found.total == pytest.approx(np.exp(row.astype(np.float64) - row.max()).sum(), rel=ACCURACY)
            fetched.append(np.array_equal(found.whole(), row))
        assert all(fetched)
        if not device.integrated:
            assert session._driver.copied["host", "device"] - before - down == 4 * rows.size
    stale = ranked.flat[0]
    session.run_ranked(calls[-1])
    with pytest.raises(AssertionError, match="other logits are in that place by now"):
        stale.whole()


# --------------------------------------------------------------------------------------------------------- recordings


def test_a_step_that_comes_again_is_recorded_and_then_replayed(fp16_bundle, opened):
    session = opened(fp16_bundle)
    prefill(session, PROMPTS[2])
    session._runtime.runs.clear()
    found = [decode(session, [token], [37 + i]) for i, token in enumerate(ANSWERS[0])]
    assert session._runtime.runs == [-1, 1, 1, 1, 1, 1]
    assert session._runtime.replays == 4
    again = opened(fp16_bundle, records=False)
    prefill(again, PROMPTS[2])
    wanted = [decode(again, [token], [37 + i]) for i, token in enumerate(ANSWERS[0])]
    assert np.array_equal(found, wanted)


def test_a_recording_is_not_another_threads(fp16_bundle, opened):
    """Loading replays golden prompts in one thread, and the engine serves in its own."""
    session = opened(fp16_bundle)
    found = [decode(session, [5], [0]) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        found += [pool.submit(decode, session, [5], [0]).result() for _ in range(3)]
    assert all(np.array_equal(each, found[0]) for each in found)
    assert session._runtime.runs == [-1, 1, 1, -1, 2, 2]


def test_a_library_that_cannot_record_is_used_without(fp16_bundle, opened, caplog):
    session = opened(fp16_bundle, records=False)
    for _ in range(3):
        decode(session, [5], [0])
    assert session._runtime.runs == [-1, -1, -1]
    assert session._runtime.options["enable_cuda_graph"] == "0"
    assert "ONNX Runtime cannot record decoder.onnx as a CUDA graph" in caplog.text


# A failure that a recording may end with; none of them says anything of the call itself.
SPOILED = [
    "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0",
    "CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR ; GPU=0",
    "CUDA failure 2: out of memory ; GPU=0",
    "No valid fpA_intB MatMulNBits tactic for M=1. The M bucket was not profiled before CUDA graph capture",
]


def spoil(capture: GlobalCapture) -> None:
    capture.spoiled = True


def fail_with(text: str) -> Callable[[GlobalCapture], None]:
    def fail(capture: GlobalCapture) -> None:
        raise EngineError(f"[ONNXRuntimeError] : 1 : FAIL : {text}")

    return fail


@pytest.mark.parametrize("fails", [spoil, *map(fail_with, SPOILED)], ids=["spoiled", *(text[:16] for text in SPOILED)])
def test_a_step_whose_recording_fails_is_answered_without_and_recorded_later(fp16_bundle, opened, caplog, fails):
    session, other = opened(fp16_bundle), opened(fp16_bundle, records=False)
    for each in (session, other):
        prefill(each, PROMPTS[2])
    session._runtime.runs.clear()
    found, wanted = ([decode(it, [5], [37])] for it in (session, other))
    session._runtime.during_recording = fails
    found.append(decode(session, [6], [38]))
    session._runtime.during_recording = lambda capture: None
    found += [decode(session, [7 + i], [39 + i]) for i in range(2)]
    wanted += [decode(other, [6 + i], [38 + i]) for i in range(3)]
    assert np.array_equal(found, wanted)
    assert session._runtime.runs == [-1, 1, -1, 2, 2]
    assert "run without its CUDA graph" in caplog.text


def test_a_context_that_is_lost_while_recording_is_lost(fp16_bundle, opened):
    """ONNX Runtime says it without a number, so the driver is asked."""
    session = opened(fp16_bundle)
    decode(session, [5], [0])

    def lose(capture: GlobalCapture) -> None:
        session._driver.kill()
        raise EngineError("CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered")

    session._runtime.during_recording = lose
    for _ in range(2):
        with pytest.raises(GpuError) as caught:
            decode(session, [5], [0])
        assert caught.value.lost
    assert session._runtime.runs == [-1, 1]


@pytest.mark.parametrize(("precision", "wanted"), [("fp16", ("1", "1")), ("fp32", ("0", "0"))])
def test_float32_is_not_recorded_and_not_rounded_to_tf32(built, opened, precision, wanted):
    options = opened(built(precision))._runtime.options
    assert (options["enable_cuda_graph"], options["use_tf32"]) == wanted


def test_attention_is_never_cudnns_and_the_gpu_is_the_one_asked_for(fp16_bundle, opened):
    options = opened(fp16_bundle, FakeDriver(replace(SERVER, index=1)))._runtime.options
    assert (options["sdpa_kernel"], options["device_id"]) == ("19", "1")
    assert "device_id" not in opened(fp16_bundle)._runtime.options  # it prints a warning


def test_the_fast_kernels_for_integer_weights_are_asked_for(built, opened):
    settings = opened(built("int4"))._runtime.settings
    assert settings.get_session_config_entry("ep.cuda.fpa_intb_gemm") == "1"
    assert settings.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


def test_a_gpus_number_is_refused_for_a_bundle_that_runs_on_the_cpu(tiny_bundle):
    with pytest.raises(UsageError, match=r"device is 1, but .* runs on the CPU; leave it out"):
        load(tiny_bundle, device=1)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("number", range(1, 8))
def test_whatever_memory_is_missing_while_loading_nothing_is_left_behind(fp16_bundle, number):
    driver = FakeDriver(fail_alloc=number)
    try:
        session = CudaSession(fp16_bundle, read_bundle(fp16_bundle), 1, driver=driver, runtime=FakeOnnxRuntime(driver))
    except ResourceError:
        assert driver.closed
    else:
        session.close()


# ------------------------------------------------------------------------------------------------------------- errors


def test_the_package_for_cpus_is_named_with_what_to_install():
    """That is what these tests run with."""
    advice = "is the package for CPUs, .*pip install 'onnxruntime-gpu>=.*a Jetson has no wheel: build for"
    with pytest.raises(MissingExtraError, match=advice):
        check_provider(import_module("onnxruntime"), "1.28")


def test_a_provider_that_falls_back_to_the_cpu_is_an_error_with_its_reason(fp16_bundle, opened, capsys):
    driver = FakeDriver()
    with pytest.raises(GpuError, match=r"could not load its CUDA provider \(Failed to load libcublasLt.so.13\)"):
        opened(fp16_bundle, driver, falls_back=True)
    assert capsys.readouterr().out == ""
    assert driver.leaks == []


FAILURES: list[tuple[str, type[LlmcError]]] = [
    ("CUDA failure 98: invalid device function ; GPU=0", GpuError),
    ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0", GpuError),
    ("CUDA failure 2: out of memory ; GPU=0", ResourceError),
    ("BFCArena: Failed to allocate memory for requested buffer of size 4096", ResourceError),
]


@pytest.mark.parametrize(("text", "kind"), FAILURES)
def test_what_fails_on_the_gpu_is_translated(fp16_bundle, opened, text, kind):
    session = opened(fp16_bundle)
    session._runtime.failure = EngineError(f"[ONNXRuntimeError] : 1 : FAIL : {text}")
    with pytest.raises(kind, match="running the model") as caught:
        prefill(session, PROMPTS[0])
    assert not getattr(caught.value, "lost", False)
    session._runtime.failure = None
    prefill(session, PROMPTS[0])
