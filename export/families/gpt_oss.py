"""gpt-oss: sinks in attention, windows in every other layer, biases everywhere, experts with a clamped activation."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.mixtures import RENAMED, put_experts, read_experts
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_by_type

OWN = (
    ("mlp.router", "experts.router"),
    *((f"mlp.experts.{part}_proj_bias", f"experts.{part}_proj.bias") for part in ("gate_up", "down")),
)


def read(keys: Keys) -> DecoderConfig:
    """Experts are ``intermediate_size`` wide; top-k, then a softmax, is a softmax over all whose weights are
    normalized."""
    keys.rename({"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok"})
    if not (keys.raw("rope_scaling") or keys.raw("rope_parameters")):
        raise keys.error("rope_scaling", None, "yarn's settings, which no published gpt-oss leaves out")
    inner, biased = keys.integer("intermediate_size"), keys.flag("attention_bias", True)
    experts = replace(
        read_experts(keys, inner, normalized=True, count=128),
        bias=True,
        limit=keys.number("swiglu_limit", 7.0),
        alpha=keys.number("swiglu_alpha", 1.702),
        transposed="all",
    )
    keys.skip("initial_context_length")  # the rope has it too
    window = keys.sliding_window()
    every_other = tuple(index % 2 == 0 for index in range(keys.integer("num_hidden_layers")))
    config = read_decoder(
        keys,
        windows=windows_by_type(keys, window, every_other),
        default_head_dim=64,
        bias=biased,
        default_theta=150_000.0,
    )
    config = config.change_attentions(lambda _, attention: replace(attention, sinks=True))
    return replace(put_experts(config, experts), renamed=(*RENAMED, *OWN))
