"""ONNX Runtime on the CPU, for a graph that keeps nothing between its calls: of an encoder, or of a tower."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.runtime.host.machine import cpu_model
from llmc.runtime.host.threads import on_leaving
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime, open_graphs, translate_errors


class StatelessSession:
    """The graph of a bundle that has this ``name``, opened, and its output ``result``. Any thread may run it.

    Raises:
        BundleError: it cannot be run on this CPU.
    """

    def __init__(self, folder: Path, manifest: Manifest, threads: int, name: str, result: str) -> None:
        runtime = import_onnxruntime(manifest.target.engine_minimum)
        graph = manifest.graphs[name]
        self._result = result
        self.engine_version, self.processor = str(runtime.__version__), cpu_model()
        self._graph = open_graphs(runtime, folder, manifest, [graph.file], threads)[graph.file]
        self._options = runtime.RunOptions()
        on_leaving(self, partial(setattr, self._options, "terminate", True))

    def run(self, **feeds: NDArray[Any]) -> NDArray[np.float32]:
        """The output for these inputs: vectors or scores float32 [B, W] or [B] of ``input_ids`` int64 [B, S],
        right-padded, and ``lengths`` int64 [B]; rows float32 [R, hidden] of ``pixel_values`` float32 [T, 3, H, W].
        """
        with translate_errors("running the model"):
            found: NDArray[np.float32] = self._graph.run([self._result], feeds, self._options)[0]
        return found

    def close(self) -> None:
        self._graph = None
