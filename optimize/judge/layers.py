"""The loss of quality by layer: each layer's own error, and the KL of the model in which only that layer is the
bundle's.

The bundle's graphs are cut at their ``hidden.{i}`` values, and each part gets the unquantized model's inputs.
The decode path runs token by token. One layer is in memory at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle import LM_HEAD, LOGIT_ROWS, Manifest
from llmc.bundle.contract import INPUTS
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.bundle.model.names import EMBEDDING, HEAD
from llmc.errors import BundleError
from llmc.optimize.judge.quality import compare
from llmc.optimize.judge.reference import Float, Ids, LayerCalls, Reference, complete_feeds, empty_caches, open_part
from llmc.optimize.lower.onnxruntime.norms import KERNELS
from llmc.optimize.progress import Progress, make_counter, silent
from llmc.optimize.quantize.rotation import rotation
from llmc.runtime.sessions import Phase
from llmc.runtime.sessions.onnxruntime.cpu import translate_errors

# Windows: the decode path takes one call per token and layer, and one window suffices to compare layers.
WINDOWS = 1
# Tokens of that window for KL by layer, for which the unquantized model's later layers run once for each layer.
KL_TOKENS = 128
SMALLEST = 1e-20  # least noise to signal, 200 dB: float32 has about 1e-14
UNFUSED = {fused: norm for norm, fused in KERNELS.values()}


@dataclass(frozen=True)
class LayerError:
    """The error of one part of the model, fed with the unquantized model's hidden states, in one path."""

    name: str  # model.embed_tokens, model.layers.{i} or lm_head
    phase: str
    # power of the error over the power of the part's own addition to the hidden state; for the head, over the power of
    # its logits without their mean, which softmax ignores
    noise_to_signal: float
    # mean KL(reference || other) in nats, where the other is the unquantized model with the bundle's output of this
    # part; caches that later layers share stay the unquantized model's. None if it was not measured
    mean_kl: float | None = None

    @property
    def decibels(self) -> float:
        """Signal to noise in decibels, at most 200."""
        return -10 * math.log10(max(self.noise_to_signal, SMALLEST))


def layer_errors(
    folder: Path,
    manifest: Manifest,
    reference: Reference,
    windows: Ids,
    progress: Progress = silent,
    *,
    kl: bool = False,
) -> tuple[LayerError, ...]:
    """Errors of the embedding, each layer and the head, in both paths, on windows of tokens [n, W].

    ``kl`` measures :attr:`LayerError.mean_kl`, too: the unquantized model's weights are still read once, but a model
    of L layers computes as many tokens as L + 1 runs through it for both paths together.
    """
    layers = manifest.geometry.layers
    graphs = {phase: _Graph(folder, manifest.graphs[phase.value].file, manifest) for phase in Phase}
    done = make_counter(progress, "measuring the error of each layer", layers + 2)
    errors: list[LayerError] = []
    variants: list[LayerCalls] = []  # for each error but the head's: the unquantized model after that part
    calls = LayerCalls(reference, windows)
    before = calls.hidden
    for phase, graph in graphs.items():
        got = graph.embed(windows)
        errors.append(_error(EMBEDDING, phase, got, before, before))
        variants += [LayerCalls(reference, windows, got)] if kl else []
    done()
    for layer in range(layers):
        per_layer = calls.per_layer(layer)
        more = calls.more(layer, per_layer)
        after = calls.advance(layer, per_layer)
        for number, variant in enumerate(variants):  # the embedding's have inputs of their own for each layer
            variant.advance(layer, per_layer if number >= len(graphs) else None)
        for phase, graph in graphs.items():
            got = graph.layer(layer, before, windows, phase, more)
            errors.append(_error(f"model.layers.{layer}", phase, got, after, after - before))
            variants += [calls.fork(got)] if kl else []
        before = after
        done()
    heads, means = _judge_heads(graphs, reference, before, windows, variants)
    done()
    if not kl:
        return (*errors, *heads)
    return tuple(replace(error, mean_kl=mean) for error, mean in zip([*errors, *heads], means, strict=True))


