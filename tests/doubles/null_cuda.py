"""CUDA without a device, for children that run NVIDIA's real bindings and ONNX Runtime's real CUDA provider on it."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
NAMES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")
DRIVER = "libcuda.so.1"


def compile_library(folder: Path) -> Path | None:
    """A folder with the library under all names that it has; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC"]
    exports = f"-Wl,--version-script={SOURCE.with_suffix('.map')}"
    subprocess.run(
        [compiler, *flags, exports, "-o", str(folder / DRIVER), str(SOURCE), "-ldl", "-lpthread"], check=True
    )
    for name in NAMES:
        (folder / name).symlink_to(DRIVER)
    return folder


def environment(library: Path, *packages: Path, **settings: str) -> dict[str, str]:
    """A child's environment: the library before NVIDIA's, and folders of ``packages`` before those installed."""
    paths = os.pathsep.join([*map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": paths, **settings}


class Log:
    """What callers asked of the library since the last look, in the process that it was loaded into."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(DRIVER)
        self.library.null_cuda_log.restype = ctypes.c_char_p

    def take(self) -> list[str]:
        lines = self.library.null_cuda_log().decode().splitlines()
        self.library.null_cuda_clear()
        return lines

    def fail(self, code: int) -> None:
        """Every kernel and every wait returns this error of CUDA from now on; 0 for none."""
        self.library.null_cuda_fail(code)
