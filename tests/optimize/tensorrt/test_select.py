"""The engine that finds the largest logits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from doubles.engines import spec_of

from llmc.bundle import EngineConfig
from llmc.optimize.tensorrt.select import build_select, select_graph

VOCAB, CANDIDATES = 96, 8


def test_the_graph_finds_the_largest_in_order():
    logits = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    session = ort.InferenceSession(
        select_graph(VOCAB, CANDIDATES).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values, indices = session.run(None, {"logits": logits})
    assert indices.dtype == np.int64
    assert np.array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :CANDIDATES])
    assert np.array_equal(values, np.take_along_axis(logits, indices, 1))


def test_tensorrt_builds_it_and_leaves_only_the_engine(rtx: Any, config: EngineConfig, tmp_path: Path):
    spec = spec_of(rtx, config)
    build_select(spec, tmp_path / "select.plan", vocab_size=VOCAB, candidates=CANDIDATES)
    assert [path.name for path in tmp_path.iterdir()] == ["select.plan"]
