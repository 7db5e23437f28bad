"""Map a GGUF file's tensors to the decoder's: other names, other row orders, and types that must be unpacked.

F32, F16 and BF16 are used in place, like the blocks (:mod:`llmc.ggml`) of linears, experts and tables. Copied are
floats with another row order, vectors and small matrices in blocks (as float32), and the experts of gpt-oss, in the
byte order that kernels read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import CheckpointError
from llmc.export.sources.codes import MXFP4_BLOCK, GgmlTensor, Mxfp4Tensor, QuantizedTensor, Weight, pack_codes
from llmc.export.sources.gguf.config import head_dim
from llmc.export.sources.gguf.header import Entry, Header
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.safetensors import StoredTensor
from llmc.ggml import LAYOUTS, Bytes
from llmc.strict import open_regular

# Types that need no unpacking, with their numpy types.
STORED = ("F32", "F16", "BF16")
# Weights to unpack at a time: 16 MiB as float32.
PIECE = 1 << 22
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_LAYER = "model.embed_tokens_per_layer.weight"
_MODULES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    # Experts by llmc's own names, and the MLPs beside them that process every token.
    "ffn_gate_inp": "experts.router",
    "exp_probs_b.bias": "experts.correction",
    **{f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate", "up", "down", "gate_up")},
    **{f"ffn_{part}_shexp": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.weight_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_SANDWICH,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{it}": f"post_feedforward_layernorm_{it}" for it in (1, 2)},
    "ffn_gate_inp.scale": "experts.router_norm.weight",
    "ffn_down_exps.scale": "experts.per_expert_scale",
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
}
_QWEN35 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MAMBA = {
    **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "out")},
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
}
_NEMOTRON_H = {
    **{name: module.replace("mamba", "mixer") for name, module in _MAMBA.items()},
    "attn_norm": "norm",
    "ffn_latent_down": "experts.fc1_latent_proj",
    "ffn_latent_up": "experts.fc2_latent_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
# Whole names of tensors whose suffix changes, too.
_OTHER_MODULES = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), _SANDWICH),
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "gemma4_text": _GEMMA4,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN35),
    "qwen3_next": _QWEN35 | {"ssm_ba": "linear_attn.in_proj_ba"},
    "granitemoehybrid": _MAMBA,
    "falcon_h1": {**_MAMBA, "ffn_norm": "pre_ff_layernorm.weight"},  # which the converter calls no weight
    "nemotron_h": _NEMOTRON_H,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"},
    "gpt_neox": {"attn_qkv": "self_attn.query_key_value"},
    "gpt2": {"attn_qkv": "self_attn.c_attn"},
}
# Matrices and tables that are used in blocks.
_KEPT = (
    *("_proj.weight", "query_key_value.weight", "c_attn.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
    *("per_layer_input_gate.weight", "per_layer_projection.weight", EMBEDDING, PER_LAYER, HEAD),
)
# Families whose heads llama.cpp rotates in neighbouring pairs, Hugging Face in pairs half a head apart.
_TURNED = ("llama", "mistral", "mixtral", "ministral3", "granite", "granitemoe", "granitemoehybrid", "smollm3", "llada")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<own>(?P<module>.+?)(?P<kind>\.weight|\.bias|))")
# Tensors whose rows (``ssm_out``: columns) belong to value heads, one row per value or per head. llama.cpp stores the
# first value head of each key head, then the second ones; Hugging Face stores those of one key head together.
_OF_VALUE_HEADS = dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out"), True)
_OF_VALUE_HEADS |= dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), False)
# Vectors that may be stored with two dimensions.
_VECTORS = tuple(f"{mixer}.{part}" for mixer in ("mamba", "mixer") for part in ("A_log", "D", "norm.weight"))
# Tensors that repeat the config.
_CONSUMED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def decoder_tensors(headers: Sequence[Header], config: Mapping[str, Any]) -> dict[str, Weight]:
    """All tensors by parameter name."""
    tensors: dict[str, Weight] = {}
    entries = [
        (header.path, entry) for header in headers for entry in header.tensors if not _is_left_out(entry.name, config)
    ]
    places = {entry.name: (path, entry) for path, entry in entries}
    fp4 = [entry.name.removesuffix(".weight") for _, entry in entries if entry.kind == "NVFP4"]
    factors = {f"{base}.weight": places[f"{base}.scale"] for base in fp4 if f"{base}.scale" in places}
    scales = {f"{base}.{kind}" for base in fp4 for kind in ("scale", "input_scale")}
    for path, entry in entries:
        if entry.name in scales:
            continue
        name = parameter(entry.name, config["model_type"])
        if name in tensors:
            raise CheckpointError(f"{path}: {entry.name} is in another file, too; download the files again")
        if name.endswith((".conv.weight", ".conv1d.weight")):  # [channels, taps]; Hugging Face: [channels, 1, taps]
            entry = replace(entry, shape=(entry.shape[0], 1, *entry.shape[1:]))
        elif name.endswith(".weight_proj.weight"):  # a vector; Hugging Face: a row
            entry = replace(entry, shape=(1, entry.shape[-1]))
        elif name.endswith(_VECTORS):  # stored as a row, a column, or a row per group
            entry = replace(entry, shape=(prod(entry.shape),))
        if config["model_type"] == "gpt_oss" and "_exps." in entry.name:
            continue
        order, factor = _order(entry, config), factors.get(entry.name)
        # Gates are made of these experts, so that both share no blocks.
        apart = config["model_type"] == "nemotron_h" and entry.name.endswith("ffn_up_exps.weight")
        in_blocks = factor or (apart and entry.kind not in STORED)
        tensors[name] = _read_codes(path, entry, order, factor) if in_blocks else _tensor(path, entry, name, order)
    if config["model_type"] == "gpt_oss":
        tensors |= _weave_experts(places)
    return tensors | _join_latent(places, tensors)


def _join_latent(places: Mapping[str, tuple[Path, Entry]], tensors: dict[str, Weight]) -> dict[str, Weight]:
    """Take matrices that make keys or values of a latent vector out of ``tensors``; return both of a layer as one."""
    joined: dict[str, Weight] = {}
    for name in [name for name in tensors if name.endswith(".attn_k_b.weight")]:
        layer = name.removesuffix(".attn_k_b.weight")
        other = f"{layer}.attn_v_b.weight"
        keys, values = places[name], places.get(other)
        if values is None or len(keys[1].shape) != 3 or keys[1].shape[:2] != (values[1].shape[0], values[1].shape[-1]):
            raise CheckpointError(f"{keys[0]}: {name} does not fit {other}; download the file again")
        del tensors[name], tensors[other]
        joined[f"{layer.replace('blk.', 'model.layers.')}.self_attn.kv_b_proj.weight"] = _join_heads(keys, values)
    return joined


def _join_heads(keys: tuple[Path, Entry], values: tuple[Path, Entry]) -> MadeTensor:
    """Of each head the rows that make its keys, stored turned, then those that make its values."""
    (heads, latent, width), rows = keys[1].shape, values[1].shape[1]

    def read(path: Path, entry: Entry) -> Iterator[NDArray[Any]]:
        decode = partial(_plain, entry) if entry.kind in STORED else partial(_unpack_rows, path, entry)
        return (head.astype(np.float32) for chunk in _rows(path, entry, None, decode) for head in chunk)

    def pieces() -> Iterator[NDArray[Any]]:
        for key, value in zip(read(*keys), read(*values), strict=True):
            yield np.concatenate([key.T, value])

    return MadeTensor("F32", (heads * (width + rows), latent), pieces)


def _weave_experts(entries: Mapping[str, tuple[Path, Entry]]) -> dict[str, Weight]:
    """gpt-oss's experts in MXFP4 as in its checkpoint: rows of gate and up alternate, neighbours share a byte."""
    woven: dict[str, Weight] = {}
    for name, (path, entry) in entries.items():
        match = re.fullmatch(r"(.*\.ffn_)(gate|down)(_exps\.(?:weight|bias))", name)
        if match is None:
            continue
        kinds = ("gate", "up") if match[2] == "gate" else ("down",)
        names = [match[1] + kind + match[3] for kind in kinds]
        parts = [entries.get(own_name, (path, replace(entry, kind="missing"))) for own_name in names]
        wanted = ("MXFP4", entry.shape) if name.endswith("weight") else ("F32", entry.shape)
        for own_name, (_, part) in zip(names, parts, strict=True):
            if (part.kind, part.shape) != wanted:
                raise CheckpointError(
                    f"{path}: {own_name} is {part.kind} {list(part.shape)}, expected {wanted[0]} {list(wanted[1])}; "
                    "export the checkpoint that the file was converted from"
                )
        stacked_name = parameter(name.replace("gate", "gate_up"), "gpt_oss")
        weave = partial(_weave, parts)
        if name.endswith("bias"):
            woven[stacked_name] = MadeTensor(
                "F32", (entry.shape[0], len(parts) * entry.shape[1]), partial(weave, lambda raw: raw.view(np.float32))
            )
            continue
        shape, inputs = (entry.shape[0], len(parts) * entry.shape[1]), entry.shape[2]
        codes = MadeTensor("U8", (*shape, inputs // 2), partial(weave, _fp4_codes))
        scales = MadeTensor(
            "U8", (*shape, inputs // MXFP4_BLOCK), partial(weave, lambda raw: raw[:, :: LAYOUTS["MXFP4"].size])
        )
        woven[stacked_name] = Mxfp4Tensor(codes, scales)
    return woven


def _weave(parts: Sequence[tuple[Path, Entry]], read: Callable[[Bytes], NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Chunks of experts [e, rows, ...] with the rows of all parts interleaved."""
    streams = [_rows(path, entry, None, lambda raw: raw) for path, entry in parts]
    for raws in zip(*streams, strict=True):
        rows = [read(raw.reshape(len(raw) * entry.shape[1], -1)) for raw, (_, entry) in zip(raws, parts, strict=True)]
        yield np.stack(rows, 1).reshape(len(raws[0]), -1)


def _fp4_codes(raw: Bytes) -> NDArray[np.uint8]:
    layout = LAYOUTS["MXFP4"]
    codes = layout.codes.index(raw.reshape(-1, layout.size))
    return pack_codes(codes.reshape(len(raw), -1).view(np.int8))


def parameter(name: str, family: str) -> str:
    """Hugging Face's name of a tensor; an unknown name is kept, and later refused as unused."""
    match, modules = _NAME.fullmatch(name), _MODULES | _OTHER_MODULES.get(family, {})
    if match is None or not {match["own"], match["module"]} & modules.keys():
        return name
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{modules.get(match['own']) or modules[match['module']] + match['kind']}"


def read_factors(header: Header, config: Mapping[str, Any]) -> dict[str, dict[str, NDArray[np.float32]]]:
    """An adapter's ``lora_a`` [r, inputs] and ``lora_b`` [outputs, r] by parameter name, in Hugging Face's order."""
    factors: dict[str, dict[str, NDArray[np.float32]]] = {}
    for entry in header.tensors:
        name, _, part = entry.name.rpartition(".")
        if entry.kind not in STORED or len(entry.shape) != 2 or part not in ("lora_a", "lora_b"):
            raise CheckpointError(
                f"{header.path}: {entry.name} is {entry.kind} {list(entry.shape)}, expected matrices ....weight.lora_a "
                f"and lora_b in {', '.join(STORED)}; convert the adapter again (convert_lora_to_gguf.py)"
            )
        order = _order(replace(entry, name=name), config) or Order()
        order = replace(order, columns=None) if part == "lora_b" else replace(order, rows=None)
        pieces = _rows(header.path, entry, order, partial(_plain, entry))
        whole = np.concatenate([_check_numbers(header.path, entry, piece) for piece in pieces])
        factors.setdefault(parameter(name, config["model_type"]), {})[part] = whole.astype(np.float32)
    return factors


def read_small(path: Path, entry: Entry) -> NDArray[np.float32]:
    if entry.kind != "F32" or len(entry.shape) != 1:
        raise CheckpointError(f"{path}: {entry.name} is {entry.kind} {list(entry.shape)}, expected a vector in F32")
    return next(_rows(path, entry, None, partial(_plain, entry)))


def _is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    """True for tensors that repeat the config, and for layers that predict further tokens."""
    match = _NAME.fullmatch(name)
    layer = int((match and match["layer"]) or -1)
    further = any(config.get(key) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return name in _CONSUMED or (further and layer >= config["num_hidden_layers"])


@dataclass(frozen=True)
class Order:
    """Positions in the file of a tensor's rows, or of its columns in runs of ``run``."""

    rows: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None
    run: int = 1


def _order(entry: Entry, config: Mapping[str, Any]) -> Order | None:
    """The order of a tensor's rows or columns; None if it is Hugging Face's."""
    match, family, rows = _NAME.fullmatch(entry.name), config["model_type"], entry.shape[0]
    module = match["module"] if match else ""
    if family in _TURNED and module in ("attn_q", "attn_k"):
        width = head_dim(config)
        pairs = width > 1 and width % 2 == 0 and rows % width == 0
        return Order(_exchange(rows, (-1, width // 2, 2, 1))) if pairs else None
    packed = family == "qwen3_next" and module == "ssm_ba"
    if not packed and (not family.startswith("qwen3_5") or module not in _OF_VALUE_HEADS):
        return None
    keys, values = (config[f"linear_num_{part}_heads"] for part in ("key", "value"))
    if packed:  # the file too has the scalars of each key head together, those of beta first
        fits = rows == 2 * values and values % keys == 0
        return Order(_exchange(rows, (keys, 2, values // keys))) if fits else None
    width = config["linear_value_head_dim"] if _OF_VALUE_HEADS[module] else 1
    size = entry.shape[-1] if module == "ssm_out" else rows
    before = size - values * width
    if keys == values or values % keys or before < 0 or (before and module not in ("attn_qkv", "ssm_conv1d")):
        return None
    order = _exchange(values * width, (values // keys, keys, width))
    if module == "ssm_out":
        return Order(columns=order, run=width)
    return Order(np.concatenate([np.arange(before), order + before]))


def _exchange(count: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Indices of an array of this shape after its two axes before the last are swapped."""
    numbers: NDArray[np.int64] = np.arange(count).reshape(shape).swapaxes(-3, -2).ravel()
    return numbers


def _tensor(path: Path, entry: Entry, name: str, order: Order | None) -> Weight:
    rows = partial(_rows, path, entry, order)
    if entry.name.endswith(".ssm_a"):
        return MadeTensor("F32", entry.shape, lambda: rows(partial(_logarithms, path, entry)))
    if entry.kind in STORED:
        if order is None:
            return StoredTensor(path.name, entry.offset, entry.length, entry.kind, entry.shape)
        return MadeTensor(entry.kind, entry.shape, lambda: rows(partial(_plain, entry)))
    # Columns are moved in whole blocks: split blocks would not share a scale.
    in_blocks = order is None or order.columns is None or order.run % LAYOUTS[entry.kind].block == 0
    if not name.endswith(_KEPT) or not in_blocks:
        return MadeTensor("F32", entry.shape, lambda: rows(partial(_unpack_rows, path, entry)))
    flat = (prod(entry.shape[:-1]), entry.shape[-1])
    stored = StoredTensor(path.name, entry.offset, entry.length, entry.kind, flat)
    order = order or Order()
    places = [None if positions is None else positions.astype(np.int32) for positions in (order.rows, order.columns)]
    return GgmlTensor((stored,), places[0], places[1], entry.shape[0] if len(entry.shape) > 2 else 0)


def _read_codes(path: Path, entry: Entry, order: Order | None, factor: tuple[Path, Entry] | None) -> QuantizedTensor:
    """Codes, scales and offsets of blocks apart; ``factor`` multiplies a matrix, or each expert by its own number."""
    layout, experts = LAYOUTS[entry.kind], entry.shape[0] if len(entry.shape) > 2 else 0
    count = experts or 1
    if (factor and factor[1].shape != (count,)) or (order is not None and order.columns is not None):
        raise CheckpointError(
            f"{path}: {entry.name} needs {count} more scales and columns in Hugging Face's order; export the "
            "checkpoint that the file was converted from"
        )
    rows, columns = prod(entry.shape[:-1]), entry.shape[-1]

    def read(numbers: Callable[[Bytes], NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """The numbers of all rows in order, an expert at a time."""
        for raws in _rows(path, entry, order, lambda raw: raw):
            for raw in raws if experts else [raws]:
                yield numbers(raw.reshape(-1, layout.size)).reshape(rows // experts if experts else len(raw), -1)

    def codes() -> Iterator[NDArray[Any]]:
        return (part if layout.bits == 8 else pack_codes(part) for part in read(layout.codes.read))

    def scaled(numbers: Callable[[Bytes], NDArray[Any]]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.concatenate(list(read(numbers))).reshape(count, -1)
        values = values if factor is None else values * read_small(*factor)[:, None]
        return _check_numbers(path, entry, values.reshape(rows, -1))

    made = MadeTensor("I8" if layout.bits == 8 else "I4", (rows, columns), codes)
    offsets = None if layout.minima is None else partial(scaled, layout.offsets)  # type: ignore[arg-type]
    return QuantizedTensor(made, layout.block, partial(scaled, layout.scales.read), offsets=offsets, stacked=experts)


def _rows(
    path: Path, entry: Entry, order: Order | None, read: Callable[[Bytes], NDArray[Any]]
) -> Iterator[NDArray[Any]]:
    """Chunks of a tensor's rows in order, decoded by ``read``."""
    width = int(np.prod(entry.shape[1:], dtype=np.int64))
    step = max(1, PIECE // width)
    with open_regular(path) as file:
        try:
            raw = np.memmap(file, np.uint8, "r", entry.offset, (entry.shape[0], entry.row))
        except ValueError as error:
            raise CheckpointError(
                f"{path}: ends inside {entry.name}; the file is truncated, download it again"
            ) from error
    for start in range(0, entry.shape[0], step):
        rows = slice(start, start + step)
        values = read(np.asarray(raw[rows] if order is None or order.rows is None else raw[order.rows[rows]]))
        if order is not None and order.columns is not None:
            values = values[:, order.columns]
        yield values


def _plain(entry: Entry, raw: Bytes) -> NDArray[Any]:
    return raw.view(array_type(entry.kind)).reshape(raw.shape[0], *entry.shape[1:])


def _logarithms(path: Path, entry: Entry, raw: Bytes) -> NDArray[np.float32]:
    """A_log from -exp(A_log)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _check_numbers(path, entry, np.log(-_plain(entry, raw).astype(np.float64)).astype(np.float32))


def _unpack_rows(path: Path, entry: Entry, raw: Bytes) -> NDArray[Any]:
    """Rows of blocks, as bytes -> float32 [rows, ...]."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = LAYOUTS[entry.kind].unpack(raw)
    return _check_numbers(path, entry, values).reshape(raw.shape[0], *entry.shape[1:])


def _check_numbers(path: Path, entry: Entry, values: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{path}: {entry.name} holds NaN or infinite weights; the file is broken, download it again"
        )
    return values
