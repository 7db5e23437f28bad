"""A decoder small enough to be written by hand, as lowered for TensorRT, and a bundle around its double's engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from doubles.cuda import SERVER, FakeDriver
from doubles.geometries import uniform
from doubles.tensorrt import FakeTensorRT, make_plan
from onnx import numpy_helper, parser

from llmc.bundle import DeviceMemory, EngineConfig, Graph, Limits, Manifest, Profile, Target
from llmc.runtime.host.cuda import DeviceInfo
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession
from llmc.runtime.sessions.tensorrt.engine import platform_name
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

LAYERS, HEADS, KV, WIDTH, VOCAB, HIDDEN = 2, 4, 2, 16, 300, 64
MAX_BATCH, CAPACITY = 4, 64
BUCKETS = (16, 32, 64)
DECODE, PREFILL = Profile(3, 1, 1), Profile(1, 12, 4)

LAYER = """
  q{i}w = MatMul(x{i}, Q{i})
  k{i}w = MatMul(x{i}, K{i})
  v{i}w = MatMul(x{i}, V{i})
  q{i}r = Reshape(q{i}w, heads)
  k{i}r = Reshape(k{i}w, kvheads)
  v{i}r = Reshape(v{i}w, kvheads)
  q{i} = Transpose<perm=[0,2,1,3]>(q{i}r)
  k{i} = Transpose<perm=[0,2,1,3]>(k{i}r)
  v{i} = Transpose<perm=[0,2,1,3]>(v{i}r)
  "present.{i}.key" = TensorScatter<axis=2>("past_key_values.{i}.key", k{i}, past_lengths)
  "present.{i}.value" = TensorScatter<axis=2>("past_key_values.{i}.value", v{i}, past_lengths)
  ks{i} = Slice("present.{i}.key", zero, attended, two)
  vs{i} = Slice("present.{i}.value", zero, attended, two)
  a{i} = Attention<scale=0.25>(q{i}, ks{i}, vs{i}, mask)
  at{i} = Transpose<perm=[0,2,1,3]>(a{i})
  ar{i} = Reshape(at{i}, flat)
  ao{i} = MatMul(ar{i}, O{i})
  x{j} = Add(x{i}, ao{i})
