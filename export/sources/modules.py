"""Read the modules that sentence-transformers adds to a decoder to make an encoder.

``modules.json`` lists them in order; each has a folder with its ``config.json``. Format:
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmc.bundle import CONFIG_FILE
from llmc.bundle.model.encoder import DENSE, SCORE, Pooling
from llmc.errors import CheckpointError
from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys, read_object, read_value
from llmc.export.parts.encoder import DenseConfig, EncoderConfig
from llmc.export.sources.codes import Weight
from llmc.export.sources.made import MadeTensor
from llmc.export.sources.parameters import copy_tensor
from llmc.export.sources.safetensors import FLOATS, SINGLE_FILE, StoredTensor, read_shard
from llmc.export.sources.tables import place_tables
from llmc.export.sources.tokens import CONFIG_FILE as TOKENIZER_CONFIG
from llmc.origin import find_own_file

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
# How texts are read, in the file that is there; the first one is today's.
KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TEXT_FILES = tuple(f"sentence_{kind}_config.json" for kind in KINDS)
POOLINGS: dict[str, Pooling] = {"cls": "first", "lasttoken": "last", "mean": "mean"}
# The same in files of versions before 6: one flag per mode.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
IDENTITY, TANH, SIGMOID = (
    f"torch.nn.modules.{name}" for name in ("linear.Identity", "activation.Tanh", "activation.Sigmoid")
)
SHORT_NAMES = {f"torch.nn.{name.rpartition('.')[2]}": name for name in (IDENTITY, TANH, SIGMOID)}
# Key of the activation of scores, here and in the config of versions before 4.
ACTIVATION, OLD_ACTIVATION = "activation_fn", "sbert_ce_default_activation_function"
# Prefixes of the names of all tensors but those of a head.
PREFIXES = ("model.", "bert.", "roberta.", "mpnet.", "nomic_bert.")
# Beginnings of the names of tensors of a family's ForSequenceClassification.
CLASSIFIERS = tuple(f"{kind}.0." for kind in (DENSE, f"{DENSE}_norm", SCORE))
HEAD_WEIGHT, TABLE_WEIGHT, SCORE_WEIGHT = "lm_head.weight", "model.embed_tokens.weight", "score.weight"
TASK = "feature-extraction"  # the default
# No model has more; each module adds a node to the graph.
MOST_MODULES = 16


@dataclass(frozen=True)
class Ending:
    """The modules after an encoder's layers."""

    encoder: EncoderConfig
    longest: int = 0  # tokens of a text at most, 0 if unknown
    dense_folders: tuple[str, ...] = ()
    lowers: bool = False  # letters are made small before all else


def read_ending(folder: Path, config: Mapping[str, Any]) -> Ending | None:
    """Read the modules after the encoder's layers; None for a generating model. ``config``: from config.json."""
    architecture = _architecture(config)
    classifies = architecture.endswith("ForSequenceClassification")
    modules = _read_modules(folder)
    if modules is None and classifies:
        modules = {"Transformer": [""]}
    if modules is None:
        return None
    longest, template, lowers = _texts(folder)
    kinds = [kind for kind in modules if kind != "Transformer"]
    if kinds == ["LogitScore"] and not classifies:
        encoder = _logit_score(folder, modules["LogitScore"][0], _sigmoid(folder, config), template)
    elif not kinds and classifies:
        _check_labels(folder, config)
        padding = config.get("pad_token_id")  # transformers scores at the last token that is not padding
        padding = padding if type(padding) is int and padding >= 0 else None
        sigmoid = _sigmoid(folder, config)
        encoder = EncoderConfig(
            result="scores", pooling="last", width=1, template=template, sigmoid=sigmoid, padding=padding
        )
    elif kinds[:1] == ["Pooling"] and set(kinds) <= {"Pooling", "Dense", "Normalize"} and not template:
        encoder = _read_encoder(folder, modules)
    else:
        how = "through its chat template" if template else "as text"
        raise CheckpointError(
            f"{folder / MODULES_FILE}: {architecture:.80} with the modules {', '.join(modules)}, which reads texts "
            f"{how}, is unsupported; expected Pooling, Dense and Normalize after a decoder that reads plain text, "
            "LogitScore after a causal one, or only a ForSequenceClassification"
        )
    return Ending(encoder, longest, tuple(modules.get("Dense", ())), lowers)


