"""The unquantized model's hidden states and logits, with weights streamed layer by layer.

The portable decoder is cut at its ``hidden.{i}`` values and each layer runs alone in ONNX Runtime, so peak memory is
about one layer in float32. The embedding is read by rows, the head multiplied in pieces.
"""

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from llmc import __version__
from llmc.bundle import ExportManifest, read_export
from llmc.bundle.contract import INPUTS
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.bundle.model.names import EMBEDDED_NORM, EMBEDDING, HEAD, PER_LAYER, POSITIONS, TYPES
from llmc.exported import in_parallel, pieces, rows_of, sizes
from llmc.ggml import LAYOUTS
from llmc.optimize.lower.raising import find_weight
from llmc.optimize.lower.rewrite import read_graph, sole_consumer
from llmc.optimize.progress import Progress, make_counter, silent
from llmc.runtime.embedder import TypedTokens
from llmc.runtime.host import disk_cache
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime, translate_errors
from llmc.runtime.sessions.onnxruntime.library import LOG_FATAL_ONLY, inference_session, multiply_exactly

ORT_MINIMUM = "1.28"  # Attention-24 and TensorScatter-24 by the standard
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
# Activations of one call: 1,024 tokens keep matrix products busy, and take 60 MB at an inner size of 14,336.
TOKENS_PER_CALL = 1024
# Number of the head's weights that are read and multiplied at a time, 16 MB: pieces of 1 MB take four times as long.
HEAD_PIECE = 1 << 22
Float = NDArray[np.float32]
Ids = NDArray[np.int64]


