"""Read a Hugging Face folder or a GGUF file: its config, and where each of the decoder's tensors is stored."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from llmc import bundle
from llmc.bundle.model import names as modules
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.linear import Codes
from llmc.bundle.model.names import PER_LAYER
from llmc.errors import CheckpointError, printable
from llmc.export.config import DecoderConfig
from llmc.export.families import read_config
from llmc.export.families.vision_language import keep_text_part
from llmc.export.keys import Keys, read_object, require_object
from llmc.export.sources.adapters import Adapter, merge_adapters, read_adapter
from llmc.export.sources.codes import GgmlTensor, Mxfp4Tensor, QuantizedTensor, Weight, flatten_tensors
from llmc.export.sources.generation import read_generation
from llmc.export.sources.gguf import SUFFIX, read_gguf
from llmc.export.sources.made import MadeTensor
from llmc.export.sources.modules import default_ending, prefix_names, read_ending, replace_head
from llmc.export.sources.packing import unpack_weights
from llmc.export.sources.parameters import Tensors, decoder_tensors, explain_shape
from llmc.export.sources.quantization import add_modelopt, read_quantization
from llmc.export.sources.safetensors import DTYPE_NAMES, FLOATS, StoredTensor, read_shards
from llmc.export.sources.tokens import cut_tokenizer, lower
from llmc.export.sources.towers import read_media_steps, read_tower
from llmc.ggml import LAYOUTS
from llmc.origin import find_own_file, fingerprint, read_origin

CONFIG_FILE = bundle.CONFIG_FILE
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = bundle.ADAPTER_FILE
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that some checkpoints store; llmc computes them from the config.
_COMPUTED = ("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint."""

    folder: Path  # contains its files
    config: DecoderConfig
    generation: bundle.Generation
    tensors: dict[str, Weight]  # exactly the decoder's, by parameter name
    files: tuple[Path, ...]  # files whose weights are used in place, to be linked
    source: bundle.Source
    notes: tuple[str, ...]
    # contents of config and tokenizer files by name, where they differ from those in ``folder``
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def geometry(self) -> bundle.Geometry:
        return with_codes(self.config.geometry, self.tensors)

    @property
    def weights(self) -> dict[str, int]:
        return weight_bytes(flatten_tensors(self.tensors).values())

    @property
    def made_bytes(self) -> int:
        """Bytes of the weights that an export converts and copies; all others are used in place."""
        return sum(tensor.nbytes for tensor in flatten_tensors(self.tensors).values() if isinstance(tensor, MadeTensor))


def with_codes(geometry: bundle.Geometry, tensors: Mapping[str, Weight]) -> bundle.Geometry:
    """The geometry, with the integer formats of its quantized linears and tables."""
    names = {linear.name: f"{linear.name}.weight" for linear in geometry.linears}
    names |= {modules.HEAD: EMBEDDING} if geometry.tied_head else {}
    weights = {name: tensors.get(weight) for name, weight in names.items()}
    kinds = {name: tensor.kind for name, tensor in weights.items() if isinstance(tensor, QuantizedTensor | GgmlTensor)}
    linears = tuple(replace(linear, codes=kinds.get(linear.name)) for linear in geometry.linears)
    mixtures = tuple(_with_codes(mixture, tensors) for mixture in geometry.mixtures)
    tables = (tensors.get(f"{name}.weight") for name in (modules.EMBEDDING, PER_LAYER))
    table, per_layer = (LAYOUTS[table.dtype].table_kind if isinstance(table, GgmlTensor) else None for table in tables)
    return replace(geometry, linears=linears, mixtures=mixtures, table_codes=table, per_layer_codes=per_layer)


def _with_codes(item: Experts, tensors: Mapping[str, Weight]) -> Experts:
    """Common codes of both expert products: the larger bit width and the smaller block."""
    stacks = [tensors.get(f"{part.name}.weight") for part in item.parts]
    kinds = [stack.kind for stack in stacks if isinstance(stack, QuantizedTensor | GgmlTensor | Mxfp4Tensor)]
    if len({kind.kind for kind in kinds}) > 1 or (len(kinds) == 1 and kinds[0].kind == "mxfp4"):
        raise CheckpointError(f"only some weights of {item.name} are in MXFP4, expected all or none; download it again")
    if len(kinds) < len(stacks):
        return item
    bits, block = max(kind.bits for kind in kinds), min(kind.block for kind in kinds)
    terms = [any(getattr(kind, term) for kind in kinds) for term in ("zero_points", "offsets")]
    return replace(item, codes=Codes(bits, block, terms[0], terms[1], kinds[0].kind))