"""


def decoder(kind: str) -> onnx.ModelProto:
    """A decoder in ``float`` or ``float16``, whose positions count, too."""
    cache = f"{kind}[batch,{KV},capacity,{WIDTH}]"
    names = [f"{{0}}.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]
    pasts = ", ".join(f'{cache} "{name.format("past_key_values")}"' for name in names)
    presents = ", ".join(f'{cache} "{name.format("present")}"' for name in names)
    layers = "".join(LAYER.format(i=i, j=i + 1) for i in range(LAYERS))
    model = parser.parse_model(f"""
    <ir_version: 11, opset_import: ["" : 24]>
    decoder (int64[batch,sequence] input_ids, int64[batch] past_lengths, int64[batch,outputs] logit_indices,
             int64[attended_positions] cache_slots, {pasts})
      => (float[batch,outputs,{VOCAB}] logits, float[batch,outputs,256] top_logits, int64[batch,outputs,256] top_ids,
          float[batch,outputs,1] sum_exp, {presents})
    {{
      zero = Constant<value_ints=[0]>()
      one = Constant<value_ints=[1]>()
      two = Constant<value_ints=[2]>()
      first = Constant<value_int=0>()
      each = Constant<value_int=1>()
      heads = Constant<value_ints=[0,0,{HEADS},{WIDTH}]>()
      kvheads = Constant<value_ints=[0,0,{KV},{WIDTH}]>()
      flat = Constant<value_ints=[0,0,{HIDDEN}]>()
      length = Shape<start=1,end=2>(input_ids)
      count = Squeeze(length, zero)
      steps = Range(first, count, each)
      starts = Unsqueeze(past_lengths, one)
      positions = Add(starts, steps)
      axes = Constant<value_ints=[1,3]>()
      here = Unsqueeze(positions, axes)
      mask = LessOrEqual(cache_slots, here)
      attended = Shape(cache_slots)
      words = Gather(EMBEDDING, input_ids)
      places = Gather(POSITIONS, positions)
      x0 = Add(words, places)
      {layers}
      chosen = Unsqueeze(logit_indices, two)
      last = GatherND<batch_dims=1>(x{LAYERS}, chosen)
      raw = MatMul(last, HEAD)
      logits = Cast<to=1>(raw)
      most = Constant<value_ints=[256]>()
      end = Constant<value_ints=[-1]>()
      top_logits, top_ids = TopK(logits, most)
      peak = Slice(top_logits, zero, one, end)
      distances = Sub(logits, peak)
      weights = Exp(distances)
      sum_exp = ReduceSum(weights, end)
    }}""")
    generator = np.random.default_rng(7)
    shapes = {"EMBEDDING": (VOCAB, HIDDEN), "POSITIONS": (CAPACITY, HIDDEN), "HEAD": (HIDDEN, VOCAB)}
    for i in range(LAYERS):
        shapes |= {f"Q{i}": (HIDDEN, HEADS * WIDTH), f"K{i}": (HIDDEN, KV * WIDTH), f"V{i}": (HIDDEN, KV * WIDTH)}
        shapes |= {f"O{i}": (HEADS * WIDTH, HIDDEN)}
    for name, shape in shapes.items():
        scale = 1.0 if name in ("EMBEDDING", "POSITIONS") else 1.5 / np.sqrt(shape[0])
        values = (generator.standard_normal(shape) * scale).astype("float32" if kind == "float" else kind)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


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

    def reference(self) -> OnnxRuntimeSession:
        """ONNX Runtime on the same graph."""
        target = Target("tensorrt", "onnxruntime", "1.31.1", "1.28")
        return OnnxRuntimeSession(self.folder, replace(self.manifest, target=target), 1)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the graphs."""
    folder = tmp_path_factory.mktemp("lowered")
    onnx.save(decoder("float"), folder / "float32.onnx")
    onnx.save(decoder("float16"), folder / "float16.onnx")
    return folder


@pytest.fixture
def bundle(graphs: Path, manifest: Manifest, tmp_path: Path) -> Callable[..., Setup]:
    """Make a bundle: ``compute`` float32 or float16."""

    def make(compute: str = "float32", device: DeviceInfo = SERVER) -> Setup:
        graph = graphs / f"{compute}.onnx"
        content = make_plan(graph, DECODE, PREFILL, BUCKETS)
        (tmp_path / "engine.plan").write_bytes(content)
        (tmp_path / "decoder.onnx").write_bytes(graph.read_bytes())
        driver = FakeDriver(device)
        plan = EngineConfig(
            file="engine.plan",
            compute=compute,
            buckets=BUCKETS,
            decode=DECODE,
            prefill=PREFILL,
            platform=platform_name(),
            compute_capabilities=(device.compute_capability,),
            verified="cpu",
        )
        return Setup(tmp_path, with_engine(manifest, plan, compute), driver, FakeTensorRT(driver))

    return make


def with_engine(manifest: Manifest, plan: EngineConfig, compute: str) -> Manifest:
    """The manifest of a bundle of the small decoder."""
    geometry = uniform("llama", LAYERS, HIDDEN, 64, HEADS, KV, WIDTH, VOCAB, CAPACITY, False, (0,) * LAYERS)
    return replace(
        manifest,
        geometry=geometry,
        target=Target("tensorrt", "tensorrt", "10.16.1.11", "10.15"),
        recipe=replace(manifest.recipe, phases="single"),
        device=DeviceMemory(context=0, weights=0, workspace=0, cache_per_token=1, logits=0),
        limits=Limits(CAPACITY, MAX_BATCH, PREFILL.sequence),
        cache=compute,
        graphs=dict.fromkeys(("decode", "prefill"), Graph("decoder.onnx", 1000, 900)),
        engine=plan,
    )


@pytest.fixture
def session(bundle: Callable[..., Setup]) -> Iterator[TensorRTSession]:
    """A session with room for three rows."""
    session = bundle().open()
    session.cache.reserve(3, 32)
    yield session
    session.close()
