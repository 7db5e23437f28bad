"""Items that only need the driver: the machine, copies, launches, the tests marked gpu, and errors of the driver."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import FAKE, WORK, expect, main, middle, report, timed, use_doubles

PACKAGES = ("torch", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "tokenizers")
QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit,ecc.mode.current,pcie.link.gen.current"
)
COPIED = 1 << (22 if FAKE else 30)  # bytes per buffer for measuring bandwidth
LOGITS = 608_000  # bytes of one row of logits of Qwen2.5
KERNELS = 300  # about as many as a step of a small model launches


def machine() -> None:
    if shutil.which("nvidia-smi"):
        values = subprocess.run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True)
        report(gpu=values.stdout.decode().strip())
        print(subprocess.run(["nvidia-smi", "-q"], capture_output=True).stdout.decode())
    else:
        report(gpu="needs a GPU: no nvidia-smi")
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    disk = shutil.disk_usage(WORK)
    report(versions=versions, python=platform.python_version(), cpus=os.cpu_count(), disk_free_gb=disk.free / 1e9)
    commit = WORK / "llmc" / "COMMIT"
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    report(commit=(commit.read_text() if commit.exists() else subprocess.check_output(head, text=True)).strip())


def copies() -> None:
    """Bandwidth of copies on the device and to it, and the time of a copy, a launch and 300 dependent kernels."""
    driver = open_driver()
    stream = driver.stream()
    one, two, host = driver.alloc(COPIED), driver.alloc(COPIED), driver.alloc_host(COPIED)

    def copy(target: int, source: int, size: int, times: int = 1) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                driver.copy(target, source, size, stream)
            driver.synchronize(stream)

        work()
        return work

    report(device_copy_gb_s=20 * 2 * COPIED / middle(timed(copy(two, one, COPIED, 20), 5)) / 1e6)  # read and written
    report(bench_copy_gb_s="needs a GPU" if FAKE else driver.copy_bandwidth() / 1e9)  # as llmc bench times it
    report(to_device_gb_s=COPIED / middle(timed(copy(one, host, COPIED), 5)) / 1e6)
    report(to_host_gb_s=COPIED / middle(timed(copy(host, one, COPIED), 5)) / 1e6)
    report(logits_to_host_us=1e3 * middle(timed(copy(host, one, LOGITS), 100)))
    report(small_to_host_us=1e3 * middle(timed(copy(host, one, 64), 100)))
    free, total = driver.memory_info()
    report(free_mb=free // 10**6, total_mb=total // 10**6)
    for address in (one, two):
        driver.free(address)
    driver.free_host(host)
    kernels()


def kernels() -> None:
    """Launch 300 dependent kernels of one element each, one by one and as a CUDA graph."""
    import torch

    value = torch.zeros(1, device="cpu" if FAKE else "cuda")

    def launch() -> None:
        for _ in range(KERNELS):
            value.add_(1)

    wait = (lambda: None) if FAKE else torch.cuda.synchronize

    def measure(work: Callable[[], Any]) -> float:
        work()
        return middle(timed(lambda: (work(), wait()), 20))

    report(launch_and_wait_us=1e3 * measure(lambda: value.add_(1)), kernels_ms=measure(launch))
    if FAKE:
        report(kernels_graph_ms="needs a GPU")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    report(kernels_graph_ms=measure(graph.replay))


def gpu_tests() -> None:
    """Run the tests marked gpu; a test that is skipped counts as failed."""
    import llmc

    root = Path(llmc.__file__).parent
    files = [str(path) for path in (root / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-m", "gpu", "-rs", "-q", "-p", "no:cacheprovider"]
    quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # warnings of other plug-ins would be errors
    ended = subprocess.run([*command, *files], cwd=root, env={**os.environ, **quiet}, capture_output=True, text=True)
    print(ended.stdout, ended.stderr)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout)}
    report(**counts)
    if FAKE and counts.get("skipped"):
        report(note="needs a GPU: the tests are skipped")
    else:
        expect(counts.get("passed", 0) >= 2 and not counts.keys() - {"passed"}, f"expected 2 passed, got {counts}")


def errors() -> None:
    """Ask for too much memory, free and fill wrong addresses, end unstarted captures: each must raise llmc's error."""
    driver = open_driver()
    stream = driver.stream()
    sentences = {}
    steps: dict[str, Callable[[], Any]] = {
        "memory": lambda: driver.alloc(1 << 50),
        "free": lambda: driver.free(4096),
        "graph": lambda: driver.end_capture(stream),
        "address": lambda: (driver.fill(4096, 64, stream), driver.synchronize(stream)),
    }
    for name, step in steps.items():
        try:
            step()
            sentences[name] = "no error"
        except Exception as error:  # noqa: BLE001  # the message is the result
            sentences[name] = f"{type(error).__name__}: {error}"
        report(**sentences)
    expect("no error" not in sentences.values(), "a wrong call raised nothing")
    known = ("ResourceError", "GpuError", *(("RuleBrokenError",) if FAKE else ()))
    expect(all(sentence.startswith(known) for sentence in sentences.values()), "an error is not one of llmc's")


def open_driver() -> Any:
    if FAKE:
        use_doubles()
    from llmc.runtime.host import cuda

    return cuda.open_driver(0)


ITEMS = {item.__name__: item for item in (machine, copies, gpu_tests, errors)}
if __name__ == "__main__":
    main(ITEMS)
