"""Merge LoRA adapters (PEFT folders, or GGUF files for a model in GGUF files) into a checkpoint's weights.

    W' = W + scale * B @ A,   and for DoRA   W' = magnitude * (W + scale * B @ A) / |W + scale * B @ A|, row by row.

The tensors in the file determine which modules change. Factors are small and read at once; a changed weight is computed
in float32, some rows at a time, while the export is written.
Source: ``tuners/lora`` and ``utils/save_and_load.py`` of PEFT 0.21; arXiv:2106.09685, arXiv:2402.09353.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import ADAPTER_FILE, MergedAdapter, sha256_file
from llmc.errors import CheckpointError, UsageError, printable
from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys, read_object
from llmc.export.sources.codes import Weight
from llmc.export.sources.gguf import SUFFIX, read_factors, read_header
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.parameters import PIECE, Tensors, read_pieces, rename_tensors
from llmc.export.sources.safetensors import FLOATS, Shard, StoredTensor, read_shard
from llmc.origin import find_own_file

WEIGHTS_FILE = "adapter_model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Suffixes of tensor names, with their kind: a factor, DoRA's magnitude, or a whole tensor.
_KINDS = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?"
    r"\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?|weight|bias)"
)
# Keys about training, and about the changed modules, which the tensors determine.
# fmt: off
_SETTLED = (
    "arrow_config", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
)
# Keys that add something other than B @ A; empty or false in most files.
_OTHER_METHODS = (
    "alora_invocation_tokens", "kasa_config", "layer_replication", "lora_bias", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)
# fmt: on
# Initializations that leave the base unchanged; all others (pissa, olora, corda, loftq, lora_ga) change it.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# A key of rank_pattern or alpha_pattern: the end of a name, or a whole name after ^. PEFT accepts any regular
# expression, and some take forever.
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+")
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Factors:
    """The change of one module's weight: ``scale * b @ a``, with a [r, inputs] and b [outputs, r].

    ``magnitude`` [outputs] is DoRA's; ``embeds``: the weight is transposed, a table of ``inputs`` rows.
    """

    a: Array
    b: Array
    scale: float
    magnitude: Array | None
    embeds: bool


@dataclass(frozen=True)
class Adapter:
    """A checked adapter: factors by module, and tensors by name that replace the checkpoint's."""

    folder: Path
    merged: MergedAdapter
    factors: Mapping[str, Factors]
    whole: Mapping[str, MadeTensor]
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.factors and not self.whole:
            raise CheckpointError(f"{self.folder}: this adapter has no tensors; download it again")


def read_adapter(path: Path, scale: float, base: Path, config: Mapping[str, Any]) -> Adapter:
    """Read and check an adapter, multiplied by ``scale``, for ``base`` with the checked ``config``.

    Raises:
        CheckpointError: it is broken, not plain LoRA or DoRA, or in another format than the base.
        UsageError: ``scale`` is 0, or not a number from -100 to 100.
    """
    if not -100 <= scale <= 100 or not scale:
        raise UsageError(
            "scale",
            f"is {scale:g}, expected -100 to 100 and not 0",
            "leave it out to use the adapter as trained, or leave the adapter out",
            path=path,
        )
    packed = [file.suffix == SUFFIX and not file.is_dir() for file in (path, base)]
    if packed[0] != packed[1]:  # GGUF has another order of rows and another layout of norms
        raise CheckpointError(
            f"{path}: an adapter in {'a GGUF file' if packed[0] else 'a folder'} for {base}; expected a folder of PEFT "
            "for a Hugging Face checkpoint, and a GGUF file for a model in GGUF files"
        )
    return _read_gguf(path, scale, config) if packed[0] else read_peft(path, scale, base)


