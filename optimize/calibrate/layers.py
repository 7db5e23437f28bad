"""Calibration: choose foldings, zeros, integers and ranges from activations, layer by layer.

One layer is in memory at a time: its inputs are observed, its weights quantized, and the quantized layer computes the
next one's inputs; where its weights stay, it computes them while it is observed. Results are written after each layer,
so an interrupted calibration continues with the same result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.bundle import Geometry, Recipe
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.names import HEAD
from llmc.optimize.calibrate.statistics import Accumulator, InputStatistics
from llmc.optimize.lower.context import PerToken, QuantConfig, QuantConfigs, WeightOnly
from llmc.optimize.lower.onnxruntime.experts import fit_block
from llmc.optimize.lower.onnxruntime.rotation import count_mixed, turn_inputs, turn_outputs
from llmc.optimize.lower.tensorrt.weights import fit_grid
from llmc.optimize.progress import Progress, make_counter
from llmc.optimize.quantize import gptq, rtn, smoothquant
from llmc.optimize.quantize.grid import Grid, Quantized, stack
from llmc.optimize.quantize.pruning import keep_mask
from llmc.optimize.weights.store import PROMPTS, Store, arrays_of, layer_part
from llmc.runtime.host.machine import usable_threads

# Tokens per forward pass: enough to keep the cores busy, few enough that a layer's activations stay small.
TOKENS_PER_CALL = 2048
# Number of the head's weights that are quantized at a time.
HEAD_PIECE = 1 << 24
# Tokens that what all experts read counts as, beside an expert's own. On held-out tokens of a model 256 wide, the
# first product of experts with 8, 32, 128 and 512 own tokens loses 0.58, 0.57, 0.56, 0.50 of what the nearest loses;
# with their own alone it would lose 1.19, 1.39, 1.04 and 0.60.
SHARED_TOKENS = 256
STATE = "state"


# The unquantized decoder in parts: :class:`llmc.export.streaming.StreamedDecoder`, which this room does not import.
LayerSource = Any


@dataclass(frozen=True)
class SmoothingMapping:
    """Linears that read the same activation, and the module that takes the inverse of factors folded into them."""

    linears: tuple[str, ...]  # module names within the layer
    inputs: int  # width K of the activation
    producer: str  # the norm or linear that computes the activation; empty if nothing can be folded into it
    repeats: int = 1  # how many channels of the activation stem from one output of ``producer`` (queries per key head)
    run: int = 1  # how many channels follow each other before they repeat (a head)


def list_smoothing_mappings(geometry: Geometry, layer: int) -> tuple[SmoothingMapping, ...]:
    """One mapping for each activation that linears of a layer read, in the order of computation."""
    mappings = []
    for group in geometry.readers:
        first, attention = group[0], geometry.attention.get(group[0].reads)
        if first.layer == layer:
            names = tuple(linear.name.removeprefix(_prefix(layer)) for linear in group)
            shared = (attention.heads // attention.kv_heads, attention.head_dim) if attention else (1, 1)
            producer = first.producer.removeprefix(_prefix(layer))
            mappings.append(SmoothingMapping(names, first.inputs, producer, *shared))
    return tuple(mappings)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def calibrate(
    source: LayerSource,
    ids: NDArray[np.int64],
    recipe: Recipe,
    configs: QuantConfigs,
    folder: Path,
    progress: Progress,
    prompts: QuantConfigs | None = None,
) -> Store:
    """Make all decisions that ``recipe`` leaves to calibration, on ``ids`` [n, length], and return their store.

    ``configs`` are those of the graph whose weights are quantized (decode's, or the only one), ``prompts`` those of
    another for prefill. Results of an interrupted run in ``folder`` are used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder)
    torch.set_num_threads(usable_threads())
    with torch.inference_mode():
        start, hidden, experts = _resume(store, source, torch.from_numpy(ids))
        parts = source.geometry.layers + 1
        done = make_counter(progress, "calibrating", parts)
        for _ in range(start):
            done()
        for index in range(start, source.geometry.layers):
            layer = _Layer(source, index, recipe, configs, prompts)
            arrays, hidden = layer.decide(hidden)
            experts = experts + layer.experts
            store.write(layer_part(index), arrays)
            store.write(STATE, {"layers": np.array(index + 1), "hidden": hidden.cpu().numpy(), "experts": experts})
            done()
        if not store.has("head"):
            config = choose_stored_config(recipe, configs, HEAD, source.geometry.hidden_size)
            store.write("head", _decide_head(source, hidden, recipe, config))
        done()
    return store