def default_ending(folder: Path, values: Mapping[str, Any], config: DecoderConfig) -> Ending | None:
    """The ending of a checkpoint without ``modules.json``: sentence-transformers' own of an encoder, else None."""
    architecture = _architecture(values)
    if config.classifier is not None:
        return Ending(EncoderConfig(result="embeddings", pooling="mean"))
    if config.diffusion is None and architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: {architecture:.80} has no head, and there is no {MODULES_FILE} to define its "
            "vectors; expected the files of sentence-transformers beside it"
        )
    if config.diffusion is None and not all(item.causal for item in config.geometry.attentions):
        raise CheckpointError(
            f"{folder}: this model also attends to later tokens, so it generates no text, and without {MODULES_FILE} "
            "its kind of embedding is unknown; download all files of the checkpoint"
        )
    return None


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def prefix_names(stored: Mapping[str, Weight]) -> dict[str, Weight]:
    """Tensor names with ``model.`` in the place of an encoder's own prefix, or, without a head, of none."""
    prefix = next((it for it in PREFIXES if any(name.startswith(it) for name in stored)), "")
    if prefix:
        return {f"model.{name.removeprefix(prefix)}" if prefix in name else name: it for name, it in stored.items()}
    return {name if name in (HEAD_WEIGHT, SCORE_WEIGHT) else f"model.{name}": item for name, item in stored.items()}


def replace_head(
    folder: Path, config: DecoderConfig, ending: Ending, stored: Mapping[str, Weight]
) -> tuple[DecoderConfig, dict[str, Weight]]:
    """The decoder with an encoder's modules instead of its head, and the tensors of both."""
    end, tensors = ending.encoder, dict(stored)
    classifier = config.classifier if end.result == "scores" else None
    if classifier is not None:
        types = config.stored_types if config.stored_types > 1 and _gives_types(folder) else 0
        end = replace(classifier, sigmoid=end.sigmoid, types=types)
    else:
        tensors = {name: it for name, it in tensors.items() if not name.startswith(CLASSIFIERS)}
    end = _measure(folder, config, replace(end, biased=config.distance_ranges))
    head = tensors.pop(HEAD_WEIGHT, tensors.get(TABLE_WEIGHT) if config.tied_head else None)
    for number, row in enumerate(end.score_rows):
        tensors[f"{SCORE}.{number}.weight"] = _row(folder, head, row)
    if SCORE_WEIGHT in tensors:
        tensors[f"{SCORE}.0.weight"] = tensors.pop(SCORE_WEIGHT)
    for number, name in enumerate(ending.dense_folders):
        tensors |= {f"{DENSE}.{number}.{part}": tensor for part, tensor in _dense_tensors(folder, name).items()}
    longest = min(config.max_positions, ending.longest or _read_limit(folder) or config.max_positions)
    place_tables(folder, config, tensors, longest, end.types)
    ropes = tuple(  # longrope's factors for the longest text serve all texts
        replace(rope, factors=rope.long_factors, long_factors=())
        if rope.long_factors and longest > rope.original_max_positions
        else replace(rope, long_factors=())
        for rope in config.ropes
    )
    return replace(config, encoder=end, tied_head=False, max_positions=longest, ropes=ropes), tensors


def _measure(folder: Path, config: DecoderConfig, end: EncoderConfig) -> EncoderConfig:
    """The end with the width of its result, after a check that its parts fit the decoder."""
    width = config.hidden_size
    for layer in end.dense:
        if layer.inputs != width:
            raise CheckpointError(f"{folder}: a Dense layer reads {layer.inputs} values, but {width} come before it")
        width = layer.outputs
    if any(row >= config.vocab_size for row in end.score_rows):
        raise CheckpointError(
            f"{folder}: LogitScore names the tokens {list(end.score_rows)}, but {CONFIG_FILE} says "
            f"vocab_size={config.vocab_size}; download it again"
        )
    return end if end.result == "scores" else replace(end, width=width)


