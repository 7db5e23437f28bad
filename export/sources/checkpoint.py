"""A Hugging Face folder: its config in llmc's words, and where each of the decoder's tensors lies on disk."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from llmc import bundle, strict
from llmc.errors import CheckpointError, printable
from llmc.export.config import DecoderConfig, packed_parameters, parameter_shapes
from llmc.export.families import read_config
from llmc.export.keys import Keys
from llmc.export.reading import token_ids
from llmc.export.sources.safetensors import DTYPE_NAMES, Shard, StoredTensor, read_shards
from llmc.origin import fingerprint, own_file

CONFIG_FILE = bundle.CONFIG_FILE
GENERATION_FILE = "generation_config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that some checkpoints store although they follow from the config.
_COMPUTED = ("rotary_emb.inv_freq",)
# Generation defaults that llmc does not take over, at the values where they do nothing; others go into the notes.
_PLAIN_GENERATION = {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0}


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. ``tensors`` holds exactly what the decoder needs, by its parameter names."""

    folder: Path
    config: DecoderConfig
    generation: bundle.Generation
    tensors: dict[str, StoredTensor]
    shards: tuple[Shard, ...]
    source: bundle.Source
    notes: tuple[str, ...]

    @property
    def geometry(self) -> bundle.Geometry:
        """Sizes and inventory, as later stages need them."""
        return self.config.geometry


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a local Hugging Face folder; weights stay on disk.

    Raises:
        CheckpointError: something is missing, broken or unsupported; the message names it.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; expected a local Hugging Face checkpoint folder, as this command makes one: "
            "hf download OWNER/NAME --local-dir FOLDER"
        )
    if (folder / bundle.EXPORT_MANIFEST).exists():
        raise CheckpointError(f"{folder} is an export already; expected a checkpoint. Go on with: llmc build {folder}")
    keys = Keys(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
    config = read_config(keys)
    _check_tokenizer(folder, config.vocab_size)
    generation, left_out = _read_generation(folder, config)
    shards = tuple(read_shards(folder))
    tensors = _match(folder, config, decoder_tensors(folder, config, shards))
    source = _source(folder, shards, tensors)
    return Checkpoint(folder, config, generation, tensors, shards, source, (*keys.notes, *left_out))


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file of a checkpoint or an export, see :func:`llmc.origin.own_file`.

    Raises:
        CheckpointError: the file is missing, broken or somebody else's.
    """
    found = own_file(path.parent, path.name)
    if found is None:
        raise CheckpointError(f"{path.parent}: no {path.name}; expected a Hugging Face checkpoint folder")
    try:
        data = strict.read_json(found)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__}, expected an object; download it again")
    return data


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Its files can be read, and the model has a row for each of its tokens; a model may have more, and often does."""
    path = folder / bundle.TOKENIZER_FILE
    if own_file(folder, path.name) is None:
        raise CheckpointError(
            f"{folder}: no {bundle.TOKENIZER_FILE} here, which the runtime needs; make it from what is here: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    for name in bundle.TOKENIZER_FILES:
        if name.endswith(".json") and own_file(folder, name):
            read_json(folder / name)
    last, token = max(_tokens(path, read_json(path)), default=(0, ""))
    if last >= vocab_size:
        raise CheckpointError(
            f"{path}: it knows {last + 1} tokens, the last one {token!r:.80}, but {CONFIG_FILE} says "
            f"vocab_size={vocab_size}, and the model has no more; give it the tokenizer that it was trained with"
        )


def _tokens(path: Path, content: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Number and text of every token that a ``tokenizer.json`` names; Unigram's vocabulary is a list."""
    try:
        vocab = content["model"].get("vocab", {})
        known = vocab.items() if isinstance(vocab, dict) else ((row[0], index) for index, row in enumerate(vocab))
        added = ((entry["content"], entry["id"]) for entry in content.get("added_tokens") or ())
        for token, number in chain(known, added):
            if type(number) is not int or type(token) is not str:
                raise TypeError("no text and a number")
            yield number, token
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no tokenizer (its vocabulary is not a list of tokens); download it again"
        ) from error


def decoder_tensors(folder: Path, config: DecoderConfig, shards: Iterable[Shard]) -> dict[str, StoredTensor]:
    """Every stored tensor by its name; one that holds several parameters as those, each a run of its rows.

    Raises:
        CheckpointError: such a tensor has not as many rows as they have together.
    """
    found = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    shapes = parameter_shapes(config)
    for packed, names in packed_parameters(config).items():
        parts = [shapes[name] for name in names]
        whole = (sum(rows for rows, _ in parts), parts[0][1])
        if packed not in found:
            continue
        if found[packed].shape != whole:
            raise CheckpointError(f"{folder}: {_shaped(packed, found[packed].shape, whole)}")
        found |= dict(zip(names, _rows_apart(found.pop(packed), parts), strict=True))
    return found


def _rows_apart(tensor: StoredTensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[StoredTensor]:
    offset, row = tensor.offset, tensor.length // tensor.shape[0]
    for shape in shapes:
        yield StoredTensor(tensor.file, offset, shape[0] * row, tensor.dtype, shape)
        offset += shape[0] * row


def _match(folder: Path, config: DecoderConfig, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Take each tensor of the decoder once, and account for every other one."""
    expected = parameter_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(_missing(folder, name, config))
        if found[name].shape != shape:
            raise CheckpointError(f"{folder}: {_shaped(name, found[name].shape, shape)}")
    for name in sorted(found.keys() - expected.keys()):
        if name == HEAD:
            _check_tied_head(folder, found)
        elif not name.endswith(_COMPUTED):
            raise CheckpointError(
                f"{folder}: tensor {name} {list(found[name].shape)} is unused by a {config.model_type} decoder with "
                f"this {CONFIG_FILE}; to leave a weight out changes the result, so correct the config or remove it"
            )
    return {name: found[name] for name in expected}


def _shaped(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{name} has shape {list(found)}, but {CONFIG_FILE} asks for {list(expected)}"


def _missing(folder: Path, name: str, config: DecoderConfig) -> str:
    hint = "the head is not tied (tie_word_embeddings=false); " if name == HEAD else ""
    return (
        f"{folder}: tensor {name} is missing; {hint}expected the {len(parameter_shapes(config))} tensors of a "
        f"{config.model_type} decoder with {len(config.layers)} layers; check {CONFIG_FILE} or download the checkpoint "
        "again"
    )


def _check_tied_head(folder: Path, found: dict[str, StoredTensor]) -> None:
    """A tied checkpoint may store its head a second time, but only as the very same bytes."""
    head, embedding = found[HEAD], found[EMBEDDING]
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        a == b for a, b in zip(_pieces(folder, head), _pieces(folder, embedding), strict=True)
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


def _read_generation(folder: Path, config: DecoderConfig) -> tuple[bundle.Generation, list[str]]:
    """Defaults from generation_config.json, and notes; stop tokens from config.json where it says nothing."""
    path = folder / GENERATION_FILE
    values = read_json(path) if own_file(folder, path.name) else {}
    keys = Keys(values, str(path))
    eos = token_ids(keys, "eos_token_id", config.vocab_size) or config.eos_token_ids
    bos = next(iter(token_ids(keys, "bos_token_id", config.vocab_size)), config.bos_token_id)
    generation = bundle.Generation(
        eos_token_ids=eos,
        bos_token_id=bos,
        do_sample=keys.flag("do_sample"),
        temperature=keys.optional_number("temperature"),
        top_k=keys.optional_integer("top_k"),
        top_p=keys.optional_number("top_p"),
        min_p=keys.optional_number("min_p"),
    )
    for name, plain in _PLAIN_GENERATION.items():
        if values.get(name, plain) not in (plain, None):
            keys.note(f"{name}={values[name]!r:.80} is not supported and was left out")
    return generation, keys.notes


def _source(folder: Path, shards: tuple[Shard, ...], tensors: dict[str, StoredTensor]) -> bundle.Source:
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.length
    return bundle.Source(
        name=printable(folder.resolve().name),
        fingerprint=fingerprint((folder / CONFIG_FILE).read_bytes(), (shard.path for shard in shards)),
        dtype=DTYPE_NAMES[max(sizes, key=lambda dtype: sizes[dtype])],
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
    )