def _resume(store: Store, source: LayerSource, ids: Tensor) -> tuple[int, Tensor, NDArray[np.int64]]:
    """Number of finished layers, the next layer's input, and counts of experts with and without GPTQ."""
    if store.has(STATE):
        state = store.read(STATE)
        return int(state["layers"]), torch.from_numpy(state["hidden"]), state["experts"]
    return 0, torch.cat([source.embed(batch).cpu() for batch in _batches(ids)]), np.zeros(2, np.int64)


def _batches(samples: Tensor) -> Iterator[Tensor]:
    step = max(1, TOKENS_PER_CALL // samples.shape[1])
    return (samples[start : start + step] for start in range(0, len(samples), step))


class _Layer:
    """One layer during calibration: its weights change from the float ones to the bundle's."""

    def __init__(
        self, source: LayerSource, index: int, recipe: Recipe, configs: QuantConfigs, prompts: QuantConfigs | None
    ) -> None:
        self.source = source
        self.recipe = recipe
        self.prompts = prompts if recipe.scheme == "gptq" and recipe.rotates("prefill") else None
        self.prefix = _prefix(index)
        self.mappings = list_smoothing_mappings(source.geometry, index)
        self.module = source.layer(index)
        self.quant = {
            name: choose_stored_config(recipe, configs, self.prefix + name, self._weight(name).shape[1])
            for mapping in self.mappings
            for name in mapping.linears
        }
        self.arrays: dict[str, NDArray[Any]] = {}
        self.mixtures = _list_mixtures(source.geometry, index, recipe, configs)
        self.experts = np.zeros(2, np.int64)  # those that GPTQ chose integers for, and those that it did not

    def decide(self, hidden: Tensor) -> tuple[dict[str, NDArray[Any]], Tensor]:
        """Results by name, and the activations [n, length, hidden] after the quantized layer, in the place of
        ``hidden``."""
        foldings = self.recipe.smoothing or self.recipe.sparsity
        changes = bool(foldings or self.mixtures or any(map(_is_chosen, self.quant.values())))
        observed, read = self._observe(hidden, self._run if changes else self._advance)
        if self.recipe.sparsity:
            self._prune(observed)
        # Fold before quantizing anything: a folding also changes linears of earlier mappings.
        folded = {mapping: self._fold(mapping, observed.pop(mapping)) for mapping in reversed(self.mappings)}
        for mapping in self.mappings:
            statistics, by_grid = folded.pop(mapping), dict[Grid, list[str]]()
            self._decide_prompts(mapping, statistics)
            for name in mapping.linears:
                self.arrays[f"input:{self.prefix}{name}"] = statistics.absmax.cpu().numpy()
                if _is_chosen(config := self.quant[name]):
                    by_grid.setdefault(config.grid, []).append(name)
            for grid, names in by_grid.items():
                self._decide_linears(names, grid, statistics)
        for item, grid in self.mixtures:
            self._decide_experts(item, grid, read.pop(item.name))
        if changes:
            self._advance(hidden)
        return self.arrays, hidden

    def _prune(self, observed: Mapping[SmoothingMapping, InputStatistics]) -> None:
        """Prune the weights as the checkpoint has them, which the bundle's are pruned from, too."""
        for mapping, statistics in observed.items():
            norms = as_array(statistics.norms) if self.recipe.pruning == "wanda" else None
            for name in mapping.linears:
                parameter = self.module.get_parameter(f"{name}.weight")
                kept = keep_mask(as_array(parameter), self.recipe.sparsity, norms)
                parameter.data = parameter * torch.from_numpy(kept).to(parameter.device)
                if norms is not None:
                    self.arrays[f"norms:{self.prefix}{name}.weight"] = norms

    def _observe(
        self, hidden: Tensor, compute: Callable[[Tensor], None]
    ) -> tuple[dict[SmoothingMapping, InputStatistics], dict[str, "Read"]]:
        """Statistics of the linears' inputs while ``compute`` runs the layer, and the rows that experts read, which
        take less memory than their moments."""
        moments = self.recipe.scheme != "rtn"
        watched = {mapping: Accumulator(mapping.inputs, self.source.device, moments) for mapping in self.mappings}

        def watch(accumulator: Accumulator) -> Any:
            return lambda _module, inputs: accumulator.update(inputs[0])

        firsts = {self.module.get_submodule(mapping.linears[0]): a for mapping, a in watched.items()}
        hooks = [linear.register_forward_pre_hook(watch(a)) for linear, a in firsts.items()]
        read = {item.name: Read(item) for item, _ in self.mixtures}
        for name, seen in read.items():
            self._module(name).watch = seen.add
        compute(hidden)
        for hook in hooks:
            hook.remove()
        for name in read:
            self._module(name).watch = None
        return {mapping: accumulator.finish() for mapping, accumulator in watched.items()}, read

    def _fold(self, mapping: SmoothingMapping, statistics: InputStatistics) -> InputStatistics:
        """Multiply the linears' columns by SmoothQuant's scales [K], equal for copies of a channel, and divide their
        producer: the layer stays the same. Return the statistics of the scaled activation."""
        if not mapping.producer or not self.recipe.smoothing:
            return statistics

        def merge(values: Tensor) -> Tensor:
            """The largest of the values [K] among copies of a channel."""
            return values.view(-1, mapping.repeats, mapping.run).amax(1).flatten()

        rows = merge(torch.cat([self._weight(name) for name in mapping.linears]).abs().amax(0))
        by_channel = smoothquant.scales(merge(statistics.absmax), rows, alpha=self.recipe.smoothing)
        scales = by_channel.view(-1, 1, mapping.run).expand(-1, mapping.repeats, -1).flatten()
        for name in mapping.linears:
            self._scale(f"{name}.weight", "columns", scales)
        inverse = 1 / by_channel
        for name, _ in self.module.get_submodule(mapping.producer).named_parameters():
            self._scale(f"{mapping.producer}.{name}", "rows", inverse)
        return statistics.scale(1 / scales)

    def _scale(self, parameter: str, axis: str, factors: Tensor) -> None:
        weight = self.module.get_parameter(parameter)
        weight.data = weight * (factors if axis == "columns" or weight.ndim == 1 else factors[:, None])
        key = f"{axis}:{self.prefix}{parameter}"
        self.arrays[key] = self.arrays.get(key, np.float32(1)) * factors.cpu().numpy()

    def _decide_linears(self, names: list[str], grid: Grid, statistics: InputStatistics) -> None:
        """Quantize linears that read the same to one grid, all rows at once."""
        parameters = [self.module.get_parameter(f"{name}.weight") for name in names]
        pruned = bool(self.recipe.sparsity)
        quantized = quantize(torch.cat(parameters), grid, self.recipe.scheme, statistics, pruned)
        rows = list(accumulate((len(parameter) for parameter in parameters), initial=0))
        for name, parameter, (start, stop) in zip(names, parameters, pairwise(rows), strict=True):
            part = quantized.rows(slice(start, stop))
            if self.recipe.scheme != "rtn":  # rounding again is faster than reading
                self.arrays |= arrays_of(f"{self.prefix}{name}.weight", part)
            parameter.data = torch.from_numpy(part.dequantize()).to(self.source.device)

    def _decide_prompts(self, mapping: SmoothingMapping, statistics: InputStatistics) -> None:
        """Choose the integers of a rotated W8A8 graph, for inputs in the basis of that graph."""
        if self.prompts is None:
            return
        geometry = self.source.geometry
        reads = self.prefix + mapping.producer in geometry.read_norms
        gain = as_array(self.module.get_parameter(f"{mapping.producer}.weight")) if reads else None
        inputs: gptq.Inputs | None = None
        for name in mapping.linears:
            linear, config = geometry.linear[self.prefix + name], self.prompts.of(self.prefix + name)
            if not isinstance(config, PerToken):
                continue
            block = count_mixed(linear.name, linear.inputs)
            inputs = inputs or gptq.Inputs(_turn_moment(statistics.inputs.moment, gain, block))
            matrix = turn_inputs(as_array(self._weight(name)), gain, block)
            matrix = turn_outputs(matrix) if linear.name in geometry.writers else matrix
            quantized = gptq.quantize(torch.from_numpy(matrix).to(self.source.device), inputs, config.grid)
            self.arrays |= arrays_of(f"{linear.name}.weight", quantized, PROMPTS)

    def _decide_experts(self, item: Experts, grid: Grid, read: "Read") -> None:
        """Quantize each expert on its own inputs; the first product also uses the layer's shared statistics."""
        for number, part in enumerate(item.parts):
            stacked, name = self._weight(part.name.removeprefix(self.prefix)), f"{part.name}.weight"
            every = (read.rows(expert, number) for expert in range(item.count))
            shared = _measure_moment(every, part.inputs) if number == 0 else None
            matrices = []
            for expert, matrix in enumerate(stacked):
                matrices.append(_quantize_expert(matrix, read.rows(expert, number), shared, grid))
                matrix.copy_(torch.from_numpy(matrices[-1].dequantize()))
            self.arrays |= arrays_of(name, stack(matrices))
        calibrated = sum(read.tokens(expert) >= item.inner for expert in range(item.count))
        self.experts += calibrated, item.count - calibrated

    def _run(self, hidden: Tensor) -> None:
        for batch in _batches(hidden):
            self.source.run(self.module, batch.to(self.source.device))

    def _advance(self, hidden: Tensor) -> None:
        """Replace the layer's inputs by its outputs with the current weights, and record the ranges of keys and
        values."""
        ranges: dict[str, Tensor] = {}
        for batch in _batches(hidden):
            out, presents = self.source.run(self.module, batch.to(self.source.device))
            batch.copy_(out)
            for name, values in presents.items():
                if (part := name.rpartition(".")[2]) not in ("key", "value"):
                    continue
                largest = values.abs().amax((0, 2))
                ranges[part] = torch.maximum(ranges.get(part, largest), largest)
        self.arrays |= {f"cache:{part}": values.cpu().numpy() for part, values in ranges.items()}

    def _module(self, name: str) -> Any:
        return self.module.get_submodule(name.removeprefix(self.prefix))

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.module.get_parameter(f"{name}.weight")
        return weight


def _is_chosen(config: QuantConfig) -> TypeGuard[WeightOnly]:
    """True for weights whose integers are chosen here. 8-bit weights are rounded to nearest by the lowering; the next
    layer would not notice."""
    return isinstance(config, WeightOnly) and config.grid.bits == 4


def _turn_moment(moment: Tensor, gain: NDArray[np.float32] | None, block: int) -> Tensor:
    """Second moment of inputs X [tokens, K] after division by ``gain`` and rotation as in :func:`turn_inputs`.
    Channels with a gain of 0 count as never seen."""
    turned = as_array(moment)
    if gain is not None:
        inverse = np.divide(1, gain, out=np.zeros_like(gain), where=gain != 0)
        turned, gain = turned * inverse[:, None] * inverse, np.ones_like(gain)
    half = turn_inputs(turned, gain, block)
    return torch.from_numpy(np.ascontiguousarray(turn_inputs(half.T, gain, block))).to(moment.device)


def as_array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy()


class Read:
    """Rows that each expert's two products read, [tokens, width] and [tokens, inner], in the order they came."""

    def __init__(self, item: Experts) -> None:
        self._parts: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(item.count)]

    def add(self, expert: int, *inputs: Tensor) -> None:
        for kept, rows in zip(self._parts[expert], inputs, strict=True):
            kept.append(rows)

    def tokens(self, expert: int) -> int:
        return sum(map(len, self._parts[expert][0]))

    def rows(self, expert: int, part: int) -> Tensor:
        kept = self._parts[expert][part]
        return torch.cat(kept) if kept else torch.empty(0)


