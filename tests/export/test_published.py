"""config.json of published models: each is read as its card says, or refused for a reason that is told.

``published/models.json`` holds them: the keys of the file, and its values where a public source shows them. Models with
the keys of another one name that (``like``) and what differs (``config``, ``without``), with the values of their cards.
A list of repeated entries is written as ``{"times": n, "of": [...]}``.
"""

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import BuildError, CheckpointError
from llmc.export.config import DecoderConfig
from llmc.export.families import FAMILIES, read_config
from llmc.export.keys import Keys
from llmc.export.parts.attention import AttentionConfig
from llmc.export.sources.quantization import read_quantization
from llmc.optimize.lower.onnxruntime.attention import check_head_sizes

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published" / "models.json").read_text("utf-8"))
# Most figures are exact, some rounded; the biases of one kind of linear are more than this of a model that has them.
PARAMETER_TOLERANCE = 1e-4


def config_of(name: str) -> dict[str, Any]:
    model = MODELS[name]
    values = config_of(model["like"]) if "like" in model else {}
    left = {key: value for key, value in values.items() if key not in model.get("without", ())}
    return {**left, **{key: expanded(value) for key, value in model["config"].items()}}


def expanded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"times", "of"}:
            return value["times"] * value["of"]
        return {key: expanded(inner) for key, inner in value.items()}
    return value


def read(name: str) -> DecoderConfig:
    keys = Keys(config_of(name), "config.json")
    read_quantization(keys)
    return read_config(keys)


def ropes(config: DecoderConfig) -> list[tuple[str, int]]:
    """Type and base of each rope, that of the first layer first, with the number of layers that it turns."""
    found = [None if it.rope is None else config.ropes[it.rope] for it in attentions(config)]
    return list(Counter("none" if rope is None else f"{rope.type} {round(rope.theta)}" for rope in found).items())


def windows(config: DecoderConfig) -> list[tuple[str, int]]:
    return list(Counter(str(it.window) for it in attentions(config)).items())


def attentions(config: DecoderConfig) -> list[AttentionConfig]:
    return [layer.attention for layer in config.layers if layer.attention]


def families(name: str) -> set[str]:
    config = config_of(name)
    return {part["model_type"] for part in (config, config.get("text_config", config))}


READ = [name for name, model in MODELS.items() if "read" in model and families(name) <= FAMILIES.keys()]
REFUSED = [name for name, model in MODELS.items() if "refused" in model]


@pytest.mark.parametrize("name", READ)
def test_published_configs_are_read_as_their_cards_say(name):
    config, card = read(name), MODELS[name]["read"]
    mixer = attentions(config)[0]
    shape = [len(config.layers), config.hidden_size, mixer.heads, mixer.kv_heads, mixer.head_dim]
    assert shape == card["shape"]
    assert ropes(config) == list(card["ropes"].items())
    assert windows(config) == list(card.get("windows", {"0": len(config.layers)}).items())
    assert config.tied_head == card.get("tied", False)
    parameters = sum(prod(shape) for shape in config.parameter_shapes.values())
    parameters += card.get("beside", 0)  # poolers and other heads, types of tokens, positions before the first
    assert parameters == pytest.approx(card["parameters"], rel=PARAMETER_TOLERANCE)


def test_heads_that_onnx_runtime_has_no_kernel_for_are_rare():
    refused = []
    for name in READ:
        try:
            check_head_sizes(read(name).geometry)
        except BuildError:
            refused.append(name)
    assert refused == ["open_llama_3b"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name):
    family = config_of(name)["model_type"]
    with pytest.raises(CheckpointError) as caught:
        read(name)
    for word in MODELS[name]["refused"] if family in FAMILIES else [f"model_type='{family}'"]:
        assert word in str(caught.value)
