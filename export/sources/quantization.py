"""Read ``quantization_config`` from a checkpoint's config.json: how its weights are stored.

The tensor names and shapes show which linears are quantized and how; the config, which must agree, tells how to read
them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.export.keys import Keys, read_object

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "modelopt")
MODELOPT_FILE = "hf_quant_config.json"
# Keys about how the codes were chosen, or about other engines' kernels.
# fmt: off
_SETTLED = (
    "act_group_aware", "auto_gptq_version", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize", "desc_act",
    "disable_exllama", "do_fuse", "exllama_config", "fail_safe", "failsafe", "fuse_max_seq_len", "gptaq",
    "global_compression_ratio",
    "gptqmodel_version", "hyb_act", "lm_head", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_convert", "modules_to_fuse", "mse", "offload_to_disk", "pad_token_id", "quantizer", "run_compressed",
    "scale_fmt",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "use_optimized_inference",
    "version",
)
_SETTLED_GROUP = ("actorder", "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_COMPRESSED = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)
# fmt: on
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


@dataclass(frozen=True)
class Grid:
    """Bits of a code, and the number of inputs that share a scale: 0 for a whole row, None if unknown."""

    bits: int
    group: int | None = None


@dataclass(frozen=True)
class Quantization:
    """The form in which a checkpoint stores quantized weights."""

    method: str  # one of :data:`METHODS`
    grids: tuple[Grid, ...]  # formats that a quantized linear may have
    ignored: tuple[str, ...] = ()  # modules that the config lists as unquantized
    zero_offset: int = 0  # added to stored zero points: the original GPTQ stores them minus one
    # rows and columns that share a scale of fp8; (0, 0) if a row or the whole matrix does
    block: tuple[int, int] = (0, 0)


def add_modelopt(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config with the quantization that older versions of ModelOpt wrote into a file of its own."""
    stated = read_object(folder, MODELOPT_FILE) if "quantization_config" not in values else None
    if stated is None:
        return values
    inner = stated.get("quantization")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{folder / MODELOPT_FILE}: quantization is no object; download the file again")
    return {**values, "quantization_config": {**inner, "quant_method": "modelopt"}}


def read_quantization(config: Keys) -> Quantization | None:
    """The checkpoint's ``quantization_config`` or ``compression_config``; None if it has none."""
    names = [name for name in ("quantization_config", "compression_config") if config.raw(name) is not None]
    if not names:
        return None
    keys = config.inside(names[0])
    method = keys.choice("quant_method", METHODS)
    keys.skip(*_SETTLED)
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _read_compressed, "fp8": _fp8, "mxfp4": _mxfp4}
    quantization = {**readers, "modelopt": _read_modelopt}[method](keys, config)
    keys.finish()
    return quantization


def _awq(keys: Keys, _: Keys) -> Quantization:
    version = keys.raw("version")
    if version is not None and str(version).lower() != "gemm":
        raise keys.error("version", version, "gemm, the order of codes that AutoAWQ writes by default")
    for name in ("format", "checkpoint_format"):
        keys.choice(name, ("gemm",), "gemm")
    keys.flag("zero_point", True)  # the files always have zero points
    _read_packing(keys)
    return Quantization("awq", (Grid(_bits(keys, "bits", (4,)), _group(keys)),), _names(keys, "modules_to_not_convert"))


def _gptq(keys: Keys, _: Keys) -> Quantization:
    version = keys.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    keys.choice("format", (version,), version)
    keys.fixed("is_marlin_format", False, ": codes as GPTQ stores them, before a kernel lays them out")
    _read_packing(keys)
    grid = Grid(_bits(keys, "bits", (4, 8)), _group(keys))
    return Quantization("gptq", (grid,), _names(keys, "modules_to_not_convert"), int(version == "gptq"))