def _list_mixtures(geometry: Geometry, layer: int, recipe: Recipe, configs: QuantConfigs) -> list[tuple[Experts, Grid]]:
    """The mixtures of a layer whose integers are to be chosen by GPTQ."""
    chosen = []
    for item in geometry.mixtures:
        config = configs.stored(item.name)
        if item.layer == layer and recipe.scheme != "rtn" and _is_chosen(config):
            grid = fit_block(config.grid, item)
            if item.codes is None or not all(grid.holds(item.codes, part.inputs) for part in item.parts):
                chosen.append((item, grid))
    return chosen


def _quantize_expert(matrix: Tensor, rows: Tensor, shared: Tensor | None, grid: Grid) -> Quantized:
    """Quantize a matrix [N, K] of an expert that read ``rows`` [tokens, K]. ``shared`` is the second moment of all rows
    of the layer; without it, an expert with fewer tokens than inputs is rounded to nearest."""
    if shared is None and len(rows) < matrix.shape[1]:
        return rtn.quantize(matrix.cpu().numpy(), grid)
    moment = _measure_moment([rows], matrix.shape[1])
    if shared is not None:
        moment = moment.lerp(shared, SHARED_TOKENS / (SHARED_TOKENS + len(rows)))
    return gptq.quantize(matrix, gptq.Inputs(moment), grid)