def _read_gguf(path: Path, scale: float, config: Mapping[str, Any]) -> Adapter:
    header = read_header(path)
    kind = [header.metadata.get(f"{name}.type") for name in ("general", "adapter")]
    alpha = header.metadata.get("adapter.lora.alpha")
    alora = header.metadata.keys() & {"adapter.alora.invocation_tokens"}
    if kind != ["adapter", "lora"] or type(alpha) is not float or not 0 <= alpha <= 1e6 or alora:
        raise CheckpointError(
            f"{path} is {kind[0]!r:.40} of type {kind[1]!r:.40} with alpha {alpha!r:.40}; expected a LoRA adapter, as "
            "convert_lora_to_gguf.py writes it; convert it again"
        )
    factors = {}
    for name, matrices in read_factors(header, config).items():
        a, b = (matrices.get(part) for part in ("lora_a", "lora_b"))
        if a is None or b is None or not 0 < len(a) == b.shape[1]:
            raise CheckpointError(f"{path}: {name} has no two factors of one rank; convert the adapter again")
        factor = alpha / len(a) if alpha else 1.0  # llama.cpp's rule
        factors[name.removesuffix(".weight")] = Factors(a, b, scale * factor, None, embeds=False)
    merged = MergedAdapter(printable(path.name), sha256_file(path), float(scale))
    return Adapter(path, merged, factors, {}, ())


def read_peft(folder: Path, scale: float, base: Path) -> Adapter:
    """:func:`read_adapter` for a PEFT folder; adds a note if the path ``base`` does not contain its base's name."""
    keys, path = Keys(_read_config(folder), str(folder / ADAPTER_FILE)), _find_weights(folder)
    rank, alpha, dora = _read_keys(keys)
    parts, whole = _sort_tensors(read_shard(path))
    factors = {module: _pair(path, module, tensors, dora) for module, tensors in parts.items()}
    ranks, alphas = (_read_patterns(keys, f"{name}_pattern") for name in ("rank", "alpha"))
    root = keys.flag("use_rslora")
    keys.finish()
    scaled = {}
    for module, (a, b, magnitude, embeds) in factors.items():
        r = _find_pattern(ranks, module, rank)
        if not len(a) == b.shape[1] == r:
            raise CheckpointError(
                f"{path}: {module} has factors of rank {len(a)} and {b.shape[1]}, but {ADAPTER_FILE} says {r:g}; "
                "get both files of one adapter"
            )
        factor = _find_pattern(alphas, module, alpha) / (math.sqrt(r) if root else r)
        scaled[module] = Factors(a, b, scale * factor, magnitude, embeds)
    stated = keys.raw("base_model_name_or_path")
    named = isinstance(stated, str) and stated.rstrip("/").rpartition("/")[2]
    notes = [f"{folder.name} was trained on {stated:.80}"] if named and named not in str(base.resolve()) else []
    files = (folder / ADAPTER_FILE, path)
    digest = hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()
    merged = MergedAdapter(printable(folder.resolve().name), digest, float(scale))
    return Adapter(folder, merged, scaled, whole, (*keys.notes, *notes))


def _read_config(folder: Path) -> dict[str, Any]:
    values = read_object(folder, ADAPTER_FILE) if folder.is_dir() else None
    if values is None:
        missing = f"no {ADAPTER_FILE}" if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{folder}: {missing}; expected an adapter's folder, as PEFT writes it; write a scale only as a number "
            "after a colon"
        )
    return values


def _find_weights(folder: Path) -> Path:
    if file := find_own_file(folder, WEIGHTS_FILE):
        return file
    raise CheckpointError(
        f"{folder}: no {WEIGHTS_FILE}; expected PEFT's own file (an adapter_model.bin is a pickle, which can run code, "
        "so llmc does not read it: load and save it with PEFT where you trust it)"
    )