class Reference:
    """An export's decoder, run layer by layer."""

    def __init__(self, export: Path) -> None:
        self.folder = export
        self.manifest: ExportManifest = read_export(export)
        self._model = read_graph(export)
        self._opened: tuple[tuple[str, ...], Any, dict[str, Float]] | None = None

    @property
    def _head(self) -> ir.Node:
        return next(node for node in self._model.graph if node.name == HEAD)

    def compute_normed(self, sequences: Sequence[Sequence[int]], progress: Progress = silent) -> list[Float]:
        """Inputs of the head for every token of each sequence: float32 [len(sequence), H] each, for :meth:`project`.

        One pass over the weights.
        """
        geometry = self.manifest.geometry
        long = any(len(it) > geometry.long_after > 0 for it in sequences)
        alone = takes_whole_texts(geometry) or long  # tokens would see padding, or have the factors of the longest
        groups = [_pad([it]) for it in sequences] if alone else _groups(sequences)
        hidden = self._run_layers(groups, progress)
        rows = [row for group in hidden for row in self.last_norm(group)]
        return [row[: len(sequence)] for row, sequence in zip(rows, sequences, strict=True)]

    def results(self, sequences: Sequence[Sequence[int]], progress: Progress = silent) -> list[Float]:
        """The vector or the score of each sequence, which may have types of tokens: float32 [width] each."""
        geometry = self.manifest.geometry
        types = [it.types if isinstance(it, TypedTokens) else [0] * len(it) for it in sequences]
        groups = [np.array([row], np.int64) for row in sequences]
        embedded = [self._embed(ids, np.array([row])) for ids, row in zip(groups, types, strict=True)]
        hidden = self._run_layers(groups, progress, embedded)
        ends = [{f"hidden.{geometry.layers}": rows, **self._feed(rows)} for rows in hidden]
        (result,) = geometry.results
        return [self._run(known, result).reshape(-1) for known in ends]

    def _run_layers(
        self, groups: Sequence[Ids], progress: Progress, embedded: Sequence[Float] | None = None
    ) -> list[Float]:
        """Hidden states [B, S, H] of each group of tokens [B, S] after the last layer; ``embedded`` as in
        :class:`LayerCalls`."""
        given: Sequence[Float | None] = embedded or [None] * len(groups)
        calls = [LayerCalls(self, ids, values) for ids, values in zip(groups, given, strict=True)]
        layers = self.manifest.geometry.layers
        done = make_counter(progress, "running the unquantized model layer by layer", layers)
        for layer in range(layers):
            for call in calls:
                call.advance(layer)
            done()
        return [call.hidden for call in calls]

    def project(self, normed: Float) -> Float:
        """The head's product: logits float32 [n, V] of rows [n, H]."""
        weight = find_weight(self._head.inputs[1])
        vocab, hidden = sizes(weight)
        step = max(1, HEAD_PIECE // hidden)
        logits: Float = np.empty((len(normed), vocab), np.float32)
        for start in range(0, vocab, step):
            logits[:, start : start + step] = normed @ rows_of(weight, start, start + step).T
        for bias in (node for node in self._model.graph if node.name == f"{HEAD}.bias"):
            logits += rows_of(find_weight(bias.inputs[1]))
        logits *= np.float32(self._factor("logit_scale"))
        if cap := np.float32(self._factor("logit_softcap", 0.0)):
            logits = np.tanh(logits / cap) * cap
        return logits

    def last_norm(self, hidden: Float) -> Float:
        """Inputs of the head, from the last hidden states [B, S, H]."""
        source, geometry = self._head.inputs[0], self.manifest.geometry
        assert source is not None and source.name is not None
        return self._run({f"hidden.{geometry.layers}": hidden, **self._feed(hidden)}, source.name)

    def _feed(self, hidden: Float) -> dict[str, NDArray[Any]]:
        """Feeds of a plain call of as many tokens as hidden states [B, S, H], for the logits of all."""
        rows, tokens, _ = hidden.shape
        every = np.tile(np.arange(tokens), (rows, 1))
        call = {"input_ids": np.zeros_like(every), "past_lengths": np.zeros(rows, np.int64), "logit_indices": every}
        return complete_feeds(self._model.graph, call)

    def _embed(self, ids: Ids, types: Ids | None = None) -> Float:
        """Embeddings [B, S, H] of tokens [B, S], of the first type unless ``types`` [B, S] are given."""
        [vectors] = self.look_up(EMBEDDING, ids).values()
        vectors *= np.float32(self._factor("embedding_scale"))
        for node in self._model.graph:
            if node.name == POSITIONS:
                vectors += rows_of(find_weight(node.inputs[0]), 0, ids.shape[1])
            elif node.name == TYPES:
                [typed] = self.look_up(TYPES, np.zeros_like(ids) if types is None else types).values()
                vectors += typed
        for node in self._model.graph:
            if node.name == EMBEDDED_NORM and node.inputs[0] is not None:
                vectors = self._run({str(node.inputs[0].name): vectors}, str(node.outputs[0].name))
        return vectors

    def look_up(self, table: str, ids: Ids) -> dict[str, Float]:
        """Rows [B, S, N] of a table, by the name of their value in the graph, which makes floats of all rows."""
        node = next(node for node in self._model.graph if node.name == table)
        weight, cast = find_weight(node.inputs[0]), sole_consumer(node.outputs[0])
        used, places = np.unique(ids, return_inverse=True)
        rows: Float = np.stack([rows_of(weight, token, token + 1)[0] for token in used.tolist()])
        value = (cast if cast is not None and cast.op_type == "Cast" else node).outputs[0]
        return {str(value.name): rows[places.reshape(ids.shape)]}

    def _factor(self, name: str, default: float = 1.0) -> float:
        """Factor of the module of this name, ``default`` if the decoder has none."""
        factor = next((node.inputs[1] for node in self._model.graph if node.name == f"{name}.mul"), None)
        value = ir.convenience.get_const_tensor(factor) if factor is not None else None
        return default if value is None else float(value.numpy())

    def _run(self, feeds: dict[str, Any], output: str) -> Float:
        """Compute one value of the graph from others."""
        return self._run_all(feeds, [output])[0]

    def _run_all(self, feeds: dict[str, Any], outputs: list[str]) -> list[Float]:
        session, weights = self._open((*feeds, *outputs), len(feeds))
        with translate_errors(f"{self.folder}: running the reference"):
            return session.run(outputs, {**feeds, **weights})  # type: ignore[no-any-return]

    def _open(self, names: tuple[str, ...], inputs: int) -> tuple[Any, dict[str, Float]]:
        """The session of the part of the graph between these values, and weights to feed; only the last used one is
        kept."""
        if self._opened is None or self._opened[0] != names:
            self._opened = None  # free its weights before loading others
            graph = ir.convenience.extract(self._model.graph, names[:inputs], names[inputs:])
            part = ir.Model(graph, ir_version=self._model.ir_version, functions=list(self._model.functions.values()))
            weights = _read_blocks(part)
            self._opened = (names, open_part(part, self.folder), weights)
        return self._opened[1:]


class LayerCalls:
    """A group of tokens [B, S] on its way through the layers, with what later layers read of earlier ones."""

    def __init__(self, reference: Reference, ids: Ids, embedded: Float | None = None) -> None:
        """``embedded``: embeddings [B, S, H] in place of the reference's own."""
        self._reference, self._ids = reference, ids
        self.hidden = self._embedded = reference._embed(ids) if embedded is None else embedded
        self._kept: dict[str, Float] = {}

    def fork(self, hidden: Float) -> "LayerCalls":
        """The same calls with other hidden states [B, S, H]; caches of the layers so far are kept."""
        other = copy.copy(self)
        other.hidden, other._kept = hidden, dict(self._kept)
        return other

    def advance(self, layer: int, per_layer: Mapping[str, Any] | None = None) -> Float:
        """Hidden states [B, S, H] after the next layer. ``per_layer``: its inputs, if they are computed already."""
        geometry = self._reference.manifest.geometry
        shared = {name for item in geometry.attentions for name in [item.cache] if not item.writes}
        written = [name for cache in geometry.caches_of(layer) if cache.name in shared for name in cache.outputs]
        rows, tokens = self._ids.shape
        pasts = empty_caches(geometry.caches_of(layer), rows, tokens, "float32")
        feeds = {
            f"hidden.{layer}": self.hidden,
            **self._reference._feed(self.hidden),
            **self.more(layer, per_layer),
            **pasts,
        }
        self.hidden, *kept = self._reference._run_all(feeds, [f"hidden.{layer + 1}", *written])
        self._kept |= dict(zip(written, kept, strict=True))
        return self.hidden

    def per_layer(self, layer: int) -> dict[str, Any]:
        """Inputs that the model computes for each layer from tokens and embeddings."""
        if not self._reference.manifest.geometry.per_layer:
            return {}
        name, known = f"per_layer.{layer}", self._reference.look_up(PER_LAYER, self._ids)
        return {name: self._reference._run({**known, "hidden.0": self._embedded}, name)}

    def more(self, layer: int, per_layer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the layer reads beside hidden states and caches of its own."""
        inputs = dict(self.per_layer(layer) if per_layer is None else per_layer)
        for cache in self._reference.manifest.geometry.source_of(layer):
            inputs |= {name: self._kept[name] for name in cache.outputs}
        return inputs


def complete_feeds(graph: ir.Graph, feeds: Mapping[str, NDArray[Any]], positions: int = 0) -> dict[str, NDArray[Any]]:
    """Feeds of a call for what a graph asks, but for caches of ``positions``: those in ``feeds`` and plain ones."""
    made = dict[str, NDArray[Any]]()
    for value in graph.inputs:
        if (asked := INPUTS.get(str(value.name))) is not None:
            shape = asked.size(list(value.shape or ()), feeds, positions)
            made[asked.name] = np.empty(shape, asked.type)
            asked.fill(made[asked.name], feeds)
    return made


def empty_caches(caches: Iterable[Cache], rows: int, positions: int, dtype: str) -> dict[str, NDArray[Any]]:
    """Empty caches of a graph, with room for ``positions`` in each of ``rows``."""
    made: dict[str, NDArray[Any]] = {}
    for cache in caches:
        kind = "float32" if cache.kind == "state" else dtype
        made |= {name: np.zeros(cache.shape_of(rows, positions), kind) for name in cache.inputs}
    return made


def _read_blocks(part: ir.Model) -> dict[str, Float]:
    """Make the floats of GGML's blocks inputs of a part, which the engine would take five times the time and memory to
    unpack. Return what to feed."""
    fed = dict[str, Float]()
    for node in [node for node in part.graph if node.op_type in LAYOUTS]:
        blocks, [output] = find_weight(node.outputs[0]), node.outputs
        spans = pieces(sizes(blocks))
        floats = np.concatenate(list(in_parallel(lambda span: rows_of(blocks, *span), spans)))  # noqa: B023 - done here
        value = ir.val(str(output.name), shape=ir.Shape(floats.shape), type=ir.TensorType(ir.DataType.FLOAT))
        output.replace_all_uses_with(value)
        output.name = f"{value.name}.packed"
        part.graph.inputs.append(value)
        fed[str(value.name)] = floats
    if fed:
        common_passes.RemoveUnusedNodesPass()(part)
    return fed


def open_part(part: ir.Model, folder: Path) -> Any:
    """An ONNX Runtime session of a part of a graph, whose weights lie in ``folder``."""
    runtime = import_onnxruntime(ORT_MINIMUM)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = usable_threads()
    options.log_severity_level = LOG_FATAL_ONLY
    options.add_session_config_entry(EXTERNAL_FOLDER, str(folder))
    if any(node.op_type == "MatMulIntegerToFloat" for node in part.graph):  # DequantizeLinear cannot bear it
        multiply_exactly(options)
    with translate_errors(f"{folder}: running a part of the model"):
        return inference_session(runtime, ir.to_proto(part).SerializeToString(), options)


def _groups(sequences: Sequence[Sequence[int]]) -> list[Ids]:
    """Consecutive sequences, right-padded, about :data:`TOKENS_PER_CALL` tokens in each group."""
    groups: list[list[Sequence[int]]] = [[]]
    for sequence in sequences:
        longest = max(map(len, [*groups[-1], sequence]))
        if groups[-1] and longest * (len(groups[-1]) + 1) > TOKENS_PER_CALL:
            groups.append([])
        groups[-1].append(sequence)
    return [_pad(group) for group in groups if group]


def _pad(sequences: Sequence[Sequence[int]]) -> Ids:
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids


# ---------------------------------------------------------------------------------- states kept for the next candidate


def keep_states(
    reference: Reference, windows: Ids, folder: Path | None, progress: Progress = silent
) -> NDArray[np.float32]:
    """:meth:`Reference.compute_normed` of windows [n, W] as [n, W, H], read from ``folder`` or stored there."""
    path = folder / f"states-{_key(reference, windows)}.npy" if folder is not None else None
    # Missing or half-written states are computed. The file is opened here because numpy leaves a broken one open.
    with suppress(OSError, ValueError, EOFError, BadZipFile):
        if path is not None:
            with path.open("rb") as file:
                return cast("Float", np.load(file, allow_pickle=False))
    states: Float = np.stack(reference.compute_normed(windows.tolist(), progress))
    with suppress(OSError):  # if the cache cannot be written, the next run computes them again
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with disk_cache.write_entry(path) as staging:
                np.save(staging, states)
    return states


def _key(reference: Reference, windows: Ids) -> str:
    """A hash of the model, its files' times (the fingerprint alone may miss changed weights) and the tokens."""
    values = reference._model.graph.initializers.values()
    tensors = {value.const_value.path for value in values if isinstance(value.const_value, ir.ExternalTensor)}
    times = [os.stat(path).st_mtime_ns for path in sorted(map(str, tensors))]
    digest = hashlib.sha256(f"{__version__} {reference.manifest.source.fingerprint} {times} {windows.shape}".encode())
    digest.update(np.ascontiguousarray(windows).tobytes())
    return digest.hexdigest()[:32]
