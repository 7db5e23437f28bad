"""A student: some layers of a decoder as a decoder of its own, which is written as a checkpoint of the same family."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc import bundle
from llmc.errors import CheckpointError, UsageError
from llmc.export.config import DecoderConfig, Layer
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
# What is halved, as config.json says it.
WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


class Student:
    """A ``teacher``, the decoder of an export, and a student ``model`` that begins with ``count`` of its ``layers``, in
    float32. The student's layers and last norm take gradients; embedding and head are the teacher's. With tokens
    ``narrow_by`` (R, P) its layers have half of the neurons and, where KV heads are even, half of the heads: those that
    do most on these.

    Raises:
        UsageError: the teacher has not more layers than that.
        CheckpointError: the export is broken, or such layers make no checkpoint.
    """

    def __init__(self, export: Path, count: int, device: str, narrow_by: Tensor | None = None) -> None:
        self._folder, self._manifest = export, bundle.read_export(export)
        total = self._manifest.geometry.layers
        if not 1 <= count < total:
            raise UsageError("student", f"is {count}, expected 1 ... {total - 1} layers, fewer than {export} has")
        self.layers, source = choose_layers(total, count), StreamedDecoder(export, device)
        config = replace(source.config, layers=tuple(source.config.layers[index] for index in self.layers))
        self._values = _cut_config(read_json(export / bundle.CONFIG_FILE), total, self.layers)
        if problem := self._find_problem(config):
            raise CheckpointError(
                f"{export}: {problem}, so its layers {', '.join(map(str, self.layers))} make no {config.model_type} of "
                "their own; distill from a dense model whose layers are alike"
            )
        if narrow_by is not None:
            self._values, config = _halve(self._values, config)
        self.teacher, self.model = Decoder(source.config), Decoder(config)
        weights = {name: source.rows(name).view(it.shape) for name, it in self.teacher.named_parameters()}
        self.teacher.load_state_dict(weights, assign=True)
        self.teacher.to(source.device)
        scores = {} if narrow_by is None else self._measure(narrow_by.to(source.device))
        for index, origin in enumerate(self.layers):
            copied = _keep_half(self.teacher.model.layers[origin], self.model.model.layers[index], scores)
            weights |= {f"model.layers.{index}.{name}": value for name, value in copied}
        weights |= {f"model.norm.{name}": it.clone() for name, it in self.teacher.model.norm.state_dict().items()}
        self.model.load_state_dict({name: weights[name] for name, _ in self.model.named_parameters()}, assign=True)
        self.model.model.layers.requires_grad_(True)
        self.model.model.norm.requires_grad_(True)
        self.model.to(source.device)

    @torch.inference_mode()
    def _measure(self, ids: Tensor) -> dict[str, Tensor]:
        """The weight of each layer's neurons, and of the heads of each KV head, on tokens (R, P): the mean magnitude of
        what they give, times the norm of the column that reads it."""
        scores, start = dict[str, Tensor](), torch.zeros(len(ids), dtype=torch.int64, device=ids.device)

        def note(part: str, units: int, linear: Any, given: tuple[Tensor]) -> None:
            sizes = given[0].abs().mean((0, 1)) * linear.weight.norm(dim=0)
            scores[part] = sizes.unflatten(0, (units, -1)).sum(1)

        layers: list[Any] = [self.teacher.model.layers[origin] for origin in self.layers]
        with ExitStack() as hooks:
            for layer in layers:
                neurons, kv_heads = layer.mlp.down_proj.weight.shape[1], layer.self_attn.config.kv_heads
                of_mlp, of_attention = (partial(note, f"{layer.index}.{part}") for part in ("mlp", "self_attn"))
                hooks.enter_context(layer.mlp.down_proj.register_forward_pre_hook(partial(of_mlp, neurons)))
                hooks.enter_context(layer.self_attn.o_proj.register_forward_pre_hook(partial(of_attention, kv_heads)))
            self.teacher(ids, start, start[:, None], self.teacher.empty_caches(*ids.shape))
        return scores

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


def _halve(values: dict[str, Any], config: DecoderConfig) -> tuple[dict[str, Any], DecoderConfig]:
    """A ``config.json`` and what it says, with half of the neurons and, where KV heads are even, half of the heads.
    Raises CheckpointError: it says these widths by other keys."""
    layers, widths = list[Layer](), dict[str, int]()
    for layer in config.layers:
        mlp, attention = layer.mlp, layer.attention
        assert mlp is not None and attention is not None
        heads, kv_heads = (each // (2 - attention.kv_heads % 2) for each in (attention.heads, attention.kv_heads))
        widths = dict(zip((*WIDTHS, "head_dim"), (mlp.inner // 2, heads, kv_heads, attention.head_dim), strict=True))
        mlp, attention = replace(mlp, inner=mlp.inner // 2), replace(attention, heads=heads, kv_heads=kv_heads)
        layers.append(replace(layer, mlp=mlp, attention=attention))
    halved = values | {name: it for name, it in widths.items() if name in values or name == "head_dim"}
    if read_config(Keys(halved, bundle.CONFIG_FILE)) != (narrow := replace(config, layers=tuple(layers))):
        raise CheckpointError(
            f"{bundle.CONFIG_FILE} of a {config.model_type} says widths by other keys than {', '.join(WIDTHS)}, so "
            "they cannot be halved; distill without --narrow"
        )
    return halved, narrow


def _keep_half(layer: Any, wanted: Any, scores: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies of a layer's weights, those of narrower parts with the half of the highest scores, in its order."""
    shapes = {name: it.shape for name, it in wanted.state_dict().items()}
    for name, value in layer.state_dict().items():
        for axis in (axis for axis, size in enumerate(shapes[name]) if size < value.shape[axis]):
            units = scores[f"{layer.index}.{name.partition('.')[0]}"]
            kept = units.topk(len(units) // 2).indices.sort().values
            value = value.unflatten(axis, (len(units), -1)).index_select(axis, kept).flatten(axis, axis + 1)
        yield name, value.clone()


def _cut_config(values: dict[str, Any], total: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """A ``config.json`` that says of these layers what it said of ``total``, whose weights are floats."""
    kept = {name: it for name, it in values.items() if name not in ("quantization_config", "compression_config")}
    lists = {name: it for name, it in kept.items() if isinstance(it, list) and len(it) == total and name[-3:] != "_id"}
    cut = {name: [value[index] for index in layers] for name, value in lists.items()}
    return kept | cut | {"num_hidden_layers": len(layers)}