def _row(folder: Path, head: Weight | None, row: int) -> StoredTensor:
    if not isinstance(head, StoredTensor):
        raise CheckpointError(
            f"{folder}: {HEAD_WEIGHT} is missing or quantized, expected floats, whose rows LogitScore uses; export the "
            "checkpoint that it was made from"
        )
    size = head.length // head.shape[0]
    return replace(head, offset=head.offset + row * size, length=size, shape=(1, *head.shape[1:]))


def _dense_tensors(folder: Path, name: str) -> dict[str, MadeTensor]:
    path = find_own_file(folder, f"{name}/{SINGLE_FILE}")
    if path is None:
        raise CheckpointError(f"{folder}: no {name}/{SINGLE_FILE}, the weights of a Dense layer; download it again")
    parts = {part.removeprefix("linear."): tensor for part, tensor in read_shard(path).tensors.items()}
    if wrong := [tensor.dtype for tensor in parts.values() if tensor.dtype not in FLOATS]:
        raise CheckpointError(f"{path}: it holds {wrong[0]}, expected one of {', '.join(FLOATS)}; download it again")
    return {part: copy_tensor(path.parent, tensor) for part, tensor in parts.items()}


def _read_modules(folder: Path) -> dict[str, list[str]] | None:
    """The modules' folders by kind, in order; None without ``modules.json``."""
    listed = read_value(folder, MODULES_FILE)
    if listed is None:
        return None
    where = folder / MODULES_FILE
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_MODULES:
        raise CheckpointError(f"{where} is not a list of 1 to {MOST_MODULES} modules; download it again")
    folders: dict[str, list[str]] = {}
    for number, entry in enumerate(listed):
        kind = entry.get("type") if isinstance(entry, dict) else None
        path = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str) or not re.fullmatch(r"[\w.-]{0,80}", path):
            raise CheckpointError(f"{where}: module {number} has no type and the name of a folder; download it again")
        if not kind.startswith("sentence_transformers.") or path in (".", ".."):
            raise CheckpointError(
                f"{where}: {kind:.80} in {path!r} is unsupported, since llmc runs no code of a checkpoint; expected "
                "modules of sentence-transformers"
            )
        name = kind.rpartition(".")[2]
        later = [*folders, name]
        if (name == "Transformer") != (number == 0) or (name in folders and (name != "Dense" or later[-2] != "Dense")):
            raise CheckpointError(f"{where}: {kind:.80} as module {number} is unsupported; expected Transformer first")
        folders.setdefault(name, []).append(path)
    return folders


def _texts(folder: Path) -> tuple[int, bool, bool]:
    """The longest text in tokens (0 if unknown), whether texts go through the chat template, and are lowered."""
    found = ((name, values) for name in TEXT_FILES if (values := read_object(folder, name)))
    name, values = next(found, ("", None))
    if values is None:
        return 0, False, False
    keys = Keys(values, str(folder / name))
    keys.skip("module_output_name", "unpad_inputs")
    keys.choice("transformer_task", ("feature-extraction", "sequence-classification", "text-generation"), TASK)
    lowers = keys.flag("do_lower_case")
    longest = keys.optional_integer("max_seq_length") or 0
    modality = keys.raw("modality_config") or {}
    message = modality.get("message") if isinstance(modality, dict) else None
    if not isinstance(modality, dict) or not set(modality) <= {"text", "message"}:
        raise keys.error("modality_config", modality, "text, or text and message")
    if message is not None and (not isinstance(message, dict) or message.get("format", "flat") != "flat"):
        raise keys.error("modality_config", modality, "messages of the flat format")
    keys.finish()
    return longest, message is not None, lowers


def _read_limit(folder: Path) -> int:
    """The tokenizer's own limit of tokens, where sentence-transformers keeps it since version 6; 0 if there is none."""
    limit = (read_object(folder, TOKENIZER_CONFIG) or {}).get("model_max_length")
    return limit if type(limit) is int and limit > 0 else 0


