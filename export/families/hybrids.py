"""The rule that families with recurrent layers share."""

from dataclasses import replace

from llmc.export.config import Layer, RecurrentConfig
from llmc.export.keys import Keys


def recurrent_layers(
    keys: Keys,
    layers: tuple[Layer, ...],
    mixer: RecurrentConfig | None,
    kinds: tuple[str, ...],
    default: tuple[bool, ...],
) -> tuple[Layer, ...]:
    """``layers`` with ``mixer`` in the place of attention where ``layer_types`` says one of ``kinds``; ``default``
    replaces missing ``layer_types``."""
    types, options = keys.raw("layer_types"), (*(kinds if mixer else ()), "full_attention", "attention")
    if types is None:
        types = [kinds[0] if recurrent else "attention" for recurrent in default]
    if not isinstance(types, list) or len(types) != len(layers) or any(each not in options for each in types):
        raise keys.error("layer_types", types, f"{len(layers)} entries, each one of {', '.join(options)}")
    return tuple(
        replace(layer, attention=None, recurrent=mixer) if each in kinds else layer
        for each, layer in zip(types, layers, strict=True)
    )
