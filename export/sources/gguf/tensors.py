"""A GGUF file's tensors as the decoder's: other names, other orders of rows, and types that must be unpacked.

F32, F16 and BF16 are used in place. The other types are blocks of codes with scales, which matrices keep. Tables that
multiply nothing, or have minima, become float16, at most 2^-11 (relative) from llama.cpp's float32 values. Vectors stay
float32.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import CheckpointError
from llmc.export.sources.codes import QuantizedTensor, Weight, pack_codes
from llmc.export.sources.gguf.blocks import LAYOUTS, Bytes
from llmc.export.sources.gguf.config import head_dim
from llmc.export.sources.gguf.header import BLOCKS, Entry, Header
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.safetensors import StoredTensor
from llmc.strict import open_regular

# Types that need no unpacking, and their numpy types.
STORED = ("F32", "F16", "BF16")
# Number of weights that are unpacked at a time: 16 MiB as float32.
PIECE = 1 << 22
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_MODULES = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), _SANDWICH),
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "lfm2": {
        "token_embd_norm": "model.embedding_norm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
    },
    "gpt_neox": {"attn_qkv": "self_attn.query_key_value"},
    "gpt2": {"attn_qkv": "self_attn.c_attn"},
}
# Families whose heads llama.cpp rotates by neighbouring values, Hugging Face by values half a head apart.
_TURNED = ("llama", "mistral", "ministral3", "granite", "smollm3")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>[a-z_]+(?:\.[a-z_]+)?)\.(?P<kind>weight|bias)")
# What the config says, too.
_CONSUMED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def decoder_tensors(headers: Sequence[Header], config: Mapping[str, Any]) -> tuple[dict[str, Weight], bool]:
    """All tensors by parameter name, and whether the export links the files.

    It does so only if some matrix is used in place: a few vectors are not worth the files' size.
    """
    found: dict[str, Weight] = {}
    entries = [(header.path, entry) for header in headers for entry in header.tensors if entry.name not in _CONSUMED]
    link = any(len(e.shape) > 1 and e.kind in STORED and not _count_turned_rows(e, config) for _, e in entries)
    for path, entry in entries:
        name = parameter(entry.name, config["model_type"])
        if name in found:
            raise CheckpointError(f"{path}: {entry.name} is in another file, too; download the files again")
        if name.endswith("conv.conv.weight"):  # [channels, taps], there [channels, 1, taps]
            entry = replace(entry, shape=(entry.shape[0], 1, *entry.shape[1:]))
        found[name] = _tensor(path, entry, _count_turned_rows(entry, config), link, _is_kept(name, entry, config))
    return found, link


def parameter(name: str, family: str) -> str:
    """Hugging Face's name of a tensor; an unknown name is kept, and refused later as unused."""
    match, modules = _NAME.fullmatch(name), _MODULES | _OTHER_MODULES.get(family, {})
    if match is None or match["module"] not in modules:
        return name
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{modules[match['module']]}.{match['kind']}"


def read_small(path: Path, entry: Entry) -> NDArray[np.float32]:
    if entry.kind != "F32" or len(entry.shape) != 1:
        raise CheckpointError(f"{path}: {entry.name} is {entry.kind} {list(entry.shape)}, expected a vector in F32")
    return next(_rows(path, entry, 0, partial(_plain, entry)))


def _count_turned_rows(entry: Entry, config: Mapping[str, Any]) -> int:
    """Rows of a head whose order must be undone, 0 for none."""
    match = _NAME.fullmatch(entry.name)
    turned = config["model_type"] in _TURNED and match is not None and match["module"] in ("attn_q", "attn_k")
    return head_dim(config) if turned else 0


def _is_kept(name: str, entry: Entry, config: Mapping[str, Any]) -> bool:
    """A table that rows are read from has no place for minima, nor for integers that no product shares."""
    if entry.kind not in LAYOUTS or name == EMBEDDING:
        return entry.kind in LAYOUTS and config["tie_word_embeddings"] and LAYOUTS[entry.kind].offsets is None
    return name.endswith(("_proj.weight", "query_key_value.weight", "c_attn.weight")) or name == HEAD


