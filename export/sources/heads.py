"""Read draft heads of published checkpoints: EAGLE-3's and Gemma 4's assistants, in separate folders, and Qwen3.5's,
which is part of the model's folder.

Layouts: https://github.com/SafeAILab/EAGLE (``eagle/model/cnets.py``; arXiv 2503.01840), speculators' ``models/eagle3``
(https://github.com/vllm-project/speculators), vLLM's ``llama_eagle3.py`` and ``qwen3_5_mtp.py``, and transformers'
``models/gemma4_assistant``.
"""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from llmc import bundle
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.draft_head import CENTROIDS, HEAD_INPUT, HEAD_OUTPUT
from llmc.errors import CheckpointError
from llmc.export.config import DecoderConfig
from llmc.export.families import read_config
from llmc.export.families.gemma4 import MORE, OTHER_PARTS
from llmc.export.heads.shapes import BESIDE, HeadConfig
from llmc.export.keys import Keys, require_object
from llmc.export.parts.attention import AttentionConfig
from llmc.export.sources.checkpoint import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    Checkpoint,
    describe_source,
    match_tensors,
    read_checkpoint,
)
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.parameters import Tensors, copy_tensor, decoder_tensors, rename_tensors
from llmc.export.sources.safetensors import StoredTensor, read_shards
from llmc.origin import find_own_file

EAGLE, ASSISTANTS = "LlamaForCausalLMEagle3", ("gemma4_assistant", "gemma4_unified_assistant")
FINAL_NORM = "model.norm.weight"
# Keys of EAGLE-3's configs that the tensors determine, or that concern training and the number of drafts.
EAGLE_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config")
SPECULATORS, BORDERS = "speculators_model_type", "eagle_aux_hidden_state_layer_ids"
SPECULATORS_KEYS = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")


def read_head(folder: Path, of: Path) -> Checkpoint:
    """Read and check the draft head in ``folder`` for the model in the checkpoint ``of``; both are the same folder if
    the head is part of the model. The head gets the model's tokenizer and embedding, and its lm_head unless it has one.

    Raises CheckpointError: names what is missing, broken or unsupported.
    """
    if not of.is_dir():
        raise CheckpointError(f"{of} is not a folder; expected the checkpoint folder of the head's model")
    model = read_checkpoint(of, text_only=True)
    shards = read_shards(folder)
    stored: Tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    keys = Keys(require_object(folder, CONFIG_FILE), str(folder / CONFIG_FILE))
    if folder.samefile(of):
        config, head_tensors = _read_part(folder, model.config, stored)
    elif keys.raw("model_type") in ASSISTANTS:
        config, head_tensors = _read_assistant(folder, keys, model, stored)
    else:
        config, head_tensors = _read_eagle(folder, keys, model, stored)
    tensors = match_tensors(folder, config, decoder_tensors(folder, config, head_tensors))
    files = tuple(shard.path for shard in shards)
    texts = {CONFIG_FILE: (folder / CONFIG_FILE).read_text(encoding="utf-8")}
    for name in bundle.TOKENIZER_FILES:
        if path := find_own_file(of, name):
            texts[name] = model.texts.get(name) or path.read_text(encoding="utf-8")
    source = describe_source(folder, texts[CONFIG_FILE].encode(), files, tensors, ())
    source = replace(source, name=f"{source.name} head")
    return Checkpoint(folder, config, model.generation, tensors, files, source, (), texts)


def _read_part(folder: Path, base: DecoderConfig, stored: Tensors) -> tuple[DecoderConfig, Tensors]:
    """The tensors ``mtp.*`` of Qwen3.5: a full-attention layer after a linear of the next token's embedding and the
    model's last hidden state, both normed; further steps read its own state after its last norm."""
    renamed = rename_tensors(folder, replace(base, left_out=()), stored)
    tensors = {
        f"model.{name.removeprefix('mtp.')}": tensor for name, tensor in renamed.items() if name.startswith("mtp.")
    }
    layer = next((layer for layer in base.layers if layer.attention), None)
    if not tensors or layer is None or layer.mlp is None or layer.experts is not None:
        problem = "with experts, which llmc does not read of heads" if tensors else "without tensors mtp.*"
        raise CheckpointError(
            f"{folder} is a {base.model_type} {problem}; expected a dense Qwen3.5 with them, or the folder of an "
            "EAGLE-3 head or a Gemma 4 assistant and --of its model"
        )
    tensors |= {"model.target_norm.weight": renamed[FINAL_NORM], EMBEDDING: renamed[EMBEDDING]}
    if not base.tied_head and HEAD in renamed:
        tensors[HEAD] = renamed[HEAD]
    width = base.hidden_size
    head = HeadConfig(borders=(len(base.layers),), width=width, own_width=width, beside=False)
    return replace(base, layers=(layer,), pair_axes=(), renamed=(), left_out=(), head=head), tensors


