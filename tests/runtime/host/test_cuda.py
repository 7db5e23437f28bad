"""CUDA's driver behind a few calls: each asks the driver as its documentation says, and every failure has a remedy."""

import enum
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles.caches import read, write
from doubles.cuda import array_at
from doubles.geometries import uniform
from doubles.null_cuda import environment

from llmc.errors import GpuError, LlmcError, ResourceError
from llmc.runtime.host import cuda
from llmc.runtime.host.cuda import COPIES, LEAST_COPIED, DeviceInfo, Driver, open_driver
from llmc.runtime.kv.device_cache import DeviceCache

TESTS = Path(__file__).parents[2]
CUresult = enum.IntEnum(
    "CUresult",
    {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_OUT_OF_MEMORY": 2,
        "CUDA_ERROR_NO_DEVICE": 100,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": 901,
        "CUDA_ERROR_UNKNOWN": 999,
    },
)


class Attribute(enum.Enum):
    """Of a device."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18


ANSWERS: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (13000,),
    "cuDeviceGet": (7,),
    "cuDeviceGetName": (b"NVIDIA Test" + b"\0" * 89,),
    "cuDeviceTotalMem": (8_000_000_000,),
    "cuDevicePrimaryCtxRetain": ("context",),
    "cuMemGetInfo": (3_000_000_000, 8_000_000_000),
    "cuMemAlloc": (4096,),
    "cuMemHostAlloc": (8192,),
    "cuMemHostGetDevicePointer": (12288,),
    "cuStreamCreate": (21,),
    "cuThreadExchangeStreamCaptureMode": ("global",),
    "cuStreamEndCapture": (31,),
    "cuGraphInstantiate": (32,),
}


class Api:
    """The module ``cuda.bindings.driver``: records calls, and returns what the real functions return."""

    CUDA_VERSION = 13050
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUdevice_attribute = Attribute
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread local")
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_UNIFIED="unified")
    CUDA_MEMCPY2D = SimpleNamespace

    def __init__(self, integrated: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, Any] = {}
        self.hooks: dict[str, Callable[[], Any]] = {}
        self.answers = dict(ANSWERS)
        self.attributes = {75: 8, 76: 7, 18: int(integrated)}

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            self.hooks.get(name, lambda: None)()
            code = self.codes.get(name, CUresult.CUDA_SUCCESS)
            if isinstance(code, Exception):
                raise code
            if name == "cuDeviceGetAttribute":
                return code, self.attributes[arguments[0].value]
            found = self.answers.get(name, ())
            return (code, *([None] * len(found) if int(code) else found))

        return call

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def driver(api: Api) -> Driver:
    """Opened, and what that took forgotten."""
    driver = Driver(api)
    api.calls.clear()
    return driver


def test_opening_describes_the_gpu_and_takes_its_primary_context(api):
    driver = Driver(api)
    assert driver.device == DeviceInfo("NVIDIA Test", "8.7", 8_000_000_000, integrated=False, driver_version="13.0")
    assert api.calls[0] == ("cuInit", 0)
    assert ("cuDeviceGet", 0) in api.calls
    opened = [("cuDevicePrimaryCtxRetain", 7), ("cuCtxSetCurrent", "context")]
    assert api.calls[-3:] == [*opened, ("cuThreadExchangeStreamCaptureMode", "thread local")]
    driver.close()
    driver.close()
    assert api.names().count("cuDevicePrimaryCtxRelease") == 1


def test_each_thread_is_exempt_from_what_others_record_before_its_first_call(driver, api):
    threads = [threading.Thread(target=driver.synchronize, args=(21,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
        first, exempt, call = (name for name, *_ in api.calls[-3:])
        assert (first, exempt, call) == ("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuStreamSynchronize")
        assert api.calls[-2][1] == "thread local"
    driver.synchronize(21)
    assert api.names()[-2:] == ["cuStreamSynchronize"] * 2


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "size"), [(8 * GIB, GIB), (4 * GIB, GIB), (GIB, GIB // 4), (4 * LEAST_COPIED, LEAST_COPIED)]
)
def test_copy_bandwidth_counts_reads_and_writes_between_two_events(driver, api, free, size):
    api.answers |= {"cuMemGetInfo": (free, 80 * GIB), "cuEventCreate": (41,), "cuEventElapsedTime": (8.0,)}
    assert driver.copy_bandwidth() == 2 * COPIES * size / 0.008
    events = [call for call in api.calls if call[0].startswith(("cuEvent", "cuMemcpy", "cuStreamSync"))]
    copies = [("cuMemcpyDtoDAsync", 4096, 4096, size, 21)] * COPIES
    timed = [("cuEventRecord", 41, 21), *copies, ("cuEventRecord", 41, 21), ("cuStreamSynchronize", 21)]
    assert events[3:-3] == timed
    assert {name: api.names().count(name) for name in ("cuMemFree", "cuEventDestroy", "cuStreamDestroy")} == {
        "cuMemFree": 2,
        "cuEventDestroy": 2,
        "cuStreamDestroy": 1,
    }


def test_too_little_free_memory_tells_nothing_of_the_bandwidth(driver, api):
    for free in (0, 4 * LEAST_COPIED - 4):
        api.answers["cuMemGetInfo"] = (free, GIB)
        with pytest.raises(ResourceError, match=rf"takes 268 MB of free GPU memory, {free // 10**6} MB are free"):
            driver.copy_bandwidth()
    assert "cuMemAlloc" not in api.names()


def test_too_little_memory_says_what_was_asked_and_what_is_free(driver, api):
    api.codes["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ResourceError, match="allocating 123 bytes of GPU memory failed: 3000 of 8000 MB are free"):
        driver.alloc(123)
    api.codes["cuMemGetInfo"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ResourceError, match="no memory is left; lower the context"):
        driver.alloc(123)


def test_a_lost_context_is_remembered_and_nothing_else_is_tried(driver, api):
    api.codes["cuStreamSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(GpuError, match=r"lost while waiting for the GPU \(CUDA_ERROR_ILLEGAL_ADDRESS, 700\)") as caught:
        driver.synchronize(21)
    assert caught.value.lost
    api.calls.clear()
    with pytest.raises(GpuError, match="lost while waiting") as caught:
        driver.free(4096)
    assert caught.value.lost
    assert api.calls == []
    driver.close()


@pytest.mark.parametrize(
    ("name", "code", "match"),
    [
        (
            "cuInit",
            RuntimeError("Failed to dlopen libcuda.so.1"),
            r"no NVIDIA driver was found .*libcuda.*install.*--emulate",
        ),
        ("cuInit", CUresult.CUDA_ERROR_NO_DEVICE, "starting CUDA failed .*100.*: no GPU is visible; check nvidia-smi"),
        ("cuInit", 34, "libcuda is the stub of the toolkit"),
        ("cuDevicePrimaryCtxRetain", 46, "opening the GPU failed .*the GPU is in use"),
    ],
)
def test_a_gpu_that_cannot_be_opened_comes_with_what_to_do(api, name, code, match):
    api.codes[name] = code
    with pytest.raises(GpuError, match=match) as caught:
        Driver(api)
    assert not caught.value.lost


def test_a_driver_older_than_the_bindings_is_refused_with_both_remedies(api):
    api.answers["cuDriverGetVersion"] = (12060,)
    with pytest.raises(
        GpuError, match=r"supports CUDA 12\.6, .* need 13\.0 .* 'cuda-bindings<13', or update the driver"
    ):
        Driver(api)


def test_where_there_is_no_driver_opening_says_so():
    pytest.importorskip("cuda.bindings.driver")
    if any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu")):
        pytest.skip("there is a GPU here")
    with pytest.raises(LlmcError, match=r"no NVIDIA driver was found|starting CUDA failed"):
        open_driver()


BY_ITSELF = """
import pickle, sys
from pathlib import Path
from doubles.modules import load_file
from llmc.runtime.host.cuda import open_driver
tests, manifest = load_file(Path(sys.argv[1])), pickle.load(sys.stdin.buffer)
for test, given in ((tests.test_a_gpu_copies_records_and_clears, ()), (tests.test_a_gpu_keeps_a_cache, (manifest,))):
    driver = open_driver()
    test(driver, *given)
    driver.close()
