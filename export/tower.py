"""The graph of a tower."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from llmc.bundle.model.audio import TOWER as AUDIO
from llmc.bundle.model.vision import TOWER
from llmc.export.audio.shapes import AudioTowerConfig
from llmc.export.audio.tower import AudioRoot, make_positions
from llmc.export.blocks.rope import inverse_frequencies
from llmc.export.config import DecoderConfig, TowerShape
from llmc.export.graph import check_nodes, check_onnx, finish_graph, name_dimensions, trace
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.vision.axial import AxialTowerConfig
from llmc.export.vision.llama import LlamaTowerConfig
from llmc.export.vision.shapes import PatchTowerConfig, TowerConfig
from llmc.export.vision.tower import Root

# Sizes to trace with, all different; of audio as many chunks as windows.
_ROWS, _WINDOWS, _CORNERS = 15, 3, 5


def leave_out_tower(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a model without those of its tower."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith((f"{TOWER}.", f"{AUDIO}."))}


def export_tower(
    config: DecoderConfig, tensors: Mapping[str, StoredTensor], folder: Path, progress: Callable[[str], None]
) -> None:
    """Write the graph of the model's tower, if it has one, into ``folder``, where its weights are."""
    if config.tower is None:
        return
    root = config.tower.root
    progress(f"exporting the {root} tower")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{root}.")}
    ir.save(_build(config.tower, own, folder), folder / f"{root}.onnx")


def _build(config: TowerShape, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the tower, refer to its weights in the files of ``base``, and check the result."""
    samples = _sample_inputs(config)
    shapes = tuple({axis: dim for axis, (_, dim) in free.items()} for _, free in samples.values())
    inputs = tuple(tensor for tensor, _ in samples.values())
    model = trace(lambda: _make_module(config), tensors, inputs, (shapes,), decompose=True)
    if isinstance(config, PatchTowerConfig | AxialTowerConfig) and config.layers:
        name = f"{TOWER}.rotary_emb.inv_freq"
        model.graph.initializers[name].const_value = ir.tensor(inverse_frequencies(config.rope), name=name)
    if isinstance(config, AudioTowerConfig):
        name = f"{AUDIO}.position_embedding"
        model.graph.initializers[name].const_value = ir.tensor(make_positions(config), name=name)
    _name_dimensions(model.graph, samples)
    for value, name in zip(model.graph.inputs, samples, strict=True):
        value.name = name
    model.graph.outputs[0].name = "embeddings"
    finish_graph(model, tensors, base, "tower")
    check_nodes(model, {("MatMul",): [linear.name for linear in config.linears]})
    check_onnx(model)
    return model


def _make_module(config: TowerShape) -> nn.Module:
    return AudioRoot(config) if isinstance(config, AudioTowerConfig) else Root(config)


# Inputs by name, each with the names and sizes of its dimensions that are free.
_Samples = dict[str, tuple[Tensor, dict[int, tuple[str, Any]]]]


def _sample_inputs(config: TowerShape) -> _Samples:
    dim = torch.export.Dim
    if isinstance(config, AudioTowerConfig):
        chunks = torch.zeros(_WINDOWS, config.bands, config.chunk)
        rows = torch.zeros(_ROWS, dtype=torch.int64)
        return {"features": (chunks, {0: ("chunks", dim("chunks"))}), "rows": (rows, {0: ("rows", dim("rows"))})}
    if isinstance(config, TowerConfig) and config.projector != "mlp":
        return {"pixel_values": (torch.zeros(2, 3, config.tile, config.tile), {0: ("tiles", dim("tiles"))})}
    square = config.merged**2
    patches, count = ("patches", square * dim("rows")), square * _ROWS
    integers = torch.zeros(count, 2, dtype=torch.int64)
    samples: _Samples = {"pixel_values": (torch.zeros(count, config.linears[0].inputs), {0: patches})}
    if not isinstance(config, TowerConfig):
        samples["positions"] = integers, {0: patches}
    if isinstance(config, TowerConfig) or (isinstance(config, PatchTowerConfig) and config.places):
        free = {0: ("corners", dim("corners")), 1: patches}
        samples["corners"] = integers.new_zeros(_CORNERS, count), free
        samples["corner_weights"] = torch.zeros(_CORNERS, count), free
    if isinstance(config, PatchTowerConfig) and config.window:
        slots = integers.new_zeros(_WINDOWS, square * config.window**2)
        samples["windows"] = slots, {0: ("windows", dim("windows"))}
        samples["window_places"] = integers.new_zeros(count), {0: patches}
    if isinstance(config, LlamaTowerConfig) and config.convolved:
        around = torch.zeros(config.kernel**2, count, dtype=torch.int64)
        samples["neighbors"] = around, {1: patches}
    return samples


def _name_dimensions(graph: ir.Graph, samples: _Samples) -> None:
    names = dict[str, str]()
    for value, (_, free) in zip(graph.inputs, samples.values(), strict=True):
        assert value.shape is not None
        names |= {str(value.shape[axis]): name for axis, (name, _) in free.items()}
    name_dimensions(graph, names)