def weight_bytes(tensors: Iterable[StoredTensor | MadeTensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)  # for blocks, the name of their type
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return sizes


def read_checkpoint(path: Path, adapters: Sequence[tuple[Path, float]] = (), *, text_only: bool = False) -> Checkpoint:
    """Read and check a local Hugging Face folder, or a model in a GGUF file; weights stay on disk. ``adapters``
    (folder, scale) are merged in order. ``text_only`` reads only the text part.

    Raises CheckpointError: names what is missing, broken or unsupported.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return _read_gguf(path, adapters)
    return _read_folder(path, adapters, text_only)


def _read_gguf(path: Path, named: Sequence[tuple[Path, float]]) -> Checkpoint:
    model = read_gguf(path)
    keys = Keys(model.config, str(path))
    config = read_config(keys)
    adapters = [read_adapter(adapter, scale, path, model.config) for adapter, scale in named]
    generation, left_out = _read_generation(model.generation, path, config)
    plain = replace(config, norm=replace(config.norm, offset=False), transposed=False, packed_groups=0)
    tensors = match_tensors(path, config, _merge(path, plain, model.tensors, adapters))  # the converter renamed them
    source = describe_source(path, model.texts[CONFIG_FILE].encode(), model.files, tensors, adapters)
    notes = (*keys.notes, *left_out, *model.notes, *_notes(adapters))
    return Checkpoint(path.parent, config, generation, tensors, model.files, source, notes, model.texts)


def _read_folder(folder: Path, named: Sequence[tuple[Path, float]], text_only: bool) -> Checkpoint:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; expected a GGUF file or a local Hugging Face checkpoint folder"
        )
    if (folder / bundle.EXPORT_MANIFEST).exists():
        raise CheckpointError(f"{folder} is an export already; expected a checkpoint. Go on with: llmc build {folder}")
    _refuse_adapter(folder)
    values = add_modelopt(folder, require_object(folder, CONFIG_FILE))
    ending = read_ending(folder, values)
    keys = Keys(keep_text_part(values) if text_only or ending else values, str(folder / CONFIG_FILE))
    quantization = read_quantization(keys)
    config = read_media_steps(folder, read_config(keys))
    if ending is None and (ending := default_ending(folder, values, config)):
        keys.note("without modules.json the vectors are the mean of all tokens, as sentence-transformers has it")
    adapters = [read_adapter(adapter, scale, folder, values) for adapter, scale in named]
    texts, cut = _read_tokenizer(folder, config.vocab_size, lowers=ending is not None and ending.lowers)
    path = folder / GENERATION_FILE
    defaults = read_object(folder, path.name) or {}
    generation, left_out = _read_generation(defaults, path, config)
    shards = tuple(read_shards(folder))
    stored = unpack_weights(
        folder, {name: item for shard in shards for name, item in shard.tensors.items()}, quantization
    )
    merged = _merge(folder, config, prefix_names(stored) if ending else stored, adapters)
    if ending is not None:
        config, merged = replace_head(folder, config, ending, merged)
    tensors = match_tensors(folder, config, merged)
    if any(isinstance(tensor, MadeTensor) for tensor in stored.values()):
        keys.note("weights in float8 are dequantized to float32, since no kernel multiplies with their blocks")
    files = tuple(shard.path for shard in shards)
    source = describe_source(folder, (folder / CONFIG_FILE).read_bytes(), files, tensors, adapters)
    notes = (*keys.notes, *cut, *left_out, *_notes(adapters))
    return Checkpoint(folder, config, generation, tensors, files, source, notes, texts)


def _merge(folder: Path, config: DecoderConfig, stored: Tensors, adapters: Sequence[Adapter]) -> Tensors:
    tensors = decoder_tensors(folder, config, merge_adapters(folder, config, stored, adapters))
    return tensors | read_tower(folder, config, stored, adapters)


def _notes(adapters: Sequence[Adapter]) -> list[str]:
    return [note for adapter in adapters for note in adapter.notes]


def _refuse_adapter(folder: Path) -> None:
    if not os.path.lexists(folder / ADAPTER_FILE):
        return
    merged = f"export its base model with it: llmc export BASE --adapter {folder}"
    if os.path.lexists(folder / CONFIG_FILE):
        raise CheckpointError(
            f"{folder}: {ADAPTER_FILE} belongs to an adapter, which llmc would leave out; {merged}, or move "
            f"{ADAPTER_FILE} away to export only the base model"
        )
    raise CheckpointError(f"{folder} is an adapter ({ADAPTER_FILE}), not a whole model; {merged}")


def _read_tokenizer(folder: Path, vocab_size: int, *, lowers: bool) -> tuple[dict[str, str], list[str]]:
    """Check the tokenizer's files; return the results of :func:`cut_tokenizer`. ``lowers``: make letters small."""
    if find_own_file(folder, bundle.TOKENIZER_FILE) is None:
        raise CheckpointError(
            f"{folder}: no {bundle.TOKENIZER_FILE} here, which the runtime needs; make it from what is here: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    names = [name for name in bundle.TOKENIZER_FILES if name.endswith(".json") and find_own_file(folder, name)]
    files = {name: require_object(folder, name) for name in names}
    texts, notes = cut_tokenizer(str(folder), files, vocab_size)
    if lowers:
        content = json.loads(texts[bundle.TOKENIZER_FILE]) if texts else files[bundle.TOKENIZER_FILE]
        texts = {**texts, bundle.TOKENIZER_FILE: json.dumps(lower(content), ensure_ascii=False)}
    return texts, notes


def match_tensors(folder: Path, config: DecoderConfig, stored: Tensors) -> Tensors:
    expected = config.parameter_shapes
    for name, shape in expected.items():
        if name not in stored:
            hint = "the head is not tied (tie_word_embeddings=false); " if name == HEAD else ""
            raise CheckpointError(
                f"{folder}: tensor {name} is missing; {hint}expected the {len(expected)} tensors of a "
                f"{config.model_type} decoder with {len(config.layers)} layers; check {CONFIG_FILE} or download the "
                "checkpoint again"
            )
        if stored[name].shape != shape:
            raise CheckpointError(f"{folder}: {explain_shape(name, stored[name].shape, shape)}")
        if isinstance(stored[name], StoredTensor | MadeTensor) and stored[name].dtype not in FLOATS:
            raise CheckpointError(
                f"{folder}: {name} has dtype {stored[name].dtype}, but {CONFIG_FILE} does not say how it is quantized; "
                "get its quantization_config, or the checkpoint that it was made from"
            )
        if isinstance(stored[name], Mxfp4Tensor) and f"{name.removesuffix('weight')}bias" not in expected:
            raise CheckpointError(
                f"{folder}: {name} is in MXFP4, which llmc only reads for experts with biases (gpt_oss); export the "
                "checkpoint that it was made from"
            )
    for name in sorted(stored.keys() - expected.keys()):
        if name == HEAD:
            _check_tied_head(folder, stored)
        elif not name.endswith(_COMPUTED):
            raise CheckpointError(
                f"{folder}: tensor {name} {list(stored[name].shape)} is unused by a {config.model_type} decoder with "
                f"this {CONFIG_FILE}; leaving a weight out changes the result, so correct the config or remove it"
            )
    return {name: stored[name] for name in expected}


def _check_tied_head(folder: Path, tensors: Tensors) -> None:
    """Check that the stored head of a checkpoint with tied embeddings, if any, has the embedding's bytes."""
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    same = (
        isinstance(head, StoredTensor)
        and isinstance(embedding, StoredTensor)
        and (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        and all(a == b for a, b in zip(_pieces(folder, head), _pieces(folder, embedding), strict=True))
    )
    if not same:
        raise CheckpointError(
            f"{folder}: tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}; "
            f"set tie_word_embeddings=false in {CONFIG_FILE}, or remove {HEAD}"
        )


def _pieces(folder: Path, tensor: StoredTensor, size: int = 1 << 22) -> Iterator[bytes]:
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.length, size):
            yield file.read(min(size, tensor.length - start))


def _read_generation(values: dict[str, Any], path: Path, config: DecoderConfig) -> tuple[bundle.Generation, list[str]]:
    """Defaults from generation_config.json, and notes; without stop tokens there, those in config.json."""
    return read_generation(Keys(values, str(path)), config.vocab_size, config.eos_token_ids, config.bos_token_id)


def describe_source(
    path: Path, config: bytes, files: Iterable[Path], tensors: Mapping[str, Weight], adapters: Sequence[Adapter]
) -> bundle.Source:
    origin = read_origin(path)
    folder = PurePosixPath(origin.repository) if origin else path.resolve()
    name = path.stem if path.is_file() else folder.name
    merged = tuple(adapter.merged for adapter in adapters)
    sizes = weight_bytes(flatten_tensors(tensors).values())
    return bundle.Source(
        name=printable(name),
        fingerprint=fingerprint(config, files, merged),
        dtype=max(sizes, key=lambda dtype: sizes[dtype]),
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        adapters=merged,
        origin=origin,
    )
