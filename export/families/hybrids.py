"""What families with recurrent layers share."""

from dataclasses import replace

from llmc.export.config import Layer, RecurrentConfig
from llmc.export.keys import Keys


def recurrent_layers(
    keys: Keys, layers: tuple[Layer, ...], mixer: RecurrentConfig, kind: str, default: tuple[bool, ...]
) -> tuple[Layer, ...]:
    """``layers`` with ``mixer`` in the place of attention where ``layer_types`` says ``kind``; ``default`` replaces
    missing ``layer_types``."""
    types = keys.raw("layer_types")
    if types is None:
        types = [kind if recurrent else "full_attention" for recurrent in default]
    if not isinstance(types, list) or len(types) != len(layers) or set(map(str, types)) - {kind, "full_attention"}:
        raise keys.error("layer_types", types, f"{len(layers)} entries, each one of full_attention, {kind}")
    return tuple(
        replace(layer, attention=None, recurrent=mixer) if each == kind else layer
        for each, layer in zip(types, layers, strict=True)
    )