def _error(name: str, phase: Phase, got: Float, wanted: Float, added: Float) -> LayerError:
    """Error of hidden states [n, S, H] relative to what the part ``added``."""
    noise, signal = (float(np.square(values, dtype=np.float64).sum()) for values in (got - wanted, added))
    return LayerError(name, phase.value, noise / max(signal, SMALLEST))


def _judge_heads(
    graphs: dict[Phase, "_Graph"], reference: Reference, hidden: Float, windows: Ids, variants: Sequence[LayerCalls]
) -> tuple[list[LayerError], list[float]]:
    """Errors of the heads on last hidden states [n, S, H]; mean KL of each variant, and with each of these heads."""
    noise, signal = dict.fromkeys(graphs, 0.0), 0.0
    kls: list[list[float]] = [[] for _ in (*variants, *graphs)]
    for row, ids in enumerate(windows):  # one window at a time, since logits are large
        wanted = _logits(reference, hidden[row])
        signal += _power(wanted)
        for number, variant in enumerate(variants):
            kls[number] += compare(wanted, _logits(reference, variant.hidden[row]))[0].tolist()
        for number, (phase, graph) in enumerate(graphs.items(), len(variants)):
            got = graph.head(hidden[row][None], ids[None], phase)
            noise[phase] += _power(got - wanted)
            kls[number] += compare(wanted, got)[0].tolist()
    errors = [LayerError(HEAD, phase.value, power / max(signal, SMALLEST)) for phase, power in noise.items()]
    return errors, [float(np.mean(each)) for each in kls]


def _logits(reference: Reference, hidden: Float) -> Float:
    """The unquantized model's logits [S, V] of last hidden states [S, H]."""
    return reference.project(reference.last_norm(hidden[None])[0])


def _power(logits: Float) -> float:
    """Sum of squares around each row's mean."""
    return float(logits.var(axis=-1, dtype=np.float64).sum() * logits.shape[-1])


