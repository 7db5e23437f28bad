"""Granite swash: Granite 3 with sinks, windows in three layers of four, and the base of the rope layer by layer."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import granite
from llmc.export.keys import RANGES, Keys
from llmc.export.parts.attention import AttentionConfig
from llmc.export.reading import windows_by_type


def read(keys: Keys) -> DecoderConfig:
    keys.fill(num_key_value_heads=4, tie_word_embeddings=True)
    return read_swash(keys)


def read_swash(keys: Keys) -> DecoderConfig:
    """Without ``layer_types`` every fourth layer, from the first one on, has no window."""
    keys.fill(sliding_window=128)
    default = tuple(index % 4 != 0 for index in range(keys.integer("num_hidden_layers")))
    windows, thetas = windows_by_type(keys, keys.sliding_window(), default), _list_thetas(keys, len(default))
    rotated = tuple(theta != 0 for theta in thetas) if thetas else None
    config = granite.read(keys, windows=windows, rotated=rotated)
    bases = sorted({*thetas} - {0})

    def change(index: int, attention: AttentionConfig) -> AttentionConfig:
        rope = bases.index(thetas[index]) if attention.rope is not None and bases else attention.rope
        return replace(attention, sinks=True, rope=rope)

    ropes = tuple(replace(config.ropes[0], theta=float(theta)) for theta in bases)
    return replace(config, ropes=ropes or config.ropes).change_attentions(change)


def _list_thetas(keys: Keys, layers: int) -> list[float]:
    """The base of each layer's rope, 0 where positions are not encoded; empty if all have the config's."""
    thetas, (low, high) = keys.raw("layer_rope_theta"), RANGES["rope_theta"]
    if thetas is None:
        return []
    known = isinstance(thetas, list) and all(type(it) in (int, float) for it in thetas)
    if not known or len(thetas) != layers or any(it != 0 and not low <= it <= high for it in thetas):
        raise keys.error("layer_rope_theta", thetas, f"{layers} numbers, each 0 or from {low:g} to {high:g}")
    return list(thetas)
