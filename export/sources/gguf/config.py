"""Rebuild the parts of ``config.json`` that all architectures share from a GGUF file's metadata."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import CheckpointError, format_name

_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Most layers for a period.
MOST_LAYERS = 1 << 12
# Keys that do not change the computation; keys of experts and of causality are refused at other values than these.
_IRRELEVANT = ("rope.scaling.finetuned", "tensor_data_layout", "rope.scaling.yarn_ext_factor")
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


class Metadata:
    """An architecture's metadata, every key of which must be read or skipped, and the shapes of the file's tensors by
    name. ``where`` names the file in errors, ``read`` returns the values of a small tensor."""

    def __init__(
        self,
        where: str,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], NDArray[np.float32]],
    ) -> None:
        self.where = where
        self.values = values
        self.architecture = str(values.get("general.architecture", "none"))
        self.shapes = shapes
        self.tensor = read
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``ARCHITECTURE.key``; also of a list that has the same number for each layer with one."""
        self._read.add(key)
        value = self.values.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, (np.ndarray, list)):
            return value
        kept = [item for item in value if item] or list(value)
        if not kept or any(item != kept[0] for item in kept):
            raise self.error(key, f"a list of {len(value)} values", "the same for all layers")
        return kept[0].item() if isinstance(value, np.ndarray) else kept[0]

    def each(self, key: str) -> list[Any] | None:
        """A key's value for each layer, None if it is missing; one number n means that every n-th layer differs."""
        self._read.add(key)
        value, layers = self.values.get(f"{self.architecture}.{key}"), self.get("block_count")
        if value is None or isinstance(value, (np.ndarray, list)):
            return None if value is None else list(value)
        if type(value) is not int or type(layers) is not int or value < 1 or not 0 < layers <= MOST_LAYERS:
            raise self.error(key, repr(value), f"a period of the {layers} layers, or a value for each")
        return [(i + 1) % value != 0 for i in range(layers)]

    def of_layers(self, key: str) -> list[Any]:
        """A key's value for each layer; one number applies to all."""
        self._read.add(key)
        value, layers = self.values.get(f"{self.architecture}.{key}"), self.get("block_count")
        if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
            raise self.error("block_count", repr(layers), "a number of layers")
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * layers
        if len(values) != layers or any(type(item) is not int for item in values):
            raise self.error(key, repr(value), f"a number for each of the {layers} layers")
        return values

    def has(self, tensor: str) -> bool:
        return f"blk.0.{tensor}" in self.shapes

    def skip(self, *keys: str) -> None:
        self._read.update(keys)

    def finish(self) -> None:
        for name, value in self.values.items():
            key = name.removeprefix(f"{self.architecture}.")
            if key == name or key in self._read or key in _IRRELEVANT:
                continue
            if key not in _NEUTRAL:
                raise CheckpointError(
                    f"{self.where}: {format_name(name)}={value!r:.80} is not known to llmc and may change the result; "
                    "export the checkpoint that the file was converted from"
                )
            if isinstance(value, np.ndarray | list) or value != _NEUTRAL[key]:
                raise self.error(key, repr(value), repr(_NEUTRAL[key]))

    def error(self, key: str, value: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {format_name(f'{self.architecture}.{key}')} is {value:.80}, which is unsupported; expected "
            f"{expected}"
        )