def _read_assistant(folder: Path, keys: Keys, model: Checkpoint, stored: Tensors) -> tuple[DecoderConfig, Tensors]:
    """Gemma 4's assistant: layers with only queries, over keys and values of the model's last layer of the same kind.
    Its input projects the last token's embedding and the model's last normed hidden state; the next step reads the
    assistant's own hidden state, projected to the model's width."""
    width, clustered = keys.integer("backbone_hidden_size"), keys.flag("use_ordered_embeddings")
    count, best = keys.integer("num_centroids", 2048), keys.integer("centroid_intermediate_top_k", 32)
    tied, text = keys.flag("tie_word_embeddings", True), keys.inside("text_config")
    stated = {**(values := keys.raw("text_config")), "num_kv_shared_layers": 0, "vocab_size_per_layer_input": None}
    keys.skip("bos_token_id", "eos_token_id", "image_token_id", *OTHER_PARTS, *MORE)  # the model's are used
    keys.finish()
    config = read_config(Keys(stated, text.where))
    if config.per_layer or values.get("use_double_wide_mlp") or any(layer.experts for layer in config.layers):
        raise keys.error("text_config", values, "dense layers without per-layer inputs or wider MLPs")
    base = model.config
    expected = base.hidden_size, base.vocab_size, base.norm.eps
    if (width, config.vocab_size, config.norm.eps) != expected or "gemma4" not in base.model_type:
        raise CheckpointError(
            f"{folder} drafts for a Gemma 4 of {width} values, {config.vocab_size} tokens and {config.norm.eps} in "
            f"norms, the model is a {base.model_type} of {expected[0]}, {expected[1]} and {expected[2]}; give --of "
            "its model"
        )
    writers = {bool(item.window): item for item in base.geometry.writing}
    listed = {cache.name: replace(cache, lent=True) for cache in base.geometry.caches}
    used = dict[str, Cache]()

    get_shape = attrgetter("kv_heads", "head_dim", "window")

    def borrow(index: int, layer: AttentionConfig) -> AttentionConfig:
        item = writers.get(bool(layer.window))
        if item is None or get_shape(layer) != get_shape(item):
            raise CheckpointError(
                f"{folder}: layer {index} reads {layer.kv_heads} heads of {layer.head_dim} values in a window of "
                f"{layer.window} (0: all), which no last layer of the model has; give --of its model"
            )
        used[item.cache] = listed[item.cache]
        return replace(layer, source=item.layer, behind=True, window=layer.window and layer.window + 1)

    config = config.change_attentions(borrow)
    renamed = {
        "pre_projection.weight": f"{HEAD_INPUT}.weight",
        "post_projection.weight": f"{HEAD_OUTPUT}.weight",
        "masked_embedding.centroids.weight": f"{CENTROIDS}.weight",
    }
    tensors = {renamed.get(name, name): tensor for name, tensor in stored.items()}
    table, ordering = tensors.pop(EMBEDDING, None), tensors.pop("masked_embedding.token_ordering", None)
    if tied and table is not None:
        tensors[HEAD] = table
    tensors |= {EMBEDDING: _copy(model, EMBEDDING), "model.target_norm.weight": _copy(model, FINAL_NORM)}
    lent = tuple(cache for cache in listed.values() if cache.name in used)
    head = HeadConfig(borders=(len(base.layers),), width=width, own_width=width, beside=False, lent=lent)
    if clustered:
        head = replace(head, clusters=_read_clusters(folder, ordering, base.vocab_size, count), best=min(best, count))
    scale, positions = base.embedding_scale, base.max_positions
    config = replace(config, head=head, embedding_scale=scale, max_positions=positions, tied_head=False)
    return replace(config, logit_softcap=0.0), tensors


def _copy(model: Checkpoint, name: str) -> MadeTensor:
    """A converted tensor of the model, for a head that lacks it."""
    tensor = model.tensors[name]
    if not isinstance(tensor, StoredTensor | MadeTensor):
        raise CheckpointError(f"{model.folder}: {name} is quantized; give the checkpoint that it was made from")
    return copy_tensor(model.folder, tensor)