def _read_encoder(folder: Path, modules: Mapping[str, list[str]]) -> EncoderConfig:
    pooling = modules["Pooling"][0]
    return EncoderConfig(
        result="embeddings",
        pooling=_read_pooling(_read_keys(folder, pooling)),
        normalized="Normalize" in modules,
        dense=tuple(_dense(_read_keys(folder, name)) for name in modules.get("Dense", ())),
    )


def _read_pooling(keys: Keys) -> Pooling:
    keys.skip("word_embedding_dimension", "embedding_dimension")
    keys.fixed("include_prompt", True)
    flags = [mode for name, mode in FLAGS.items() if keys.raw(name) is True]
    mode = keys.raw("pooling_mode") or flags or "mean"
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    keys.finish()
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise keys.error("pooling_mode", mode, f"one of {', '.join(POOLINGS)}")
    return POOLINGS[mode]


def _dense(keys: Keys) -> DenseConfig:
    activation = _activation(keys, "activation_function", (IDENTITY, TANH), TANH)
    for name in ("module_input_name", "module_output_name"):
        keys.choice(name, ("sentence_embedding",), "sentence_embedding")
    keys.fixed("use_residual", False)
    outputs, inputs = keys.integer("out_features"), keys.integer("in_features")
    bias = keys.flag("bias", True)
    keys.finish()
    return DenseConfig(outputs, inputs, bias, "identity" if activation == IDENTITY else "tanh")


def _logit_score(folder: Path, name: str, sigmoid: bool, template: bool) -> EncoderConfig:
    keys = _read_keys(folder, name)
    keys.choice("module_input_name", ("causal_logits",), "causal_logits")
    rows = [keys.integer("true_token_id")]
    false_token = keys.optional_integer("false_token_id")
    keys.finish()
    rows += [] if false_token is None else [false_token]
    return EncoderConfig(
        result="scores", pooling="last", width=1, template=template, score_rows=tuple(rows), sigmoid=sigmoid
    )


def _sigmoid(folder: Path, config: Mapping[str, Any]) -> bool:
    """True if scores go through a sigmoid, which is the default."""
    values, inner = read_object(folder, MODEL_FILE), config.get("sentence_transformers")
    places = [(folder / MODEL_FILE, values, ACTIVATION), (folder / CONFIG_FILE, inner, ACTIVATION)]
    for where, holder, name in (*places, (folder / CONFIG_FILE, dict(config), OLD_ACTIVATION)):
        if isinstance(holder, dict) and holder.get(name) is not None:
            return _activation(Keys(holder, str(where)), name, (IDENTITY, SIGMOID)) == SIGMOID
    return True


def _activation(keys: Keys, name: str, options: tuple[str, ...], default: str | None = None) -> str:
    """One of ``options``, whose names in torch.nn are shorter, too."""
    shorts = {short: long for short, long in SHORT_NAMES.items() if long in options}
    given = keys.choice(name, (*options, *shorts), default)
    return shorts.get(given, given)


def _check_labels(folder: Path, config: Mapping[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)  # transformers' default
    if count != 1:
        raise CheckpointError(f"{folder / CONFIG_FILE}: it has {count!r:.20} labels, expected 1: the score of a pair")


def _gives_types(folder: Path) -> bool:
    """True if the tokenizer gives the types of tokens, as BERT's does unless its config names its outputs."""
    config = read_object(folder, TOKENIZER_CONFIG) or {}
    kind, names = config.get("tokenizer_class") or "BertTokenizer", config.get("model_input_names")
    return "token_type_ids" in names if isinstance(names, list) else str(kind).startswith("BertTokenizer")


def _read_keys(folder: Path, name: str) -> Keys:
    values = read_object(folder, f"{name}/{CONFIG_FILE}")
    if values is None:
        raise CheckpointError(f"{folder}: no {name}/{CONFIG_FILE}, but {MODULES_FILE} names {name}; download it again")
    return Keys(values, str(folder / name / CONFIG_FILE))
