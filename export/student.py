"""A student: some layers of a decoder as a decoder of its own, which is written as a checkpoint of the same family."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc import bundle
from llmc.errors import CheckpointError, UsageError
from llmc.export.config import DecoderConfig
from llmc.export.decoder import Decoder
from llmc.export.families import read_config
from llmc.export.keys import Keys
from llmc.export.sources.checkpoint import GENERATION_FILE, read_checkpoint, read_json
from llmc.export.sources.parameters import list_offset_norms
from llmc.export.sources.safetensors import SINGLE_FILE
from llmc.export.streaming import StreamedDecoder
from llmc.origin import copy_tokenizer

# Types in which weights stay as they are; integers become bfloat16.
DTYPES = {"float32": ("F32", torch.float32), "float16": ("F16", torch.float16)}
BFLOAT16 = ("BF16", torch.bfloat16)
LAYERS = "model.layers."


class Student:
    """A teacher, the decoder of an export, and a student that begins with some of its layers, both in float32.

    Args:
        export: folder of the teacher.
        count: layers of the student.
        device: the torch device of both.

    Attributes:
        teacher: its weights do not change.
        model: the student; its layers and last norm take gradients, embedding and head are the teacher's.
        layers: the teacher's layers that it begins with, see :func:`choose_layers`.

    Raises:
        UsageError: the teacher has not more than ``count`` layers.
        CheckpointError: the export is broken, or some of its layers make no checkpoint.
    """

    def __init__(self, export: Path, count: int, device: str) -> None:
        self._folder, self._manifest = export, bundle.read_export(export)
        total = self._manifest.geometry.layers
        if not 1 <= count < total:
            raise UsageError(f"student is {count}, expected 1 ... {total - 1} layers, fewer than {export} has")
        self.layers, source = choose_layers(total, count), StreamedDecoder(export, device)
        config = replace(source.config, layers=tuple(source.config.layers[index] for index in self.layers))
        self._values = _cut_config(read_json(export / bundle.CONFIG_FILE), total, self.layers)
        if problem := self._find_problem(config):
            raise CheckpointError(
                f"{export}: {problem}, so its layers {', '.join(map(str, self.layers))} make no {config.model_type} of "
                "their own; distill from a dense model whose layers are alike"
            )
        self.teacher, self.model = Decoder(source.config), Decoder(config)
        weights = {name: source.rows(name).view(it.shape) for name, it in self.teacher.named_parameters()}
        self.teacher.load_state_dict(weights, assign=True)
        chosen = {name: weights[self._origin(name)] for name, _ in self.model.named_parameters()}
        self.model.load_state_dict(chosen, assign=True)
        for module in (self.model.model.layers, self.model.model.norm):
            for value in module.parameters():
                value.data = value.data.clone()
            module.requires_grad_(True)
        self.teacher.to(source.device), self.model.to(source.device)

    def _origin(self, name: str) -> str:
        """The teacher's name of one of the student's weights."""
        if not name.startswith(LAYERS):
            return name
        index, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{self.layers[int(index)]}.{rest}"

    def _find_problem(self, config: DecoderConfig) -> str | None:
        if self._manifest.geometry.encoder is not None:
            return "it embeds or ranks, and generates no text"
        if any(it.recurrent or it.experts or it.attention is None or it.attention.source for it in config.layers):
            return "it has layers with states, experts or the caches of others"
        if config.per_layer or config.transposed or config.tower is not None or "text_config" in self._values:
            return "it is part of a model that sees, or its family stores layers in a way of its own"
        try:
            found = read_config(Keys(self._values, bundle.CONFIG_FILE))
        except CheckpointError as error:
            return str(error)
        return None if found == config else "its layers differ by their number (in windows, ropes or others)"

    def caches(self, model: Decoder, rows: int, capacity: int) -> list[tuple[Tensor, ...]]:
        """Empty caches of all layers of one of the two."""
        device, geometry = model.model.norm.weight.device, model.config.geometry
        held = [geometry.caches_of(index) for index in range(geometry.layers)]
        shapes = [[cache.shape_of(rows, capacity) for cache in caches for _ in cache.inputs] for caches in held]
        return [tuple(torch.zeros(shape, device=device) for shape in layer) for layer in shapes]

    def write(self, folder: Path) -> None:
        """Write the student's checkpoint into an empty folder, and read it again.
        Raises CheckpointError: it is none that llmc reads."""
        (folder / bundle.CONFIG_FILE).write_text(json.dumps(self._values, indent=2))
        defaults = asdict(self._manifest.generation)
        named = {"eos_token_id": list(defaults.pop("eos_token_ids")), **defaults}
        kept = {name: value for name, value in named.items() if value not in (None, [])}
        (folder / GENERATION_FILE).write_text(json.dumps(kept))
        copy_tokenizer(self._folder, folder)
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        for name in list_offset_norms(self.model.config) & weights.keys():
            weights[name] = weights[name] - 1
        _write_weights(folder / SINGLE_FILE, weights, *DTYPES.get(self._manifest.source.dtype, BFLOAT16))
        read_checkpoint(folder)


def choose_layers(total: int, count: int) -> tuple[int, ...]:
    """``count`` of ``total`` layers, evenly spread, the first and the last among them; of one, the first."""
    return tuple(round(index * (total - 1) / max(count - 1, 1)) for index in range(count))


def _cut_config(values: dict[str, Any], total: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """A ``config.json`` that says of these layers what it said of ``total``; weights are floats."""
    kept = {name: it for name, it in values.items() if name not in ("quantization_config", "compression_config")}
    lists = {name: it for name, it in kept.items() if isinstance(it, list) and len(it) == total and name[-3:] != "_id"}
    cut = {name: [value[index] for index in layers] for name, value in lists.items()}
    return kept | cut | {"num_hidden_layers": len(layers)}


def _write_weights(path: Path, weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight, value in weights.items():
        start, end = end, end + value.numel() * dtype.itemsize
        header[weight] = {"dtype": name, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in weights.values():
            file.write(value.to(dtype).cpu().contiguous().view(torch.uint8).numpy().data)
