"""ONNX Runtime on the CPU, for bundles that embed or rank: one graph, and nothing kept between its calls."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.runtime.host.machine import cpu_model
from llmc.runtime.host.threads import on_leaving
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime, open_graphs, translate_errors


class EncoderSession:
    """An encoder's graph, opened. Any thread may run it. BundleError if it cannot be run on this CPU."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        runtime = import_onnxruntime(manifest.target.engine_minimum)
        graph = manifest.graphs["encode"]
        assert manifest.geometry.encoder is not None
        self._result = str(manifest.geometry.encoder.result)
        self.engine_version, self.processor = str(runtime.__version__), cpu_model()
        self._graph = open_graphs(runtime, folder, manifest, [graph.file], threads)[graph.file]
        self._options = runtime.RunOptions()
        on_leaving(self, partial(setattr, self._options, "terminate", True))

    def run(self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        """Vectors [B, W] or scores [B], float32, of texts [B, S], right-padded, of these ``lengths`` [B]."""
        feeds = {"input_ids": input_ids, "lengths": lengths}
        with translate_errors("running the model"):
            found: NDArray[np.float32] = self._graph.run([self._result], feeds, self._options)[0]
        return found

    def close(self) -> None:
        self._graph = None