class _Graph:
    """One of the bundle's graphs, to be cut into parts."""

    def __init__(self, folder: Path, file: str, manifest: Manifest) -> None:
        self.folder = folder
        self._path = folder / file
        self._geometry = manifest.geometry
        self._cache_type = manifest.cache
        self._model = ir.load(self._path)
        self._asked = [str(value.name) for value in self._model.graph.inputs if value.name in INPUTS]
        self._spare, self._head = manifest.overwritten, manifest.graphs.get(LM_HEAD)
        rotated = {manifest.graphs[phase].file for phase in manifest.recipe.rotated}
        self._basis = rotation(manifest.geometry.hidden_size) if file in rotated else None
        _split_skip_norms(self._model.graph)

    def embed(self, ids: Ids) -> Float:
        """Embeddings [n, S, H]."""
        return self._part(self._asked, ["hidden.0"])(self._feed(ids, slice(0, ids.shape[1])))[0]  # type: ignore[no-any-return]

    def layer(self, layer: int, hidden: Float, ids: Ids, phase: Phase, more: dict[str, Any]) -> Float:
        """Hidden states [n, S, H] after one layer, from the hidden states before it and its additional inputs."""
        caches, dtype = self._geometry.caches_of(layer), self._cache_type
        presents = {
            present: past for cache in caches for past, present in zip(cache.inputs, cache.outputs, strict=True)
        }
        # Any layer may read the number of positions from the first cache's shape.
        hidden, positions = self._enter(hidden, layer), ids.shape[1] + self._spare
        room = ((0, 0), (0, 0), (0, self._spare), (0, 0))
        more = {name: np.pad(values, room) if name.startswith("present.") else values for name, values in more.items()}
        empty = empty_caches([self._geometry.caches[0], *caches], 1, positions, dtype)
        outputs = [f"hidden.{layer + 1}", *presents]
        run = self._part([f"hidden.{layer}", *self._asked, *empty, *more], outputs)
        result = np.empty_like(hidden)
        for row in range(len(hidden)):
            held = dict(empty)
            for span in self._calls(ids.shape[1], phase):
                feeds = self._feed(ids[row : row + 1], span, positions) | held | _cut(more, row, span)
                result[row, span], *updated = run({f"hidden.{layer}": hidden[row : row + 1, span], **feeds})
                held |= dict(zip(presents.values(), updated, strict=True))
        return result if self._basis is None else np.asarray(result @ self._basis.T)

    def _enter(self, hidden: Float, layer: int) -> Float:
        """Hidden states before a layer as the graph has them: rotated, but for what the embedding gives."""
        return hidden if self._basis is None or layer == 0 else np.asarray(hidden @ self._basis)

    def head(self, hidden: Float, ids: Ids, phase: Phase) -> Float:
        """Logits [S, V] of one row of last hidden states [1, S, H]."""
        hidden, last = self._enter(hidden, self._geometry.layers), f"hidden.{self._geometry.layers}"
        run = self._part([last, *self._asked], [LOGIT_ROWS if self._head else "logits"])
        project = open_part(ir.load(self.folder / self._head.file), self.folder) if self._head else None
        parts = []
        for span in self._calls(ids.shape[1], phase):
            [logits] = run({last: hidden[:, span], **self._feed(ids, span)})
            parts.append((project.run(["logits"], {LOGIT_ROWS: logits})[0] if project else logits)[0])
        return np.concatenate(parts)

    def _feed(self, ids: Ids, span: slice, positions: int = 0) -> dict[str, NDArray[Any]]:
        """Feeds of a call of some tokens of ``ids`` [n, S], for the logits of all, over a cache of ``positions``."""
        new = ids[:, span]
        indices, lengths = np.broadcast_to(np.arange(new.shape[1]), new.shape), np.full(len(ids), ids.shape[1])
        call = {"input_ids": new, "past_lengths": np.full(len(ids), span.start), "logit_indices": indices}
        return complete_feeds(self._model.graph, {**call, "text_lengths": lengths}, positions)

    def _calls(self, length: int, phase: Phase) -> Iterator[slice]:
        """Tokens of each call: all through the prefill path and where calls take whole texts, else one at a time."""
        step = length if phase is Phase.PREFILL or takes_whole_texts(self._geometry) else 1
        return (slice(start, start + step) for start in range(0, length, step))

    def _part(self, inputs: Sequence[str], outputs: Sequence[str]) -> Callable[[dict[str, Any]], list[Any]]:
        """A function that runs the part of the graph between these values."""
        try:
            graph = ir.convenience.extract(self._model.graph, list(inputs), list(outputs))
        except ValueError as error:
            raise BundleError(
                f"{self._path} cannot be cut into layers ({error}); build the bundle again with this llmc"
            ) from error
        for value in (*graph.inputs, *graph.outputs):
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)  # passes give intermediate values no type
        session = open_part(ir.Model(graph, ir_version=self._model.ir_version), self.folder)

        def run(feeds: dict[str, Any]) -> list[Any]:
            with translate_errors(f"{self._path}: running a layer"):
                return session.run(list(outputs), feeds)  # type: ignore[no-any-return]

        return run


def _cut(more: dict[str, Any], row: int, span: slice) -> dict[str, Any]:
    """One call's part of the layers' additional inputs, with whole caches."""
    inputs = {name: values[row : row + 1] for name, values in more.items()}
    return inputs | {name: values[:, span] for name, values in inputs.items() if name.startswith("per_layer.")}


def _split_skip_norms(graph: ir.Graph) -> None:
    """Split norms that are fused with the addition before them: the cut is between the two."""
    for node in [node for node in graph if node.op_type in UNFUSED]:
        total = node.outputs[3] if len(node.outputs) > 3 else None
        if total is None or not (total.name or "").startswith("hidden."):
            continue
        attributes = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float()}
        norm = ir.node(UNFUSED[node.op_type], [total, *node.inputs[2:]], attributes)
        norm.name = f"{node.name}.apart"
        fused = node.outputs[0]
        norm.outputs[0].name, fused.name = fused.name, f"{fused.name}.fused"
        graph.insert_after(node, norm)
        fused.replace_all_uses_with(norm.outputs[0])
