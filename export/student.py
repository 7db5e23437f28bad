"""A student: some layers of a decoder as a decoder of its own, which is written as a checkpoint of the same family."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llmc import bundle
from llmc.errors import CheckpointError, UsageError
from llmc.export.config import DecoderConfig
from llmc.export.decoder import Decoder
from llmc.export.families import read_config
from llmc.export.keys import Keys
from llmc.export.sources.checkpoint import read_checkpoint, read_json
from llmc.export.sources.parameters import list_offset_norms
from llmc.export.sources.safetensors import SINGLE_FILE
from llmc.export.streaming import StreamedDecoder
from llmc.origin import copy_tokenizer
from llmc.publish import replace_file

# Types that weights keep; integers become bfloat16.
DTYPES = {"float32": ("F32", torch.float32), "float16": ("F16", torch.float16)}


class Student:
    """A ``teacher``, the decoder of an export, and a student ``model`` that begins with ``count`` of its ``layers``, in
    float32. The student's layers and last norm take gradients; embedding and head are the teacher's.

    Raises:
        UsageError: the teacher has not more layers than that.
        CheckpointError: the export is broken, or such layers make no checkpoint.
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
        for index, origin in enumerate(self.layers):
            copied = self.teacher.model.layers[origin].state_dict()
            weights |= {f"model.layers.{index}.{name}": value.clone() for name, value in copied.items()}
        weights |= {f"model.norm.{name}": it.clone() for name, it in self.teacher.model.norm.state_dict().items()}
        self.model.load_state_dict({name: weights[name] for name, _ in self.model.named_parameters()}, assign=True)
        self.model.model.layers.requires_grad_(True)
        self.model.model.norm.requires_grad_(True)
        self.teacher.to(source.device)
        self.model.to(source.device)

    def _find_problem(self, config: DecoderConfig) -> str | None:
        if self._manifest.geometry.encoder is not None:
            return "it embeds or ranks, and generates no text"
        if config.diffusion is not None:
            return "it fills masks in any order"
        if any(it.recurrent or it.experts or it.attention is None for it in config.layers) or config.first_shared:
            return "it has layers with states, with experts or without a cache of their own"
        if config.per_layer or config.transposed or "text_config" in self._values:
            return "it is part of a larger model, or its family stores layers in a way of its own"
        try:
            found = read_config(Keys(self._values, bundle.CONFIG_FILE))
        except CheckpointError as error:
            return str(error)
        return None if found == config else "its layers differ by their number (in windows, ropes or others)"

    def write(self, folder: Path) -> None:
        """Write the student's checkpoint, each file as a whole, the config last, and read it again.
        Raises CheckpointError: it is none that llmc reads."""
        copy_tokenizer(self._folder, folder)
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        weights |= {name: weights[name] - 1 for name in list_offset_norms(self.model.config)}
        dtype, of_torch = DTYPES.get(self._manifest.source.dtype, ("BF16", torch.bfloat16))
        header, end = dict[str, Any](), 0
        for name, value in weights.items():
            start, end = end, end + value.numel() * of_torch.itemsize
            header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
        text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
        with replace_file(folder / SINGLE_FILE, ".weights-") as file:  # exports may share the one that is there
            file.write(len(text).to_bytes(8, "little") + text)
            for value in weights.values():
                file.write(value.to(of_torch).cpu().contiguous().view(torch.uint8).numpy().data)
        (folder / bundle.CONFIG_FILE).write_text(json.dumps(self._values, indent=2))
        read_checkpoint(folder)


def choose_layers(total: int, count: int) -> tuple[int, ...]:
    """``count`` of ``total`` layers, evenly spread, the first and the last among them; of one, the first."""
    return tuple(round(index * (total - 1) / max(count - 1, 1)) for index in range(count))


def _cut_config(values: dict[str, Any], total: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """A ``config.json`` that says of these layers what it said of ``total``, whose weights are floats."""
    kept = {name: it for name, it in values.items() if name not in ("quantization_config", "compression_config")}
    lists = {name: it for name, it in kept.items() if isinstance(it, list) and len(it) == total and name[-3:] != "_id"}
    cut = {name: [value[index] for index in layers] for name, value in lists.items()}
    return kept | cut | {"num_hidden_layers": len(layers)}
