"""Read GGUF files: config, tokenizer and tensors with Hugging Face's names."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmc.bundle import CONFIG_FILE, TOKENIZER_FILE
from llmc.errors import CheckpointError
from llmc.export.sources.codes import Weight
from llmc.export.sources.gguf.architectures import read_config
from llmc.export.sources.gguf.config import Metadata
from llmc.export.sources.gguf.header import SUFFIX, Header, read_header
from llmc.export.sources.gguf.tensors import decoder_tensors, read_factors, read_small
from llmc.export.sources.gguf.tokenizer import read_tokenizer
from llmc.export.sources.tokens import cut_tokenizer

__all__ = ["SUFFIX", "GgufModel", "read_factors", "read_gguf", "read_header"]

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Most files of one model; no published model has more.
MOST_FILES = 1024
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Generation defaults whose names differ in generation_config.json.
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GgufModel:
    """A model in one or several GGUF files."""

    config: dict[str, Any]  # contents of its ``config.json``
    generation: dict[str, Any]  # contents of its ``generation_config.json``
    texts: dict[str, str]  # contents of the other files that an export needs, by file name
    tensors: dict[str, Weight]  # by the names of the decoder's parameters
    files: tuple[Path, ...]  # all files; the export uses tensors in place
    notes: tuple[str, ...]  # sentences about what was changed


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a model's files; weights stay on disk."""
    headers = _headers(path)
    metadata = headers[0].metadata
    if metadata.get("general.type") == "adapter":
        raise CheckpointError(
            f"{path} is an adapter, not a whole model; export its base model with it: llmc export BASE --adapter {path}"
        )
    places = {entry.name: (header.path, entry) for header in headers for entry in header.tensors}

    def read(name: str) -> NDArray[Any]:
        return read_small(*places[name])

    shapes = {name: entry.shape for name, (_, entry) in places.items()}
    config = read_config(Metadata(str(path), metadata, shapes, read))
    tokenizer = read_tokenizer(str(path), metadata)
    tokens = {TOKENIZER_FILE: tokenizer.json, TOKENIZER_CONFIG_FILE: tokenizer.config}
    cut, notes = cut_tokenizer(str(path), tokens, config["vocab_size"])
    config |= {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.ends)}
    tensors = decoder_tensors(headers, config)
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in {CONFIG_FILE: config, **tokens}.items()}
    return GgufModel(
        config,
        _generation(metadata),
        texts | cut,
        tensors,
        tuple(header.path for header in headers),
        (*tokenizer.notes, *notes),
    )


def _headers(path: Path) -> list[Header]:
    """Headers of the file, or of all parts of a split model; the first one has the metadata."""
    first = read_header(path)
    count, number = (first.metadata.get(f"split.{name}", default) for name, default in (("count", 1), ("no", 0)))
    if type(count) is int and count == 1:
        return [first]
    match = _PART.fullmatch(path.name)
    if type(count) is not int or not 1 < count <= MOST_FILES or match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} says that it is one of {count!r:.80} files; expected a name such as model-00001-of-00003.gguf "
            f"with this number, at most {MOST_FILES}"
        )
    names = [f"{match['stem']}-{part + 1:05d}-of-{count:05d}{SUFFIX}" for part in range(count)]
    if number != 0 or path.name != names[0]:
        raise CheckpointError(f"{path} is part {int(match['number'])} of {count}; export the first one: {names[0]}")
    for name in names[1:]:
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent}: {name} is missing, a part of {path.name}; download it again")
    headers = [first, *(read_header(path.parent / name) for name in names[1:])]
    for part, header in enumerate(headers):
        stated = [header.metadata.get(name) for name in ("split.no", "split.count")]
        if any(type(value) is not int for value in stated) or stated != [part, count]:
            raise CheckpointError(
                f"{header.path} is not part {part + 1} of {count}, as its name says; download it again"
            )
    return headers


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "general.sampling."
    advised = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    defaults = {_SAMPLING.get(key, key): value for key, value in advised.items()}
    samples = any(name in defaults for name in _SAMPLED) and defaults.get("temperature", 1.0) != 0
    return {"do_sample": samples, **defaults} if defaults else {}
