"""Checkpoints that embed or rank: random weights in the files that such models are published with, and their oracle.

The folders are written by hand, as published ones look; sentence-transformers, which made that layout, computes what
must come out.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from doubles.tiny import SMALL_MODEL, tiny
from tokenizers import models, normalizers, pre_tokenizers, processors

END = "<|end|>"
HIDDEN, VOCAB = 64, 4097  # the small model's tokens and END
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "intermediate_size": 80,
    "head_dim": 32,
    "pad_token_id": VOCAB - 1,
}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    f'| default("{INSTRUCTION}") -%}}\n'
    '{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}\n'
    '{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}\n'
    "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}\nyes or no? "
)
MODULES = {
    "Transformer": "base.modules.transformer",
    "Normalize": "base.modules.normalize",
    "LogitScore": "cross_encoder.modules.logit_score",
    "Pooling": "models",  # as versions before 6 wrote it
    "Dense": "models",
}
# EmbeddingGemma's knobs: every position sees those after it, in windows but for the last layer, with two ropes.
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 32,
    "use_bidirectional_attention": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
# Encoders of 113 word pieces, with a value of its own for every key that changes the answer.
BERT = {
    "model_type": "bert",
    "vocab_size": 120,
    "num_key_value_heads": 4,  # as many as heads
    "layer_norm_eps": 0.01,
    "hidden_act": "gelu_new",
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
ROBERTA = {**BERT, "model_type": "roberta", "pad_token_id": 3, "type_vocab_size": 1, "hidden_act": "relu"}
XLM_ROBERTA = {**ROBERTA, "model_type": "xlm-roberta"}
# A window is shorter than the texts.
MODERNBERT = {
    **{key: BERT[key] for key in ("vocab_size", "num_key_value_heads", "pad_token_id")},
    "model_type": "modernbert",
    "num_hidden_layers": 3,
    "global_attn_every_n_layers": 2,
    "local_attention": 12,
    "hidden_activation": "gelu_new",
    "norm_eps": 0.01,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_pooling": "mean",
    "classifier_bias": True,
    "classifier_activation": "gelu_new",
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
NOMIC_BERT = {
    **{key: BERT[key] for key in ("vocab_size", "num_key_value_heads", "pad_token_id", "layer_norm_eps")},
    "model_type": "nomic_bert",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
MPNET = {
    **{key: value for key, value in BERT.items() if key != "type_vocab_size"},
    "model_type": "mpnet",
    "pad_token_id": 1,
    "hidden_act": "gelu",
}
WORDS = "def f x return import os for name in listdir print class pass word query document"
# Families of word pieces, and their special tokens.
_ROBERTA = {"cls": "<s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>"}
_MPNET = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "[UNK]"}
_BERT = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
PIECES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": _ROBERTA,
    "nomic_bert": _BERT,
    "mpnet": _MPNET,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789():.,'#_+*?"
# The Dense layers of a case: outputs, inputs, bias and activation.
DENSE = ((48, HIDDEN, False, "linear.Identity"), (32, 48, True, "activation.Tanh"))


def write_embedder(
    folder: Path,
    *,
    pooling: str = "lasttoken",
    dense: Sequence[tuple[Any, ...]] = (),
    normalize: bool = True,
    **case: Any,
) -> Path:
    """A checkpoint as Qwen3-Embedding is published: a decoder without its head, names without ``model.``."""
    _write_decoder(folder, "AutoModel", case)
    modules = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if normalize else [])]
    write_modules(folder, modules)
    kinds = {f"pooling_mode_{kind}": kind == f"{pooling}" for kind in ("cls_token", "lasttoken")}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, **kinds, "pooling_mode_mean_tokens": pooling == "mean"},
    )
    for number, layer in enumerate(dense, 2):
        _write_dense(folder / f"{number}_Dense", number, *layer)
    prompts = {"query": f"Instruct: {INSTRUCTION}\nQuery:", "document": ""}
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    return folder


def write_reranker(folder: Path, **case: Any) -> Path:
    """A checkpoint as Qwen3-Reranker is published: a causal model, two of whose tokens' logits are the score."""
    _write_decoder(folder, "AutoModelForCausalLM", {"tie_word_embeddings": True, **case})
    write_modules(folder, ["Transformer", "LogitScore"])
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 300, "false_token_id": 301})
    reads = {"method": "forward", "method_output_name": "logits"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": reads, "message": {**reads, "format": "flat"}},
            "module_output_name": "causal_logits",
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
            "prompts": {"bugs": "Given a bug, find the patch"},
            "default_prompt_name": None,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_classifier(folder: Path, **case: Any) -> Path:
    """A reranker with a head of its own for the score, and a tokenizer that joins query and document; what it puts at
    their end is padding to transformers, which scores at the token before."""
    _write_decoder(folder, "AutoModelForSequenceClassification", {"num_labels": 1, **case})
    return folder


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})


