"""Runs an export's torch decoder one part at a time: only the weights of the part in use are in memory."""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from llmc import bundle
from llmc.bundle.model.names import EMBEDDED_NORM, PER_LAYER, PER_LAYER_PROJECTION, POSITIONS
from llmc.export import ops
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.part import Call
from llmc.export.blocks.rope import inverse_frequencies
from llmc.export.config import FINAL_NORM, PER_LAYER_NORM
from llmc.export.decoder import DecoderLayer
from llmc.export.families import read_config
from llmc.export.families.vision_language import keep_text_part
from llmc.export.keys import Keys, require_object
from llmc.export.sources.checkpoint import EMBEDDING, HEAD
from llmc.exported import read_weights, rows_of


class StreamedDecoder:
    """The decoder of the export in ``folder``, by its ``config.json``, on a torch device. Weights are read when needed,
    as float32, from the files that the graph names. Raises CheckpointError: config or weights are missing or broken."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        path = folder / bundle.CONFIG_FILE
        self.config = read_config(Keys(keep_text_part(require_object(folder, path.name)), str(path)))
        self.geometry = self.config.geometry
        self.device = torch.device(device)
        self._stored = read_weights(folder)

    def embed(self, ids: Tensor) -> Tensor:
        """ids (B, S) -> vectors (B, S, hidden); only the rows asked for are read."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = torch.cat([self.rows(EMBEDDING, token, token + 1) for token in unique.tolist()])
        vectors = rows[inverse] * self.config.embedding_scale
        if self.config.learned_positions:
            vectors = vectors + self.rows(f"{POSITIONS}.weight", 0, ids.shape[1])
        if self.config.embedding_normed:
            vectors = self._load_norm(EMBEDDED_NORM)(vectors)
        carried = [self._embed_per_layer(unique, inverse, vectors)] if self.config.per_layer else []
        end = max((spans[-1].stop for spans in self._carried.values()), default=0)
        room = end - self.config.per_layer * self.geometry.layers
        carried += [vectors.new_zeros(*ids.shape, room)] if room > 0 else []
        return torch.cat((vectors, *carried), -1) if carried else vectors

    def layer(self, index: int) -> DecoderLayer:
        layer = DecoderLayer(self.config, index)
        self._fill(layer, f"model.layers.{index}.")
        return layer

    def run(self, layer: DecoderLayer, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """x (B, S, hidden) through a layer from position 0 -> its output, and what it leaves in its caches by the names
        of the graph's outputs: keys and values (B, KV, S, D), and states. What later layers read of the embedding and
        of this layer's cache is carried beside the hidden values."""
        geometry, (batch, length, _) = self.geometry, x.shape
        start = torch.zeros(batch, dtype=torch.int64, device=self.device)
        x, carried = x.tensor_split([geometry.hidden_size], -1)
        held, width = geometry.caches_of(layer.index), self.config.per_layer
        own = carried[..., layer.index * width :][..., :width] if width else None
        shapes = [cache.shape_of(batch, length) for cache in held for _ in cache.outputs]
        past, places = tuple(torch.zeros(shape, device=self.device) for shape in shapes), start
        for source in geometry.source_of(layer.index):
            spans = self._carried[source.name]
            past = tuple(carried[..., span].view(batch, length, *source.shape).transpose(1, 2) for span in spans)
            places = torch.arange(length, device=self.device).expand(batch, -1)
        shown = ops.PLAIN
        if self.config.diffusion is not None:  # every token sees the last
            shown = ops.Shown(ahead=torch.arange(length - 1, -1, -1, device=self.device).expand(batch, -1))
        call = Call(places, self._make_ropes(length), start + length, shown)
        out, presents = layer(x, past, call, own)
        caches = dict(zip((name for cache in held for name in cache.outputs), presents, strict=True))
        for cache in held:
            for span, name in zip(self._carried.get(cache.name, ()), cache.outputs, strict=False):
                carried = carried.clone()
                carried[..., span] = caches[name].transpose(1, 2).flatten(2)
        return torch.cat((out, carried), -1), caches

    def _make_ropes(self, length: int) -> list[Tensor]:
        """The frequencies of every rope in texts of this length."""
        long = [bool(rope.long_factors) and length > rope.original_max_positions for rope in self.config.ropes]
        by_rope = map(lambda rope, long: inverse_frequencies(rope, long=long), self.config.ropes, long)
        return [torch.tensor(frequencies, device=self.device) for frequencies in by_rope]

    def _embed_per_layer(self, tokens: Tensor, inverse: Tensor, embedded: Tensor) -> Tensor:
        """Each layer's own input side by side (B, S, layers * P), of tokens and where they stand."""
        rows = torch.cat([self.rows(f"{PER_LAYER}.weight", token, token + 1) for token in tokens.tolist()])
        norm = Norm(self.config.per_layer, self.config.norm)
        self._fill(norm, f"{PER_LAYER_NORM}.")
        projected = embedded @ self.rows(f"{PER_LAYER_PROJECTION}.weight").t() * self.config.hidden_size**-0.5
        return (norm(projected) + rows[inverse] * self.config.per_layer**0.5) * 2**-0.5  # type: ignore[no-any-return]

    @cached_property
    def _carried(self) -> dict[str, tuple[slice, ...]]:
        """Spans of the carried values that hold the caches which other layers read, by the names of these caches."""
        read = {item.cache for item in self.geometry.attentions if not item.writes}
        end, spans = self.config.per_layer * self.geometry.layers, dict[str, tuple[slice, ...]]()
        for cache in self.geometry.caches:
            if cache.name in read:
                width = math.prod(cache.shape)
                spans[cache.name] = (slice(end, end + width), slice(end + width, end + 2 * width))
                end += 2 * width
        return spans

    def norm(self) -> Norm:
        return self._load_norm(FINAL_NORM)

    def _load_norm(self, name: str) -> Norm:
        norm = Norm(self.geometry.hidden_size, self.config.norm)
        self._fill(norm, f"{name}.")
        return norm

    @property
    def head(self) -> str:
        """Name of the head's weight."""
        return EMBEDDING if self.geometry.tied_head else HEAD

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` of a stored tensor as float32.
        Raises CheckpointError: the file ends early, or a weight is NaN or infinite."""
        return torch.from_numpy(rows_of(self._stored[name], start, stop)).to(self.device)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        weights = {name: self.rows(prefix + name).view(it.shape) for name, it in module.named_parameters()}
        module.load_state_dict(weights, assign=True)
        module.to(self.device).eval().requires_grad_(False)