def _read_packing(keys: Keys) -> None:
    """Check the keys that GPTQModel writes for every method."""
    keys.choice("pack_dtype", ("int32",), "int32")
    dynamic = keys.raw("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(name).startswith("-:") for name in dynamic):
        raise keys.error("dynamic", dynamic, "only patterns that begin with -: and leave modules unquantized")


def _fp8(keys: Keys, config: Keys) -> Quantization:
    keys.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    keys.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    keys.choice("expert_dtype", ("fp8",), "fp8")
    _note_activations(config)
    if keys.raw("kv_cache_scheme") is not None:
        _note_cache(config)
    block = _pair(keys, "weight_block_size")
    ignored = (*_names(keys, "modules_to_not_convert"), *_names(keys, "ignored_layers"))
    return Quantization("fp8", (Grid(8),), ignored, block=block)


def _mxfp4(keys: Keys, _: Keys) -> Quantization:
    return Quantization("mxfp4", (), _names(keys, "modules_to_not_convert"))


def _read_modelopt(keys: Keys, config: Keys) -> Quantization:
    """The config of NVIDIA's ModelOpt, in config.json or as hf_quant_config.json has it."""
    algorithm = keys.choice("quant_algo", (*_ALGORITHMS, "MIXED_PRECISION"))
    keys.skip("config_groups", "group_size", "producer", "weights", "input_activations")  # the tensors show them
    layers = keys.raw("quantized_layers") or {}
    each = layers.values() if isinstance(layers, dict) else [layers]
    named = [str(item.get("quant_algo") if isinstance(item, dict) else item) for item in each]
    if unknown := [item for item in named if item not in _ALGORITHMS]:
        raise keys.error("quantized_layers", unknown[0], f"layers of {', '.join(_ALGORITHMS)}")
    if any(not item.startswith("W4A16") for item in named or [algorithm]):
        _note_activations(config)
    if any("NVFP4" in item for item in named or [algorithm]):
        _note_float4(config)
    if any(keys.raw(name) is not None for name in ("kv_cache_scheme", "kv_cache_quant_algo")):
        _note_cache(config)
    return Quantization("modelopt", (Grid(4), Grid(8)), (*_names(keys, "ignore"), *_names(keys, "exclude_modules")))


def _read_compressed(keys: Keys, config: Keys) -> Quantization:
    keys.choice("format", _COMPRESSED, "pack-quantized")
    keys.choice("quantization_status", ("compressed", "frozen"), "compressed")
    for name, plain in (("sparsity_config", "dense"), ("transform_config", ""), ("moe_sparsity_config", "")):
        value = keys.raw(name) or {}
        if not isinstance(value, dict) or (any(value.values()) and value.get("format") != plain):
            raise keys.error(name, value, "nothing, since llmc does not read it")
    if keys.raw("kv_cache_scheme") is not None:
        _note_cache(config)
    groups = keys.inside("config_groups")
    named = keys.raw("config_groups")
    grids, blocks = [], []
    for name in named:
        grid, block = _read_compressed_group(groups.inside(name), config)
        grids.append(grid)
        blocks.append(block)
    groups.finish()
    if not grids or len(set(blocks)) > 1:
        raise keys.error("config_groups", sorted(named), "one group, or several that all or none have fp8 blocks")
    return Quantization("compressed-tensors", tuple(grids), _names(keys, "ignore"), block=blocks[0])


def _read_compressed_group(group: Keys, config: Keys) -> tuple[Grid, tuple[int, int]]:
    group.skip("targets")  # the files say which linears are quantized
    group.choice("format", _COMPRESSED, "pack-quantized")
    if group.raw("input_activations") is not None:
        _note_activations(config)
    if group.raw("output_activations") is not None:
        raise group.error("output_activations", group.raw("output_activations"), "null")
    keys = group.inside("weights")
    keys.skip(*_SETTLED_GROUP)
    keys.flag("symmetric", True)
    kind, strategy = keys.choice("type", ("int", "float"), "int"), keys.raw("strategy")
    bits = _bits(keys, "num_bits", (4, 8))
    strategies = ("group", "channel", "tensor", *(("block", "tensor_group") if kind == "float" else ()))
    if strategy is not None and strategy not in strategies:
        raise keys.error("strategy", strategy, f"one of {', '.join(strategies)}")
    block = _pair(keys, "block_structure") if strategy == "block" else (0, 0)
    keys.skip("block_structure")
    if (kind, bits) == ("float", 4):
        _note_float4(config)
    width = _group(keys) if strategy in ("group", None) and keys.raw("group_size") is not None else 0
    keys.skip("group_size")
    keys.finish()
    group.finish()
    return Grid(bits, width if kind == "int" else None), block


def _bits(keys: Keys, name: str, known: tuple[int, ...]) -> int:
    bits = keys.integer(name)
    if bits not in known:
        raise keys.error(name, bits, " or ".join(map(str, known)))
    return bits


def _group(keys: Keys) -> int:
    return max(0, keys.integer("group_size", -1))


def _pair(keys: Keys, name: str) -> tuple[int, int]:
    value = keys.raw(name)
    if value is None:
        return 0, 0
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or not 1 <= n <= 4096 for n in value):
        raise keys.error(name, value, "two numbers from 1 to 4096, rows and columns")
    return value[0], value[1]


def _names(keys: Keys, name: str) -> tuple[str, ...]:
    """Module names in a list; patterns are skipped, since the files show which modules are quantized."""
    value: Any = keys.raw(name) or []
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise keys.error(name, value, "a list of names of modules")
    return tuple(item for item in value if not item.startswith("re:"))


def _note_activations(config: Keys) -> None:
    _note_once(config, "activations are not rounded as quantization_config says; only weights are quantized")


def _note_float4(config: Keys) -> None:
    _note_once(config, "linears in 4-bit floats become 8-bit integers, exactly: no kernel for CPUs takes them")


def _note_once(config: Keys, sentence: str) -> None:
    if not any(sentence in note for note in config.notes):
        config.note(sentence)


def _note_cache(config: Keys) -> None:
    config.note("the KV cache is not rounded as quantization_config says; build with an int8 cache for a small one")