def write_modules(folder: Path, kinds: Sequence[str]) -> None:
    write_json(
        folder / "modules.json",
        [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{kind}" if number else "",
                "type": f"sentence_transformers.{MODULES[kind]}.{kind}",
            }
            for number, kind in enumerate(kinds)
        ],
    )


def _write_decoder(folder: Path, auto: str, case: dict[str, Any]) -> None:
    """With the small model's tokenizer, which puts a token at the end of every text, as Qwen3-Embedding's does, or
    BERT's with word pieces."""
    from transformers import PreTrainedTokenizerFast

    if case.get("model_type") in PIECES:
        tiny(folder, auto=auto, **case)
        names = PIECES[case["model_type"]]
        special = {f"{name}_token": text for name, text in names.items()}
        tokenizer = _word_pieces(names)
        # as published; it concerns texts that a model writes
        special["clean_up_tokenization_spaces"] = True
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        if names is _BERT:
            change_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
        return
    tiny(folder, auto=auto, **{**CONFIG, **case})
    tokenizer = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([END])
    end = (END, tokenizer.token_to_id(END))
    ends = processors.TemplateProcessing(single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[end])
    tokenizer.post_processor = ends
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, eos_token=END).save_pretrained(folder)


def _word_pieces(names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Word pieces behind the special tokens ``names``, as BERT's tokenizer, or as RoBERTa's without types of tokens."""
    unk, cls, sep = (names[name] for name in ("unk", "cls", "sep"))
    rest = (*WORDS.split(), *LETTERS, *(f"##{letter}" for letter in LETTERS))
    pieces = dict.fromkeys((*names.values(), *rest))
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unk))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if "[" in cls else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(text, vocab[text]) for text in (cls, sep)],
    )
    return tokenizer


def _write_dense(folder: Path, seed: int, outputs: int, inputs: int, bias: bool, activation: str) -> None:
    import torch
    from safetensors.torch import save_file

    write_json(
        folder / "config.json",
        {
            "in_features": inputs,
            "out_features": outputs,
            "bias": bias,
            "activation_function": f"torch.nn.modules.{activation}",
        },
    )
    torch.manual_seed(seed)
    weights = {"linear.weight": torch.randn(outputs, inputs) * 0.2, "linear.bias": torch.randn(outputs) * 0.2}
    save_file(
        {name: weight for name, weight in weights.items() if bias or weight.dim() == 2}, folder / "model.safetensors"
    )


def embeddings(folder: Path, texts: Sequence[str], **options: Any) -> np.ndarray:
    """What sentence-transformers makes of texts in float32 [n, d], whatever the weights' type."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"}).encode(
        list(texts), **options
    )


def scores(folder: Path, query: str, documents: Sequence[str], **options: Any) -> np.ndarray:
    """What sentence-transformers makes of a query with each document, float32 [n]."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")
    return model.predict([(query, document) for document in documents], **options)


def copy(source: Path, target: Path) -> Path:
    """A checkpoint to be broken."""
    shutil.copytree(source, target)
    return target
