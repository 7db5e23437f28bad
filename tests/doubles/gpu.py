"""A GPU with its libraries replaced by the doubles, in a test or in a whole process, and an engine of the double's."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from doubles.cuda import SERVER, FakeDriver
from doubles.onnxruntime_cuda import FakeOnnxRuntime
from doubles.replays import in_this_process
from doubles.tensorrt import FakeTensorRT, make_plan, make_select_plan

from llmc.bundle import FileEntry, read_bundle, write_manifest
from llmc.optimize import build
from llmc.optimize.judge import replay
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.tensorrt.select import select_graph
from llmc.runtime.host import cuda
from llmc.runtime.sessions.onnxruntime import cuda as cuda_session
from llmc.runtime.sessions.onnxruntime import cuda_provider
from llmc.runtime.sessions.tensorrt import library as engine_library
from llmc.runtime.sessions.tensorrt import session as tensorrt_session
from llmc.runtime.sessions.tensorrt.engine import platform_name

VERSION = "10.16.1.11"
CANDIDATES = 16
Replace = Callable[[Any, str, Any], None]


def install(put: Replace = setattr) -> list[FakeDriver]:
    """Put the doubles in the place of driver, ONNX Runtime and TensorRT; every driver that is opened, in order."""
    opened: list[FakeDriver] = []
    runtime = FakeOnnxRuntime(FakeDriver())
    libraries = {
        "tensorrt": FakeTensorRT(FakeDriver(), VERSION),
        "tensorrt-rtx": FakeTensorRT(FakeDriver(), "1.7.1.116", compiles=True),
    }
    real = build.build

    def open_driver() -> FakeDriver:
        opened.append(FakeDriver())
        for user in (runtime, *libraries.values()):
            user.driver = opened[-1]
        return opened[-1]

    def build_bundle(source: Path, folder: Path, **options: Any) -> None:
        if options["target"] != "tensorrt":
            real(source, folder, **options)
            return
        real(source, folder, engine=EngineRequest(deferred=True), **options)
        compile_on_double(folder)

    for module in (cuda, cuda_session, tensorrt_session):
        put(module, "open_driver", open_driver)
    for module in (engine_library, tensorrt_session):
        put(module, "load_library", libraries.__getitem__)
    for module in (cuda_provider, cuda_session):
        put(module, "import_onnxruntime_gpu", lambda: runtime)
    put(build, "build", build_bundle)
    put(replay, "_answer", in_this_process)
    return opened


def compile_on_double(folder: Path) -> None:
    """Give a bundle whose engine was deferred one of the double's."""
    manifest = read_bundle(folder)
    plan, vocab = manifest.engine, manifest.geometry.vocab_size
    assert plan is not None
    onnx.save(select_graph(vocab, CANDIDATES), folder / "select.onnx")
    graph = folder / manifest.graphs["decode"].file
    contents = {
        "engine.plan": make_plan(graph, plan.decode, plan.prefill, plan.buckets),
        "select.plan": make_select_plan(folder / "select.onnx", manifest.limits.max_batch, vocab),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    entries = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    made = replace(
        plan,
        file="engine.plan",
        select="select.plan",
        candidates=CANDIDATES,
        platform=platform_name(),
        compute_capabilities=(SERVER.compute_capability,),
    )
    target = replace(manifest.target, engine_version=VERSION)
    write_manifest(replace(manifest, engine=made, files=manifest.files | entries, target=target), folder)
