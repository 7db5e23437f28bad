"""Machines as a probe finds them: what their drivers, libraries and files say, after NVIDIA's documentation."""

from dataclasses import replace
from pathlib import Path

from llmc.runtime.host.probe import Probe
from llmc.runtime.host.probe_steps import Device, Driver, Library

GB = 10**9
PACKAGES = {"numpy": "2.4.6", "tokenizers": "0.23.3", "onnx": "1.23.2", "onnx-ir": "1.1.0", "ml_dtypes": "0.6.0"}
MISSING = Library("missing", "No module named this")
CPU_RUNTIME = Library("ok", "", "1.31.1", "", ("CPUExecutionProvider",))
GPU_RUNTIME = Library("ok", "", "1.31.1", "13", ("CUDAExecutionProvider", "CPUExecutionProvider", "cuda"))
WHOLE = ("runtime", "builder")

NO_GPU = Probe(
    platform="linux-x86_64",
    python="3.12.3",
    kernel_module=None,
    driver=Driver("missing", "libcuda.so.1: cannot open shared object file: No such file or directory"),
    libraries={
        "cuda-bindings": Library("ok", "no driver", "13.5.0", "13", ()),
        "onnxruntime": CPU_RUNTIME,
        "tensorrt": MISSING,
        "tensorrt-rtx": Library("ok", "", "1.7.1.116", "13", WHOLE),
    },
    packages=PACKAGES,
    jetson="",
)


def server(name: str, capability: str, memory: int, kernel: str = "580.95.05", cuda: str = "13.0") -> Probe:
    """An x86-64 machine with one GPU and every library."""
    device = Device(0, name, capability, memory, memory - GB, False)
    return replace(
        NO_GPU,
        kernel_module=kernel,
        driver=Driver("ok", "", cuda, (device,)),
        libraries={
            "cuda-bindings": Library("ok", "", "13.5.0", "13", ("initialised",)),
            "onnxruntime": GPU_RUNTIME,
            "tensorrt": Library("ok", "", "11.4.0.106", "13", WHOLE),
            "tensorrt-rtx": Library("ok", "", "1.7.1.116", "13", WHOLE),
        },
    )


H200 = server("NVIDIA H200", "9.0", 150 * GB)
T4 = server("Tesla T4", "7.5", 16 * GB)
RTX_4090 = server("NVIDIA GeForce RTX 4090", "8.9", 25 * GB)
RTX_5090 = server("NVIDIA GeForce RTX 5090", "12.0", 34 * GB)
GB10 = replace(
    server("NVIDIA GB10", "12.1", 128 * GB),
    platform="linux-aarch64",
    libraries=H200.libraries | {"onnxruntime": CPU_RUNTIME},
)

ORIN = replace(
    NO_GPU,
    platform="linux-aarch64",
    python="3.10.12",
    kernel_module="540.4.0",
    driver=Driver("ok", "", "12.6", (Device(0, "Orin", "8.7", 8 * GB, 6 * GB, True),)),
    libraries={
        "cuda-bindings": Library("ok", "", "12.9.10", "12", ("initialised",)),
        "onnxruntime": Library("ok", "", "1.23.2", "", ("CPUExecutionProvider",)),
        "tensorrt": Library("ok", "", "10.3.0", "", ("runtime", "builder")),
        "tensorrt-rtx": MISSING,
    },
    jetson="36.4.3",
)
THOR = replace(
    ORIN,
    python="3.12.3",
    kernel_module="580.00",
    driver=Driver("ok", "", "13.2", (Device(0, "NVIDIA Thor", "11.0", 128 * GB, 120 * GB, True),)),
    libraries={
        "cuda-bindings": Library("ok", "", "13.5.0", "13", ("initialised",)),
        "onnxruntime": CPU_RUNTIME,
        "tensorrt": Library("ok", "", "10.16.2", "", WHOLE),
        "tensorrt-rtx": MISSING,
    },
    jetson="39.2.0",
)

ORIN_FILES = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
    "DATE: Wed Jan  8 01:49:37 UTC 2025\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  "
    "(buildbrain@host)  Wed Jan  8\nGCC version:  collect2: error\n",
}


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` below ``root``, which then stands for /."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
