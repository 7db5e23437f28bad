"""The unquantized model's logits, with weights streamed layer by layer.

The portable decoder is cut at its ``hidden.{i}`` values and each layer runs on its own in ONNX Runtime; the embedding
is read by rows and the head multiplied in pieces. Peak memory is about one layer in float32, whatever the model's size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle import ExportManifest, read_export
from llmc.optimize.lower.raising import stored
from llmc.optimize.progress import Progress, counted, silent
from llmc.optimize.rewrite import read_decoder, sizes
from llmc.optimize.weights import pieces, rows_of
from llmc.runtime.sessions.onnxruntime import LOG_FATAL_ONLY, import_onnxruntime, translated

ORT_MINIMUM = "1.28"  # Attention-24 and TensorScatter-24 as the standard means them
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
Float = NDArray[np.float32]


class Reference:
    """An export's decoder, ready to be run layer by layer."""

    def __init__(self, export: Path) -> None:
        self.folder = export
        self.manifest: ExportManifest = read_export(export)
        self._model = read_decoder(export)
        self._head = next(node for node in self._model.graph if node.name == "lm_head")
        self._table = next(node for node in self._model.graph if node.name == "model.embed_tokens")

    def logits(self, sequences: Sequence[Sequence[int]], progress: Progress = silent) -> list[Float]:
        """Logits after every token of each sequence: float32 [len(sequence), V] each, in one pass over the weights."""
        ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        hidden = self._embed(ids)
        done = counted(progress, "running the unquantized model layer by layer", self.manifest.geometry.layers)
        for layer in range(self.manifest.geometry.layers):
            hidden = self._run([f"hidden.{layer}"], f"hidden.{layer + 1}", hidden, layer)
            done()
        normed = self._run([f"hidden.{self.manifest.geometry.layers}"], self._head.inputs[0].name or "", hidden, None)  # type: ignore[union-attr]
        return [self._project(normed[row, : len(sequence)]) for row, sequence in enumerate(sequences)]

    def _embed(self, ids: NDArray[np.int64]) -> Float:
        table = stored(self._table.inputs[0])
        rows = {token: rows_of(table, token, token + 1)[0] for token in np.unique(ids).tolist()}
        return np.stack([np.stack([rows[token] for token in row]) for row in ids.tolist()])

    def _project(self, hidden: Float) -> Float:
        weight = stored(self._head.inputs[1])
        spans = pieces(sizes(weight))
        return np.concatenate([hidden @ rows_of(weight, *span).T for span in spans], axis=1)

    def _run(self, inputs: list[str], output: str, hidden: Float, layer: int | None) -> Float:
        """Run the part of the graph between ``hidden`` [B, S, H] and ``output``."""
        batch, sequence, _ = hidden.shape
        feeds: dict[str, Any] = {inputs[0]: hidden}
        if layer is None:
            feeds["logit_indices"] = np.tile(np.arange(sequence), (batch, 1))
        else:
            g = self.manifest.geometry
            feeds["past_lengths"] = np.zeros(batch, np.int64)
            for part in ("key", "value"):
                feeds[f"past_key_values.{layer}.{part}"] = np.zeros(
                    (batch, g.kv_heads, sequence, g.head_dim), np.float32
                )
        return self._session(list(feeds), output).run([output], feeds)[0]  # type: ignore[no-any-return]

    def _session(self, inputs: list[str], output: str) -> Any:
        graph = ir.convenience.extract(self._model.graph, inputs, [output])
        part = ir.Model(graph, ir_version=self._model.ir_version, functions=list(self._model.functions.values()))
        runtime = import_onnxruntime(ORT_MINIMUM)
        options = runtime.SessionOptions()
        options.log_severity_level = LOG_FATAL_ONLY
        options.add_session_config_entry(EXTERNAL_FOLDER, str(self.folder))
        with translated(f"{self.folder}: running the reference"):
            return runtime.InferenceSession(
                ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