"""


def test_the_tests_of_a_real_driver_pass_with_the_real_bindings_without_a_device(null_cuda, manifest):
    """On an integrated GPU, which is asked for more, of little memory, so that copies are quick."""
    pytest.importorskip("cuda.bindings.driver")
    settings = environment(null_cuda, TESTS, NULL_CUDA_INTEGRATED="1", NULL_CUDA_MEMORY_MB="300")
    command = [sys.executable, "-c", BY_ITSELF, __file__]
    child = subprocess.run(command, input=pickle.dumps(manifest), env=settings, capture_output=True, timeout=120)
    assert child.returncode == 0, child.stderr.decode()[-3000:]


@pytest.fixture
def gpu() -> Iterator[cuda.Driver]:
    """A GPU, where there is one."""
    try:
        driver = open_driver()
    except LlmcError as error:
        pytest.skip(str(error))
    yield driver
    driver.close()


@pytest.mark.gpu
def test_a_gpu_copies_records_and_clears(gpu):
    stream, host, device = gpu.stream(), gpu.alloc_host(64), gpu.alloc(64)
    values = array_at(host, (16,), np.int32)
    values[:] = range(16)
    gpu.copy(device, host, 64, stream)
    gpu.begin_capture(stream)
    gpu.copy_2d(host, 16, device + 32, 8, 8, 2, stream)
    graph = gpu.end_capture(stream)
    gpu.synchronize(stream)
    values[:] = -1
    gpu.launch(graph, stream)
    gpu.synchronize(stream)
    assert values.tolist() == [8, 9, -1, -1, 10, 11, *[-1] * 10]
    gpu.fill(device, 64, stream)
    gpu.copy(host, device, 64, stream)
    gpu.synchronize(stream)
    assert not values.any()
    free, total = gpu.memory_info()
    assert 0 < free < total == gpu.device.total_memory
    with pytest.raises(ResourceError, match=r"allocating \d+ bytes of GPU memory failed: \d+ of \d+ MB are free"):
        gpu.alloc(2 * total)
    if gpu.device.integrated:
        assert gpu.device_address(host)
    gpu.begin_capture(stream)
    gpu.drop_capture(stream)
    gpu.drop_capture(stream)
    gpu.synchronize(stream)
    assert gpu.copy_bandwidth() > 1e10
    gpu.destroy_graph(graph)
    gpu.free(device)
    gpu.free_host(host)
    gpu.destroy_stream(stream)


@pytest.mark.gpu
def test_a_gpu_keeps_a_cache(gpu, manifest):
    stream = gpu.stream()
    geometry = uniform("llama", 2, 64, 128, 4, 2, 16, 320, 512, True, (0, 0))
    limits = replace(manifest.limits, max_batch=3)
    cache = DeviceCache(replace(manifest, geometry=geometry, limits=limits, cache="float16", engine=None), gpu, stream)
    cache.reserve(2, 32)
    values = np.random.default_rng(0).random((4, 2, 20, 16)).astype(np.float16)
    write(cache, 1, 5, values)
    cache.copy(1, 0, 7, 20)
    cache.reserve(3, 64)
    assert np.array_equal(read(cache, 1, 5, 25), values)
    assert np.array_equal(read(cache, 0, 7, 20), values[:, :, 2:15])
    assert not cache.read(2, 0, 64).any()
    cache.close()
    gpu.destroy_stream(stream)
