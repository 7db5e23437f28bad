"""Open engines, builders and bundles as a session would; each in a separate process, which may crash or hang.

Each function returns a description of what it opened. A problem, with advice, is the error that loading would raise.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from llmc.errors import GpuError, require
from llmc.runtime.diagnose.targets import list_absent_precisions
from llmc.runtime.host.cuda import DeviceInfo, open_driver
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import load
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.runtime.sessions.onnxruntime.cuda_provider import check_provider, open_graph
from llmc.runtime.sessions.tensorrt.library import lists_gpu, load_library, make_object

# The oldest ONNX Runtime that runs bundles of a target, and that runs the exported graph to check a build.
MINIMUM = {"cpu": "1.23", "cuda": "1.31.1"}
JUDGE_MINIMUM = "1.28"
BUILD_PACKAGES = ("onnx", "onnx_ir", "ml_dtypes")
# ONNX: y = Identity(x), opset 13, float32 [1]. A provider is only loaded when it gets a graph.
IDENTITY = bytes.fromhex(
    "08073a390a120a017812017922084964656e746974793a001201675a0f0a0178120a0a08080112040a02080162"
    "0f0a0179120a0a08080112040a02080142040a00100d"
)


def open_cuda() -> str:
    runtime = require("onnxruntime", "gpu")
    check_provider(runtime, MINIMUM["cuda"])
    driver = open_driver()
    with TemporaryDirectory() as folder:
        graph = Path(folder) / "identity.onnx"
        graph.write_bytes(IDENTITY)
        open_graph(runtime, graph, driver.device.index, driver.stream(), "float32")
    return f"onnxruntime {runtime.__version__} on {_describe('cuda', driver.device)}"


def open_engine(target: str) -> str:
    library, device = load_library(target), open_driver().device
    name = f"{target} {library.__version__}"
    if not lists_gpu(library, device.compute_capability):
        raise GpuError(f"{name} does not list the GPU {device}; build for the target tensorrt or cuda")
    make_object(library, library.Runtime)
    return f"{name} on {_describe(target, device)}"


def make_builder(target: str) -> str:
    library = load_library(target)
    make_object(library, library.Builder)
    return f"{target} {library.__version__}"


def find_lowering() -> str:
    """The packages that a build needs besides an engine's builder."""
    packages = [require(module, "build") for module in BUILD_PACKAGES]
    judge = import_onnxruntime(JUDGE_MINIMUM)
    return ", ".join(f"{each.__name__} {each.__version__}" for each in (*packages, judge))


def load_bundle(folder: str) -> str:
    with load(folder, kind=LoadedBundle, self_test=False, verify=False) as model:
        return f"{model.manifest.target.name}, on {model.processor}"


def _describe(target: str, device: DeviceInfo) -> str:
    absent = list_absent_precisions(target, device.compute_capability)
    lacks = ", ".join(f"{name} (from {first} on)" for name, first in absent.items())
    return f"{device}{f'; no {lacks}' if lacks else ''}"


ATTEMPTS: dict[str, Callable[[], str]] = {
    "lowering": find_lowering,
    "cpu": lambda: f"onnxruntime {import_onnxruntime(MINIMUM['cpu']).__version__}",
    "cuda": open_cuda,
    "tensorrt": partial(open_engine, "tensorrt"),
    "tensorrt builder": partial(make_builder, "tensorrt"),
    "tensorrt-rtx": partial(open_engine, "tensorrt-rtx"),
    "tensorrt-rtx builder": partial(make_builder, "tensorrt-rtx"),
}


def attempt(name: str) -> str:
    return ATTEMPTS[name]()