def read_common(data: Metadata, differing: Collection[str] = ()) -> dict[str, Any]:
    """Read the keys that all architectures have, except ``differing`` ones, which have another meaning."""
    keys = {key: name for key, name in _COMMON.items() if key not in differing}
    config = {name: value for key, name in keys.items() if (value := data.get(key)) is not None}
    config["vocab_size"] = data.shapes.get("token_embd.weight", (0,))[0]
    config["tie_word_embeddings"] = "output.weight" not in data.shapes
    if data.get("vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise data.error("vocab_size", str(data.get("vocab_size")), f"the {config['vocab_size']} rows of the embedding")
    if type(width := config.get("head_dim", 1)) is not int or width < 1:
        raise data.error("attention.key_length", repr(width), "the width of a head, 1 or more")
    if "attention.key_length" not in differing:
        check_width(data, config, "attention.value_length")
    return config


def check_width(data: Metadata, config: Mapping[str, Any], key: str) -> None:
    width = head_dim(config)
    if width and data.get(key, width) != width:
        raise data.error(key, str(data.get(key)), f"the width of a head, {width}")


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of a head, 0 if the config has none."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if type(config.get("head_dim")) is int:
        return int(config["head_dim"])
    return hidden // heads if type(heads) is type(hidden) is int and heads > 0 else 0


def read_rope(data: Metadata, config: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """The rope: Llama 3's if the file has its factors, else by metadata; of whole heads unless ``partial``."""
    base = {"rope_theta": config.get("rope_theta", 10_000.0)}
    if partial:
        base["partial_rotary_factor"] = turned_values(data, config) / head_dim(config)
    else:
        check_width(data, config, "rope.dimension_count")
    kind, factor = data.get("rope.scaling.type", "none"), data.get("rope.scaling.factor", data.get("rope.scale_linear"))
    if kind not in ("none", "linear", "yarn"):
        raise data.error("rope.scaling.type", repr(kind), "none, linear or yarn")
    original = data.get("rope.scaling.original_context_length", config.get("max_position_embeddings"))
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if data.get(key, 1.0) != 1:
            raise data.error(key, str(data.get(key)), "1")
    if "rope_freqs.weight" in data.shapes:
        return {**base, "rope_scaling": _llama3(data, config)}
    if kind == "yarn":
        betas = {name: data.get(f"rope.scaling.yarn_{name}") for name in ("beta_slow", "beta_fast")}
        betas = {name: value for name, value in betas.items() if value is not None}
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        return {**base, "rope_scaling": {**scaling, **betas}}
    return {**base, "rope_scaling": {"rope_type": "linear", "factor": factor}} if factor not in (None, 1) else base


def turned_values(data: Metadata, config: Mapping[str, Any]) -> int:
    """Number of values of each head that are rotated."""
    width = head_dim(config)
    turned = data.get("rope.dimension_count", width)
    if type(turned) is not int or not 0 < turned <= width:
        raise data.error("rope.dimension_count", str(turned), f"at most the width of a head, {width}")
    return turned


# The factors are float32, but the numbers they were computed from are round.
_SAME_FACTOR = 1e-4


def _llama3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the parameters of Llama 3.1's rope from its factors, one per pair of a head's values.

    A factor is 1 for short wavelengths, F for long ones, and between them 1/f = (1 - s)/F + s where the smooth part
    s = (P/wavelength - low)/(high - low) is a line over 1/wavelength. The line gives all but one of P (positions that
    the model was trained with), low and high; low is 1 in every published model."""
    width, theta = head_dim(config), config.get("rope_theta", 10_000.0)
    name = "rope_freqs.weight"
    if type(theta) is not float or not 1 < theta < float("inf"):
        raise data.error("rope.freq_base", repr(theta), "a number above 1")
    factors = np.array(read_factors(data, name, width // 2))
    turns = theta ** -(np.arange(0, width, 2) / width) / (2 * np.pi)  # per position: 1 / wavelength
    largest = factors.max()
    between = (factors > 1) & (factors < largest)
    high, positions = 4.0, 8192
    if between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        slope, start = np.polyfit(turns[between], smooth, 1)
        high = round(1 - 1 / float(start), 2) if start < 0 else high
        positions = round(float(slope) * (high - 1))
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(largest), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": positions,
    }
    if not np.allclose(llama3_factors(scaling, turns), factors, rtol=_SAME_FACTOR):
        raise CheckpointError(
            f"{data.where}: {name} do not follow Llama 3's rule of scaling, the only one that llmc knows; export the "
            "checkpoint that the file was converted from"
        )
    return scaling


def llama3_factors(scaling: Mapping[str, Any], turns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divisors of the frequencies, given as turns per position."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] * turns - low) / (high - low)
    smooth = smooth.clip(0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


def read_factors(data: Metadata, name: str, pairs: int) -> list[float]:
    if data.shapes[name] != (pairs,):
        raise CheckpointError(f"{data.where}: {name} has shape {list(data.shapes[name])}, expected [{pairs}]")
    return [float(str(factor)) for factor in data.tensor(name)]
