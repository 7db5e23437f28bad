"""Geometries of decoders whose layers are all alike, for tests that need no checkpoint."""

from llmc.bundle import Geometry
from llmc.export.config import DecoderConfig, Rope


def uniform(
    model_type: str,
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_positions: int,
    tied_head: bool,
    windows: tuple[int, ...],
) -> Geometry:
    """What export would write for such a decoder."""
    return DecoderConfig(
        model_type=model_type,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max_positions,
        norm_eps=1e-6,
        rope=Rope(10_000.0),
        tied_head=tied_head,
        windows=windows,
    ).geometry
