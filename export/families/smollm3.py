"""SmolLM3: Llama in which every fourth layer encodes no positions, with a tied head."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_by_type


def read(keys: Keys) -> DecoderConfig:
    """``no_rope_layers`` holds a 1 for each layer that rotates. Windows, if any, are for those that do not."""
    rotated, bias = _list_rotated(keys), keys.flag("attention_bias")
    window = keys.sliding_window() if keys.flag("use_sliding_window") else 0
    keys.skip("sliding_window", "max_window_layers")  # the second is qwen2's, and not read
    return read_decoder(
        keys,
        windows=windows_by_type(keys, window, tuple(not turned for turned in rotated)),
        bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        default_theta=2_000_000.0,
        default_tied=True,
        rotated=rotated,
    )


def _list_rotated(keys: Keys) -> tuple[bool, ...]:
    layers, stated = keys.integer("num_hidden_layers"), keys.raw("no_rope_layers")
    interval = keys.integer("no_rope_layer_interval", 4)
    if stated is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(stated, list) or len(stated) < layers or any(entry not in (0, 1) for entry in stated):
        raise keys.error("no_rope_layers", stated, f"{layers} entries, each 1 (rotates) or 0")
    return tuple(map(bool, stated[:layers]))