def _measure_moment(parts: Iterable[Tensor], inputs: int) -> Tensor:
    """X^T X / tokens [K, K] of rows [tokens, K] in parts; 0 of none."""
    accumulator = Accumulator(inputs)
    for rows in parts:
        if len(rows):
            accumulator.update(rows)
    return accumulator.finish().inputs.moment


def quantize(weights: Tensor, grid: Grid, scheme: str, statistics: InputStatistics, pruned: bool = False) -> Quantized:
    """Quantize weights [N, K] to ``grid`` by ``scheme``, for inputs with these statistics; zeros of ``pruned`` ones
    stay."""
    if scheme == "rtn":
        return rtn.quantize(weights.cpu().numpy(), grid)
    return gptq.quantize(weights, statistics.inputs, grid, pruned)


def choose_stored_config(recipe: Recipe, configs: QuantConfigs, module: str, inputs: int) -> QuantConfig:
    """The config that the lowering will use: engines take only whole blocks, so the block may be smaller."""
    config = configs.of(module)
    if recipe.phases == "single" and isinstance(config, WeightOnly):
        return replace(config, grid=fit_grid(config.grid, inputs, module))
    return config


def _decide_head(source: LayerSource, hidden: Tensor, recipe: Recipe, config: QuantConfig) -> dict[str, NDArray[Any]]:
    """Quantize the head in pieces of rows, which are independent."""
    hidden = hidden[..., : source.geometry.hidden_size]  # without what was carried for layers
    norm, accumulator = source.norm(), Accumulator(hidden.shape[-1], source.device, recipe.scheme != "rtn")
    for batch in _batches(hidden):
        accumulator.update(norm(batch.to(source.device)))
    statistics = accumulator.finish()
    arrays: dict[str, NDArray[Any]] = {f"input:{HEAD}": statistics.absmax.cpu().numpy()}
    if recipe.scheme == "rtn" or not _is_chosen(config):
        return arrays
    rows = max(1, HEAD_PIECE // hidden.shape[-1])
    parts = [
        quantize(source.rows(source.head, start, start + rows), config.grid, recipe.scheme, statistics)
        for start in range(0, source.geometry.vocab_size, rows)
    ]
    return arrays | arrays_of(source.head, stack(parts))