def _tensor(path: Path, entry: Entry, turned: int, link: bool, codes: bool) -> Weight:
    rows = partial(_rows, path, entry, turned)
    if entry.kind in STORED:
        if link and not turned:
            return StoredTensor(path.name, entry.offset, entry.length, entry.kind, entry.shape)
        return MadeTensor(entry.kind, entry.shape, lambda: rows(partial(_plain, entry)))
    if codes:
        return _codes(path, entry, rows)
    dtype = "F16" if len(entry.shape) > 1 else "F32"
    return MadeTensor(dtype, entry.shape, lambda: rows(partial(_unpack_rows, path, entry, dtype)))


def _codes(path: Path, entry: Entry, rows: Callable[[Callable[[Bytes], Any]], Iterator[Any]]) -> QuantizedTensor:
    """Codes, scales and offsets as they are; see :mod:`llmc.export.sources.gguf.blocks`."""
    (_, size), layout = BLOCKS[entry.kind], LAYOUTS[entry.kind]

    def read(part: Callable[[Bytes], NDArray[Any]]) -> Iterator[NDArray[Any]]:
        return rows(lambda raw: part(raw.reshape(len(raw), -1, size)).reshape(len(raw), -1))

    def codes() -> Iterator[NDArray[Any]]:
        return (pack_codes(piece) if layout.bits == 4 else piece for piece in read(layout.codes))

    def whole(part: Callable[[Bytes], NDArray[np.float32]]) -> NDArray[np.float32]:
        return _check_numbers(path, entry, np.concatenate(list(read(part))))

    return QuantizedTensor(
        MadeTensor(f"I{layout.bits}", entry.shape, codes),
        layout.block,
        partial(whole, layout.scales),
        offsets=None if layout.offsets is None else partial(whole, layout.offsets),
    )


def _rows(path: Path, entry: Entry, turned: int, read: Callable[[Bytes], NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Chunks of a tensor's rows, decoded by ``read``; whole heads if their order must be undone."""
    width = int(np.prod(entry.shape[1:], dtype=np.int64))
    run = max(1, PIECE // width // max(turned, 1)) * max(turned, 1)
    with open_regular(path) as file:
        for start in range(0, entry.shape[0], run):
            rows = min(run, entry.shape[0] - start)
            file.seek(entry.offset + start * entry.row)
            raw = file.read(rows * entry.row)
            if len(raw) != rows * entry.row:
                raise CheckpointError(f"{path}: ends inside {entry.name}; the file is truncated, download it again")
            values = read(np.frombuffer(raw, np.uint8).reshape(rows, -1))
            yield _halves(values, turned) if turned else values


def _plain(entry: Entry, raw: Bytes) -> NDArray[Any]:
    return raw.view(array_type(entry.kind)).reshape(raw.shape[0], *entry.shape[1:])


def _unpack_rows(path: Path, entry: Entry, dtype: str, raw: Bytes) -> NDArray[Any]:
    """Bytes of rows in blocks as floats [rows, ...]."""
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = raw.reshape(len(raw), -1, BLOCKS[entry.kind][1])
        values: NDArray[Any] = LAYOUTS[entry.kind].unpack(blocks).astype(array_type(dtype))
    return _check_numbers(path, entry, values).reshape(raw.shape[0], *entry.shape[1:])


def _check_numbers(path: Path, entry: Entry, values: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{path}: {entry.name} holds weights that are no numbers, or too large for float16; the file is broken, "
            "download it again"
        )
    return values


def _halves(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """Reorder rows of whole heads from pairs to halves: 0 2 4 ... 1 3 5 ..."""
    heads = values.shape[0] // rows
    halves: NDArray[Any] = values.reshape(heads, rows // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return halves


def count_unpacked_types(headers: Sequence[Header], tensors: Mapping[str, Weight], family: str) -> dict[str, int]:
    kinds = [
        entry.kind
        for header in headers
        for entry in header.tensors
        if not isinstance(tensors.get(parameter(entry.name, family)), QuantizedTensor)
    ]
    return {kind: kinds.count(kind) for kind in BLOCKS if kind in kinds and kind not in STORED}
