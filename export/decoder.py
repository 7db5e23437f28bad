"""The decoder: one torch module for every family, named like Hugging Face's so that checkpoint tensors fit by name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.attention import Attention
from llmc.export.blocks.experts import Experts
from llmc.export.blocks.latent import LatentAttention
from llmc.export.blocks.linear import Embedding, Linear, PositionEmbedding, TiedHead, as_float
from llmc.export.blocks.mlp import ACTIVATIONS, MLP
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.part import Call, Tensors
from llmc.export.blocks.recurrent import Recurrent
from llmc.export.blocks.rope import SwitchingRope, make_rope
from llmc.export.blocks.scale import Scale, Softcap
from llmc.export.config import DecoderConfig
from llmc.export.heads.blocks import BestClusters, HeadInput, TokenRows, add_ends
from llmc.export.heads.shapes import EMBEDDING_NORM
from llmc.export.vision.rows import DeepRows, EmbeddingRows, RowsAhead, TokensOfTable


class TakePositions(nn.Module):
    """A module only so that its node in the graph has a name."""

    def forward(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return ops.take_positions(hidden, indices)


class Sum(nn.Module):
    """A module only so that its node in the graph has another name than the residual sums."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class TokensAhead(nn.Module):
    """ids (B, S) after lengths (B), of the same rows how many positions are seen (B) -> how many of these come after
    each token's own."""

    def forward(self, ids: Tensor, past_lengths: Tensor, seen_lengths: Tensor) -> Tensor:
        counted = (ids == ids).long().cumsum(1)  # 1 ... S
        return (seen_lengths - past_lengths).unsqueeze(1) - counted


class Positions(nn.Module):
    """lengths (B), indices of new tokens (B, O) -> their positions (B, O)."""

    def forward(self, past_lengths: Tensor, indices: Tensor) -> Tensor:
        return past_lengths.unsqueeze(1) + indices


class DecoderLayer(nn.Module):
    """Residual block: mixers and, if the layer has them, MLP or experts, with norms where :class:`Placement` says."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer, hidden_size = config.layers[index], config.hidden_size
        self.index, self.placement = index, layer.placement
        self.self_attn = self.recurrent = self.mlp = self.experts = None
        if layer.attention is not None:
            kind = LatentAttention if layer.attention.latent else Attention
            self.self_attn = kind(layer.attention, config.site(index, "self_attn"), config.norm)
        if layer.recurrent is not None:
            self.recurrent = Recurrent(layer.recurrent, config.site(index, "recurrent"), config.norm)
        self.residual_scale, self.mixers, self.feeders = Scale(config.residual_scale), Sum(), Sum()
        self.attention_scale, self.recurrent_scale = Scale(layer.attention_scale), Scale(layer.recurrent_scale)
        if layer.mlp is not None:
            self.mlp = MLP(layer.mlp, config.site(index, "mlp"), config.norm)
        if layer.experts is not None:
            self.experts = Experts(layer.experts, config.site(index, "experts"), config.norm)
        self.normed = config.head is not None and config.head.normed
        for name, size, _ in config.list_norms_of(index):
            if name and "." not in name:  # others are norms of parts
                self.add_module(name, Norm(size, layer.placement.choose_norm(name, config.norm)))
        self.per_layer_input_gate = None
        if config.per_layer:
            assert layer.mlp is not None
            self.per_layer_input_gate = Linear(hidden_size, config.per_layer)
            self.per_layer_projection = Linear(config.per_layer, hidden_size)
            self.act_fn = ACTIVATIONS[layer.mlp.activation]()
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if config.layer_scalars else None

    def forward(
        self, x: Tensor, past: Tensors | None, call: Call, per_layer: Tensor | None = None, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        """Values (B, S, N), the tensors of this layer's caches (None in an encoder), its own input (B, S, P) if layers
        have one, and what attention reads beside the values (B, S, N) -> values, caches."""
        place = self.placement
        y, read, presents = x, x, Tensors()
        if self.self_attn is not None or self.recurrent is not None:
            read = self._normalize(place.before_attention, x)
            x = read if place.before_attention in place.carried else x
            if beside is not None:
                x = read if self.normed else x
                read = torch.cat((self._normalize(EMBEDDING_NORM, beside), read), -1)
            mixed, presents = self._mix(read, past, call)
            y = x + self.residual_scale(self._normalize(place.after_attention, mixed))
        if self.mlp is not None or self.experts is not None:
            if not place.parallel or place.before_mlp != place.before_attention:
                read = self._normalize(place.before_mlp, x if place.parallel else y)
            y = read if place.before_mlp in place.carried else y
            y = y + self.residual_scale(self._normalize(place.after_mlp, self._feed(read, y)))
        if self.per_layer_input_gate is not None:
            inner = self.act_fn(self.per_layer_input_gate(y)) * per_layer
            y = y + self._normalize("post_per_layer_input_norm", self.per_layer_projection(inner))
        return y if self.layer_scalar is None else y * as_float(self.layer_scalar), presents

    def _mix(self, read: Tensor, past: Tensors | None, call: Call) -> tuple[Tensor, Tensors]:
        """The sum of what the mixers make, and their caches: attention's come first."""
        made, presents = list[Tensor](), Tensors()
        if self.self_attn is not None:
            attended, presents = self.self_attn(read, past, call)
            made.append(self.attention_scale(attended))
        if self.recurrent is not None:
            recurred, states = self.recurrent(read, past and past[len(presents) :], call)
            made.append(self.recurrent_scale(recurred))
            presents = (*presents, *states)
        return made[0] if len(made) == 1 else self.mixers(*made), presents

    def _feed(self, read: Tensor, stream: Tensor) -> Tensor:
        """The sum of what experts and the MLP make, or one of them."""
        place, parts = self.placement, list[Tensor]()
        if self.experts is not None:
            own = self._normalize(place.before_experts, stream) if place.before_experts else read
            parts.append(self._normalize(place.after_experts, self.experts(own, stream)))
        if self.mlp is not None:
            parts.append(self._normalize(place.after_dense, self.mlp(read)))
        return parts[0] if len(parts) == 1 else self.feeders(*parts)

    def _normalize(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x) if name else x