def _read_clusters(folder: Path, ordering: Any, vocab: int, count: int) -> tuple[int, ...]:
    """The cluster of each token; ``ordering`` lists the tokens of one cluster after the other."""
    if not isinstance(ordering, StoredTensor) or (ordering.dtype, ordering.shape) != ("I64", (vocab,)) or vocab % count:
        raise CheckpointError(
            f"{folder}: token_ordering is not a tensor I64 [{vocab}] of {count} clusters with as many tokens each"
        )
    tokens = np.memmap(folder / ordering.file, array_type("I64"), "r", ordering.offset, (vocab,))
    if not np.array_equal(np.sort(tokens), np.arange(vocab)):
        raise CheckpointError(f"{folder}: token_ordering does not name each of the {vocab} tokens once")
    clusters = np.empty(vocab, np.int64)
    clusters[tokens] = np.arange(vocab) // (vocab // count)
    return tuple(clusters.tolist())


def _read_eagle(folder: Path, keys: Keys, model: Checkpoint, stored: Tensors) -> tuple[DecoderConfig, Tensors]:
    """EAGLE-3: one layer over a projection of three of the model's hidden states; its attention also reads the next
    token's normed embedding. The next step reads its own hidden state before the last norm."""
    named = keys.raw("architectures")
    if SPECULATORS in keys:
        keys.choice(SPECULATORS, ("eagle3",))
    elif named != [EAGLE]:
        raise keys.error(
            "architectures",
            named,
            f"['{EAGLE}'], model_type {ASSISTANTS[0]}, or the same folder as --of, of a model with its own head",
        )
    borders, normed = _read_borders(keys, len(model.config.layers)), keys.flag("norm_before_residual")
    input_norm = keys.flag("norm_before_fc")
    for name in ("fc_norm", "norm_output"):
        keys.fixed(name, False, ": for norms around the first linear and the result llmc has norm_before_fc")
    keys.skip(*EAGLE_KEYS)
    if SPECULATORS in keys:
        keys.skip(*SPECULATORS_KEYS)
        keys, outer = keys.inside("transformer_layer_config"), keys
        outer.finish()
    config = read_config(keys)
    if len(config.layers) != 1:
        raise keys.error("num_hidden_layers", len(config.layers), "1")
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in stored}
    tensors = {
        parameter if parameter.startswith("lm_head.") else f"model.{parameter}": stored[name]
        for name, parameter in names.items()
    }
    offsets, _ = tensors.pop("model.d2t", None), tensors.pop("model.t2d", None)
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = _copy(model, EMBEDDING)
    vocab, rows = model.config.vocab_size, tensors[HEAD].shape[0] if HEAD in tensors else 0
    head = HeadConfig(
        borders=borders,
        width=model.config.hidden_size,
        own_width=config.hidden_size,
        beside=True,
        normed=normed,
        input_norm=input_norm,
    )
    if offsets is not None:
        head = replace(head, tokens=_read_tokens(folder, offsets, rows, vocab), rows=rows)
    layer = replace(config.layers[0], placement=BESIDE)
    positions = model.config.max_positions  # the head's own limit is that of its training
    config = replace(config, layers=(layer,), vocab_size=vocab, max_positions=positions, tied_head=False)
    return replace(config, head=head), tensors


def _read_borders(keys: Keys, layers: int) -> tuple[int, ...]:
    """Number of layers before each hidden state that the head reads: by default 2, half of them, and all but 3. Configs
    of ``speculators`` state these numbers, others the index of the layer before."""
    borders: tuple[int, ...] = (2, layers // 2, layers - 3)
    if SPECULATORS in keys:
        borders = keys.layer_numbers(BORDERS, borders) or borders
    elif keys.raw("eagle_config") is not None:
        inner = keys.inside("eagle_config")
        inner.fixed("use_aux_hidden_state", True)
        borders = tuple(layer + 1 for layer in inner.layer_numbers(BORDERS, ())) or borders
        inner.finish()
    if not 0 < min(borders) <= max(borders) <= layers:
        raise keys.error(
            BORDERS, f"states after {borders} layers", f"some of the {layers} of the model that --of names"
        )
    return borders


def _read_tokens(folder: Path, offsets: Any, rows: int, vocab: int) -> tuple[int, ...]:
    """The head's row of each token; for each row, ``offsets`` holds its token's id minus the row's number."""
    if not isinstance(offsets, StoredTensor) or (offsets.dtype, offsets.shape) != ("I64", (rows,)):
        raise CheckpointError(f"{folder}: d2t is not a tensor I64 [{rows}] with a number per row of the head")
    tokens = np.arange(rows) + np.memmap(folder / offsets.file, array_type("I64"), "r", offsets.offset, (rows,))
    if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < rows:
        raise CheckpointError(f"{folder}: d2t repeats tokens, or exceeds the model's {vocab}; give --of its model")
    index = np.full(vocab, rows)
    index[tokens] = np.arange(rows)
    return tuple(index.tolist())
