"""A layer of the small model as lowered for TensorRT, and a bundle around its double's engine."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cuda import SERVER, FakeDriver
from doubles.plans import plan_of
from doubles.shared import shared
from doubles.tensorrt import FakeTensorRT, make_plan

from llmc.bundle import Manifest, Profile, read_bundle
from llmc.runtime.host.cuda import DeviceInfo
from llmc.runtime.sessions import Session, emulate_target, open_session
from llmc.runtime.sessions.tensorrt.engine import platform_name
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

CAPACITY = 64
BUCKETS = (16, 32, CAPACITY)
DECODE, PREFILL = Profile(3, 1, 1), Profile(1, 12, 4)
PRECISIONS = {"float32": "fp32", "float16": "fp16"}


@dataclass
class Setup:
    """A bundle on disk, and the doubles that it is opened with."""

    folder: Path
    manifest: Manifest
    driver: FakeDriver
    library: FakeTensorRT

    def plan(self, **changes: Any) -> "Setup":
        """The same with another engine plan."""
        assert self.manifest.engine is not None
        return replace(self, manifest=replace(self.manifest, engine=replace(self.manifest.engine, **changes)))

    def open(self) -> TensorRTSession:
        """The session on the doubles."""
        return TensorRTSession(self.folder, self.manifest, 1, driver=self.driver, library=self.library)

    def reference(self) -> Session:
        """ONNX Runtime on the same graph."""
        return open_session(self.folder, emulate_target(self.manifest), 1)


@pytest.fixture
def bundle(layer_export: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Callable[..., Setup]:
    """Make a bundle: ``compute`` float32 or float16."""

    def make(compute: str = "float32", device: DeviceInfo = SERVER) -> Setup:
        from llmc.optimize.build import build
        from llmc.optimize.recipe import BuildRequest
        from llmc.optimize.recipe.engine import EngineRequest

        def build_deferred(folder: Path) -> None:
            precision, engine = PRECISIONS[compute], EngineRequest(deferred=True)
            limits: dict[str, Any] = {"max_context": CAPACITY, "max_batch": 4}
            build(
                BuildRequest(
                    layer_export, folder / "bundle", target="tensorrt", precision=precision, engine=engine, **limits
                )
            )

        built = shared(tmp_path_factory, f"tensorrt {compute}", build_deferred) / "bundle"
        folder = tmp_path / compute
        if not folder.exists():
            shutil.copytree(built, folder, copy_function=os.link)
        manifest = read_bundle(folder)
        assert manifest.engine is not None
        graph = folder / manifest.graphs["decode"].file
        (folder / "engine.plan").write_bytes(make_plan(graph, DECODE, PREFILL, BUCKETS))
        plan = replace(
            manifest.engine,
            file="engine.plan",
            buckets=BUCKETS,
            decode=DECODE,
            prefill=PREFILL,
            platform=platform_name(),
            compute_capabilities=(device.compute_capability,),
        )
        manifest = replace(
            manifest,
            target=replace(manifest.target, engine_version="10.16.1.11"),
            device=plan_of(context=0, weights=0, workspace=0, cache_per_token=1, logits=0),
            limits=replace(manifest.limits, prefill_chunk=PREFILL.sequence),
            engine=plan,
        )
        driver = FakeDriver(device)
        return Setup(folder, manifest, driver, FakeTensorRT(driver))

    return make


@pytest.fixture
def session(bundle: Callable[..., Setup]) -> Iterator[TensorRTSession]:
    """A session with room for three rows."""
    session = bundle().open()
    session.cache.reserve(3, 32)
    yield session
    session.close()