class Stack(nn.Module):
    """All but the head; Hugging Face calls it ``model``. Only a namespace: :class:`Decoder` runs it."""

    embed_types: Embedding  # this and the next of some encoders
    distance_bias: nn.Module
    post_projection: Linear  # this and the next of some draft heads
    centroids: Linear

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.own_width)
        self.embed_norm = Norm(config.hidden_size, config.norm) if config.embedding_normed else nn.Identity()
        self.embed_positions = None
        if config.learned_positions:
            self.embed_positions = PositionEmbedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(len(config.layers)))
        self.norm = Norm(config.hidden_size, config.norm)
        if config.head is not None:
            add_ends(self, config.head, config.hidden_size, config.norm)
        if config.per_layer:
            width = len(config.layers) * config.per_layer
            self.embed_tokens_per_layer = Embedding(config.vocab_size, width)
            self.per_layer_model_projection = Linear(config.hidden_size, width)
            self.per_layer_projection_norm = Norm(config.per_layer, config.norm)


class Decoder(nn.Module):
    """Contract 1: new tokens and a cache in; logits and the updated cache out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.embedding_scale, self.logit_scale = Scale(config.embedding_scale), Scale(config.logit_scale)
        self.per_layer_scales = nn.ModuleList(
            map(Scale, (config.hidden_size**-0.5, max(config.per_layer, 1) ** 0.5, 2**-0.5))
        )
        self.logit_rows, self.shared_rows, self.shared_inputs = TakePositions(), TakePositions(), TakePositions()
        self.logit_positions, self.embedding_rows, self.rows_ahead = Positions(), EmbeddingRows(), RowsAhead()
        self.tokens_ahead, self.per_layer_ids = TokensAhead(), TokensOfTable(config.per_layer_filler)
        ends = () if config.head else range(config.hidden_size, config.geometry.row_width, config.hidden_size)
        self.deep_rows = nn.ModuleList(DeepRows(start, start + config.hidden_size) for start in ends)
        self.logit_softcap = Softcap(config.logit_softcap)
        self.lm_head = (
            TiedHead() if config.tied_head else Linear(config.hidden_size, config.head_rows, bias=config.head_bias)
        )
        self.head_input = HeadInput(config.head) if config.head else None
        self.token_rows = TokenRows(config.head.tokens) if config.head and config.head.tokens else nn.Identity()
        self.best_clusters = None
        if config.head and config.head.clusters:
            self.best_clusters = BestClusters(config.head.clusters, config.head.best)
        self.rotary_emb = nn.ModuleList(map(make_rope, config.ropes))

    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        logit_indices: Tensor,
        pasts: Sequence[Tensors],
        new_lengths: Tensor | None = None,
        embedding_indices: Tensor | None = None,
        embeddings: Tensor | None = None,
        positions: Tensor | None = None,
        seen_lengths: Tensor | None = None,
        text_lengths: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensors], list[Tensor], list[Tensor]]:
        """Inputs of contract 1, with ``pasts`` the tensors of each layer's caches, or those that a draft head is lent.

        Returns:
            logits (B, O, V); caches, behind which are a draft head's hidden states (B, O, N); the values (B, S, N)
            before the first layer and after each; each layer's own input. The graph can be cut at the last two.
            Layers that read caches of others compute only rows whose logits are wanted.
        """
        rows = None if embedding_indices is None or embeddings is None else (embedding_indices, embeddings)
        ropes = self.list_frequencies(past_lengths + input_ids.shape[1], text_lengths)
        embedded = self.embed(input_ids, past_lengths)
        beside = None
        if self.head_input is not None:
            assert rows is not None
            embedded, beside = self.head_input(embedded, rows, self.model)
        elif rows is not None:
            embedded = self.embedding_rows(embedded, rows[1], rows[0])
        borders = [embedded]
        presents = list[Tensors]()
        both_ways = self.config.vision is not None and self.config.vision.both_ways
        ahead = self.rows_ahead(rows[0]) if rows is not None and both_ways else None
        if seen_lengths is not None:
            ahead = self.tokens_ahead(input_ids, past_lengths, seen_lengths)
        shown = ops.Shown(None if positions is None else (positions, self.config.pair_axes), ahead)
        own_ids = input_ids if rows is None or not self.config.per_layer else self.per_layer_ids(input_ids, rows[0])
        x, inputs = borders[0], self.embed_per_layer(own_ids, borders[0])
        call = Call(past_lengths, ropes, new_lengths, shown)
        others = self.config.head.lent if self.config.head else ()
        lent = {cache.name: past for cache, past in zip(others, pasts, strict=False)}
        for index, layer in enumerate(self.model.layers):
            past, own = () if lent else pasts[index], inputs[index] if inputs else None
            if index == self.config.first_shared:
                x = self.shared_rows(x, logit_indices)
                call = replace(call, lengths=self.logit_positions(past_lengths, logit_indices))
            if (attention := self.config.layers[index].attention) and attention.source is not None:
                past = lent[str(attention.source)] if lent else presents[attention.source]
                own = own if own is None else self.shared_inputs(own, logit_indices)
            x, present = layer(x, past, call, own, beside)
            if rows is not None and index < len(self.deep_rows):
                x = self.deep_rows[index](x, rows[1], rows[0])
            borders.append(x)
            presents.append(present)
        picked = x if self.config.first_shared is not None else self.logit_rows(x, logit_indices)
        x = self.model.norm(picked)
        if self.config.head is not None:
            own_states = self.model.post_projection(x) if lent else x
            presents.append((picked if self.config.head.beside else own_states,))
        # Before the head, as the inventory lists them.
        scores = self.model.centroids(x) if self.best_clusters is not None else None
        tied_weight = (self.model.embed_tokens.weight,) if self.config.tied_head else ()
        logits = self.token_rows(self.logit_softcap(self.logit_scale(self.lm_head(x, *tied_weight))))
        if self.best_clusters is not None:
            logits = self.best_clusters(logits, scores)
        return logits, presents, borders, inputs

    def list_frequencies(self, ends: Tensor, text_lengths: Tensor | None) -> list[Tensor]:
        """The frequencies (R/2) of each rope, or where it switches those of each row (B, 1, R/2)."""
        lengths = ends if text_lengths is None else text_lengths
        frequencies: list[Any] = [
            rope(lengths) if isinstance(rope, SwitchingRope) else rope.inv_freq for rope in self.rotary_emb
        ]
        return frequencies

    def empty_caches(self, rows: int, capacity: int) -> list[Tensors]:
        """Zeros for the caches of each layer."""
        device, geometry = self.model.norm.weight.device, self.config.geometry
        held = [[cache for cache in geometry.caches_of(i) for _ in cache.inputs] for i in range(geometry.layers)]
        return [tuple(torch.zeros(it.shape_of(rows, capacity), device=device) for it in caches) for caches in held]

    def embed(self, input_ids: Tensor, past_lengths: Tensor) -> Tensor:
        """ids (B, S), lengths (B) -> input of the first layer (B, S, N)."""
        x: Tensor = self.model.embed_norm(self.embedding_scale(self.model.embed_tokens(input_ids)))
        return x if self.model.embed_positions is None else x + self.model.embed_positions(input_ids, past_lengths)

    def embed_per_layer(self, input_ids: Tensor, embedded: Tensor) -> list[Tensor]:
        """ids (B, S), their embeddings (B, S, N) -> each layer's own input (B, S, P)."""
        if not self.config.per_layer:
            return []
        of_width, of_rows, of_both = self.per_layer_scales
        projected = self.model.per_layer_projection_norm(of_width(self.model.per_layer_model_projection(embedded)))
        both = of_both(projected + of_rows(self.model.embed_tokens_per_layer(input_ids)))
        width = self.config.per_layer
        return [both[..., i * width : (i + 1) * width] for i in range(len(self.config.layers))]