def _read_keys(keys: Keys) -> tuple[int, float, bool]:
    """Rank, alpha, and whether there are magnitudes; refuse anything but plain LoRA and DoRA."""
    keys.choice("peft_type", ("LORA",))
    keys.skip(*_SETTLED)
    for name in _OTHER_METHODS:
        if value := keys.raw(name):
            raise keys.error(name, value, "nothing: llmc reads plain LoRA and DoRA; merge it with PEFT")
    beginning = keys.raw("init_lora_weights")
    if beginning not in _PLAIN_BEGINNINGS:
        raise keys.error(
            "init_lora_weights",
            beginning,
            "an initialization that leaves the base unchanged; convert it: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    return keys.integer("r"), keys.number("lora_alpha"), keys.flag("use_dora")


def _read_patterns(keys: Keys, name: str) -> dict[str, float]:
    value = keys.raw(name) or {}
    if not isinstance(value, dict) or len(value) > 4096:
        raise keys.error(name, value, "numbers by names of modules")
    for pattern, number in value.items():
        if not _PATTERN.fullmatch(pattern):
            raise keys.error(name, pattern, "names of modules, or ends of names, without wildcards")
        if type(number) not in (int, float) or not 0 < number <= 1e6:
            raise keys.error(name, {pattern: number}, "numbers above 0")
    return {pattern.replace("\\", ""): float(number) for pattern, number in value.items()}


def _find_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The number of the first pattern that matches the module's name, or its end after a dot."""
    return next(
        (number for key, number in patterns.items() if f"^{module}" == key or f".{module}".endswith(f".{key}")), default
    )


def _sort_tensors(shard: Shard) -> tuple[dict[str, dict[str, Array]], dict[str, MadeTensor]]:
    parts: dict[str, dict[str, Array]] = {}
    whole: dict[str, MadeTensor] = {}
    for name, tensor in shard.tensors.items():
        match = _KINDS.fullmatch(name)
        if match is None or tensor.dtype not in FLOATS or ".lora_" in match["module"]:
            raise CheckpointError(
                f"{shard.path}: {name} of type {tensor.dtype} is unsupported; expected floats named ...lora_A.weight, "
                "lora_B.weight, lora_embedding_A, lora_embedding_B, lora_magnitude_vector, weight or bias; merge it "
                "with PEFT"
            )
        values = np.memmap(shard.path, array_type(tensor.dtype), "r", tensor.offset, tensor.shape)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{shard.path}: {name} holds NaN or infinite values; get or save the adapter again")
        if match["kind"] in ("weight", "bias"):
            whole[f"{match['module']}.{match['kind']}"] = _copy(tensor, values)
        else:
            parts.setdefault(match["module"], {})[match["kind"].removesuffix(".weight")] = values.astype(np.float32)
    return parts, whole


def _copy(tensor: StoredTensor, values: Array) -> MadeTensor:
    return MadeTensor(tensor.dtype, tensor.shape, lambda: iter([values]))


def _pair(path: Path, module: str, tensors: Mapping[str, Array], dora: bool) -> tuple[Array, Array, Array | None, bool]:
    embeds = "lora_embedding_A" in tensors
    names = ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A", "lora_B")
    expected = {*names, "lora_magnitude_vector"} if dora else {*names}
    if tensors.keys() != expected or any(tensors[name].ndim != 2 for name in names) or (dora and embeds):
        listed = ", ".join(f"{name} {list(it.shape)}" for name, it in tensors.items())
        raise CheckpointError(
            f"{path}: {module} has {listed}; expected matrices {' and '.join(names)}"
            f"{', and lora_magnitude_vector for a linear' * dora}: download the adapter again"
        )
    return tensors[names[0]], tensors[names[1]], tensors.get("lora_magnitude_vector"), embeds


# ------------------------------------------------------------------------------------------------------------- merging


def merge_adapters(
    folder: Path,
    config: DecoderConfig,
    stored: Tensors,
    adapters: Sequence[Adapter],
    rename: Callable[[Path, DecoderConfig, Mapping[str, Any]], dict[str, Any]] = rename_tensors,
) -> Tensors:
    """A checkpoint's tensors with the adapters merged, by the canonical names that ``rename`` returns.

    Raises:
        CheckpointError: the base lacks a module, or has it in another shape or as integers.
    """
    merged = Tensors(rename(folder, config, stored))
    for adapter in adapters:
        for name, tensor in rename(adapter.folder, config, adapter.whole).items():
            name, base = _find_base(folder, config, merged, adapter, name)
            if base.shape != tensor.shape:
                raise CheckpointError(_explain(adapter, folder, name, base.shape, tensor.shape))
            merged[name] = tensor
        factors = {f"{module}.weight": factors for module, factors in adapter.factors.items()}
        for name, item in rename(adapter.folder, config, factors).items():
            name, base = _find_base(folder, config, merged, adapter, name)
            turned = item.embeds or (config.transposed and name.removesuffix(".weight") not in (EMBEDDING, HEAD))
            merged[name] = _add(folder, adapter, name, base, item, turned)
    return merged


def _find_base(
    folder: Path, config: DecoderConfig, shapes: Tensors, adapter: Adapter, name: str
) -> tuple[str, StoredTensor | MadeTensor]:
    name = name if name in shapes or f"model.{name}" not in shapes else f"model.{name}"
    base: Weight | None = shapes.get(name)
    if config.tied_head and name.rpartition(".")[0] in (EMBEDDING, HEAD):
        raise CheckpointError(
            f"{adapter.folder}: it changes {name}, but embedding and head are one tensor in {folder} "
            "(tie_word_embeddings=true); merge it with PEFT into a checkpoint with a separate head"
        )
    if base is None or re.search(r"\.experts\.\d", name):
        raise CheckpointError(
            f"{adapter.folder}: it changes {name}, which {folder} lacks or has as one expert of several; expected an "
            "adapter of this checkpoint's linears or embedding; give the checkpoint that it was trained on"
        )
    if not isinstance(base, StoredTensor | MadeTensor) or base.dtype not in FLOATS:
        raise CheckpointError(
            f"{adapter.folder}: it changes {name}, which {folder} stores as integers; merge it into the unquantized "
            "checkpoint"
        )
    return name, base


def _add(
    folder: Path, adapter: Adapter, name: str, base: StoredTensor | MadeTensor, item: Factors, turned: bool
) -> MadeTensor:
    left, right = (item.a.T, item.b.T) if turned else (item.b, item.a)
    shape, magnitude = (len(left), right.shape[1]), item.magnitude
    if base.shape != shape:
        raise CheckpointError(_explain(adapter, folder, name, base.shape, shape))
    if magnitude is not None and (turned or magnitude.shape != shape[:1]):
        raise CheckpointError(
            f"{adapter.folder}: {name} {list(shape)} has a magnitude {list(magnitude.shape)}; expected one per row, in "
            "a checkpoint that stores weights as [outputs, inputs]: merge it with PEFT"
        )
    left = left * np.float32(item.scale)

    def pieces() -> Iterator[Array]:
        start = 0
        for rows in _cut(read_pieces(folder, base)):
            stop = start + len(rows)
            changed = rows.astype(np.float32) + left[start:stop] @ right
            if magnitude is not None:
                changed *= (magnitude[start:stop] / np.linalg.norm(changed, axis=1))[:, None]
            yield changed
            start = stop

    return MadeTensor("F32", shape, pieces)


def _cut(pieces: Iterator[Array]) -> Iterator[Array]:
    for piece in pieces:
        step = max(1, PIECE // piece.shape[1])
        yield from (piece[start : start + step] for start in range(0, len(piece), step))


def _explain(adapter: Adapter, folder: Path, name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return (
        f"{adapter.folder}: it changes {name} as {list(shape)}, but {folder} has {list(expected)}; expected an adapter "
        "trained on this checkpoint; give the checkpoint that it was trained on"
    )
