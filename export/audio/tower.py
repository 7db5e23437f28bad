"""The torch modules of a tower that hears: chunks of a spectrum in, rows of embeddings for the decoder out."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.bundle.model.audio import CONVOLUTIONS, halve
from llmc.export.audio.shapes import KERNEL, AudioTowerConfig
from llmc.export.blocks.linear import Linear, as_float
from llmc.export.blocks.norm import Norm
from llmc.export.parts.norm import NormConfig
from llmc.export.vision.tower import TakeRows, make_layers

EPS = 1e-5  # of all norms
LONGEST_WAVE = 10_000.0  # of the positions


class Convolution(nn.Module):
    """x (C, I, F, T) -> GELU of a convolution with steps of two (C, O, F / 2, T / 2), both sizes rounded up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *KERNEL), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        convolved = functional.conv2d(x, as_float(self.weight), as_float(self.bias), stride=2, padding=1)
        return functional.gelu(convolved)


class AudioTower(nn.Module):
    """Convolutions over each chunk, a transformer over the chunks of a window, and two linears."""

    position_embedding: Tensor  # (halved frames of a chunk, N)

    def __init__(self, config: AudioTowerConfig) -> None:
        super().__init__()
        norm, sizes = NormConfig(EPS, "layer", bias=True), [1, *[config.channels] * CONVOLUTIONS]
        for number in range(CONVOLUTIONS):
            self.add_module(f"conv2d{number + 1}", Convolution(sizes[number], sizes[number + 1]))
        self.conv_out = Linear(config.channels * halve(config.bands), config.width)
        self.register_buffer("position_embedding", torch.tensor(make_positions(config)), persistent=False)
        self.take_rows = TakeRows()
        self.layers = make_layers(config.layers, config.width, config.heads, config.inner, "gelu", norm)
        self.norm, self.act_fn = Norm(config.width, norm), nn.GELU()
        self.connector_hidden = Linear(config.width, config.width, bias=True)
        self.connector = Linear(config.width, config.outputs, bias=True)

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        """Chunks of a spectrum (C, bands, frames) and the numbers (R) of rows that are no padding -> rows (R, N)."""
        x = features.unsqueeze(1)
        for number in range(CONVOLUTIONS):
            x = self.get_submodule(f"conv2d{number + 1}")(x)
        x = self.conv_out(x.permute(0, 3, 1, 2).flatten(2)) + self.position_embedding
        x = self.take_rows(x.flatten(0, 1), rows).unsqueeze(0)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.connector(self.act_fn(self.connector_hidden(self.norm(x)))).flatten(0, 1)
        return made


class AudioRoot(nn.Module):
    """Gives the tower's modules names that no decoder has."""

    def __init__(self, config: AudioTowerConfig) -> None:
        super().__init__()
        self.audio = AudioTower(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        made: Tensor = self.audio(*inputs)
        return made


def make_positions(config: AudioTowerConfig) -> npt.NDArray[np.float32]:
    """Sines and cosines of each place in a chunk, float32 [places, width], computed as transformers does."""
    half = config.width // 2
    steps = np.arange(half, dtype=np.float32) * np.float32(-np.log(LONGEST_WAVE) / (half - 1))
    angles = np.arange(halve(config.chunk), dtype=np.float32)[:, None] * np.exp(steps)
    return np.concatenate((np.sin(angles), np.cos(angles)), 1).astype(np.float32)
