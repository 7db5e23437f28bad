"""Read the tower of a checkpoint: its tensors, and the steps from an image, or audio, to what the tower takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmc import bundle
from llmc.bundle.model.vision import TOWER
from llmc.errors import CheckpointError
from llmc.export.audio.reading import read_audio
from llmc.export.audio.shapes import AudioTowerConfig
from llmc.export.config import DecoderConfig
from llmc.export.keys import read_object, require_object
from llmc.export.sources.adapters import Adapter, merge_adapters
from llmc.export.sources.parameters import Tensors, make_view, plus_one, rename_tensors
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.sources.tokens import read_tokens
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
    return tensors
