"""Read the tower of a checkpoint: its tensors, and the steps from an image, or audio, to what the tower takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc import bundle
from llmc.bundle.model.vision import TOWER
from llmc.errors import CheckpointError
from llmc.export.audio.reading import read_audio
from llmc.export.audio.shapes import AudioTowerConfig
from llmc.export.config import DecoderConfig
from llmc.export.keys import read_object, require_object
from llmc.export.sources.adapters import Adapter, merge_adapters
from llmc.export.sources.made import MadeTensor
from llmc.export.sources.parameters import Tensors, filled, make_view, plus_one, rename_tensors
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.sources.tokens import read_tokens
from llmc.export.vision.axial import BOUNDS, AxialTowerConfig
from llmc.export.vision.processor import IMAGES_FILE, PROCESSOR_FILE, read_vision
from llmc.export.vision.shapes import TowerConfig

T = TypeVar("T")


def read_media_steps(folder: Path, config: DecoderConfig) -> DecoderConfig:
    """The decoder with what the checkpoint's processor does to images or audio; as it is without a tower."""
    if config.tower is None:
        return config
    files = [read_object(folder, name) or {} for name in (PROCESSOR_FILE, IMAGES_FILE)]
    if isinstance(config.tower, AudioTowerConfig):
        audio = read_audio(folder, config.tower, *files)
        _check_token(folder, config, (audio.token_id, audio.token))
        return replace(config, audio=audio)
    vision = read_vision(folder, config.tower, *files)
    _check_token(folder, config, (vision.token_id, vision.markers.image))
    return replace(config, vision=vision)


def _check_token(folder: Path, config: DecoderConfig, token: tuple[int, str]) -> None:
    """Refuse a token for rows that the decoder or the tokenizer does not have."""
    path = folder / bundle.TOKENIZER_FILE
    if token[0] >= config.vocab_size:
        raise CheckpointError(
            f"{folder / bundle.CONFIG_FILE}: the token {token[0]} of the tower's rows has no row, "
            f"vocab_size={config.vocab_size}; export only the text part with --text-only"
        )
    if token not in read_tokens(str(path), require_object(folder, path.name)):
        raise CheckpointError(
            f"{path}: no token {token[1]} with the id {token[0]}, which {bundle.CONFIG_FILE} gives it; get "
            "the tokenizer that the model was trained with, or export only its text part with --text-only"
        )


def read_tower(folder: Path, config: DecoderConfig, stored: Tensors, adapters: Sequence[Adapter]) -> Tensors:
    """Tensors of the tower by parameter name, with ``adapters`` merged; empty without a tower."""
    return _tower_tensors(folder, config, merge_adapters(folder, config, stored, adapters, _rename))


def _rename(folder: Path, config: DecoderConfig, stored: Mapping[str, T]) -> dict[str, T]:
    if config.tower is None:
        return {}
    renamed = rename_tensors(folder, replace(config, renamed=config.tower.renamed, left_out=("head",)), stored)
    return {name: tensor for name, tensor in renamed.items() if name.startswith(f"{config.tower.root}.")}


def _tower_tensors(folder: Path, config: DecoderConfig, renamed: Tensors) -> Tensors:
    """A convolution over patches becomes a product with each patch's pixels."""
    tensors = Tensors(renamed)
    name = f"{TOWER}.patch_embedding.weight"
    if isinstance(kernels := tensors.get(name), StoredTensor) and len(kernels.shape) > 2:
        tensors[name] = replace(kernels, shape=(kernels.shape[0], math.prod(kernels.shape[1:])))
    if isinstance(config.tower, TowerConfig) and config.tower.projector == "pool":
        for name, view in ((f"{TOWER}.connector.weight", np.transpose), (f"{TOWER}.connector_norm.weight", plus_one)):
            if name in tensors:
                dtype = "F32" if view is plus_one else ""
                tensors[name] = make_view(folder, tensors[name], view, tensors[name].shape[::-1], dtype)
    if isinstance(config.tower, AxialTowerConfig):
        tensors |= _convert_axial(folder, config.tower, tensors)
    return tensors


def _convert_axial(folder: Path, tower: AxialTowerConfig, tensors: Tensors) -> Tensors:
    """A table of positions for rows and for columns becomes one table, and norms without weights get ones. The
    checkpoint turns the halves of a head as two smaller heads, the first by the column."""
    converted = Tensors()
    table = tensors.get(name := f"{TOWER}.position_embedding.weight")
    if isinstance(table, StoredTensor) and len(table.shape) == 3:
        converted[name] = replace(table, shape=(math.prod(table.shape[:2]), table.shape[2]))
    for name, tensor in tensors.items():
        if name.endswith(BOUNDS) and isinstance(tensor, StoredTensor):
            converted[name] = replace(tensor, shape=(1,))
    for layer in range(tower.layers):
        at = f"{TOWER}.layers.{layer}.self_attn"
        for name, heads in (
            (f"{at}.{part}_{kind}", n) for part in "qk" for kind, n in (("proj", tower.heads), ("norm", 1))
        ):
            if (turned := tensors.get(f"{name}.weight")) is not None:
                view = partial(_interleave_halves, heads)
                converted[f"{name}.weight"] = make_view(folder, turned, view, turned.shape)
    ones = {f"{name}.weight": (size,) for name, size in tower.made_norms.items()}
    return converted | {name: MadeTensor("F32", shape, partial(filled, 1.0, shape)) for name, shape in ones.items()}


def _interleave_halves(heads: int, weight: NDArray[Any]) -> NDArray[Any]:
    """Fourths of each head in the order 2, 0, 3, 1: of both of its halves the first parts, then the second parts."""
    fourths = weight.reshape(heads, 4, -1, *weight.shape[1:])
    turned: NDArray[Any] = fourths[:, [2, 0, 3, 1]].reshape(weight.shape)
    return turned
