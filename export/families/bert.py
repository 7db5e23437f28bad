"""BERT: learned positions and token types, layer norms behind every sum, a plain MLP, biases everywhere, both ways."""

from dataclasses import replace
from typing import Literal

from llmc.bundle.model.encoder import Pooling
from llmc.bundle.model.experts import Activation
from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.encoder import DenseConfig, EncoderConfig
from llmc.export.parts.norm import BEHIND_SUMS, NormConfig
from llmc.export.reading import read_decoder

LAYER = (
    *((f"attention.self.{part}", f"self_attn.{part[0]}_proj") for part in ("query", "key", "value")),
    *(("attention.output.dense", "self_attn.o_proj"), ("attention.output.LayerNorm", "post_attention_layernorm")),
    *(("intermediate.dense", "mlp.up_proj"), ("output.dense", "mlp.down_proj")),
    *(("gamma", "weight"), ("beta", "bias")),  # of the first checkpoints' norms
)
HEAD = (("model.pooler.dense", "dense.0"), ("classifier", "score.0"))
# For training, and of pretraining's own heads.
TRAINING = ("hidden_dropout_prob", "attention_probs_dropout_prob", "gradient_checkpointing", "directionality")
POOLER = tuple(
    f"pooler_{part}" for part in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
)


def read(keys: Keys) -> DecoderConfig:
    """Scores come from the first token, through the pooler."""
    config = read_encoder(keys)
    return replace(config, renamed=(*config.renamed, *HEAD), left_out=("cls", "position_ids"))


def read_encoder(keys: Keys, *, first_position: int = 0) -> DecoderConfig:
    """The part common to BERT and RoBERTa, whose positions begin at a later row of their table."""
    keys.skip(*TRAINING, *POOLER)
    keys.fixed("position_embedding_type", "absolute")
    keys.fixed("is_decoder", False)
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=True,
        mlp_bias=True,
        norm=NormConfig(keys.number("layer_norm_eps", 1e-12), "layer", bias=True),
        placement=BEHIND_SUMS,
        gated=False,
        default_tied=True,
        default_activation="gelu",
        rotated=(False,) * keys.integer("num_hidden_layers"),
    )
    if config.max_positions <= first_position:
        raise keys.error(
            "max_position_embeddings", config.max_positions, f"more than pad_token_id={first_position - 1}"
        )
    return replace(
        attend_both_ways(config),
        max_positions=config.max_positions - first_position,
        learned_positions=True,
        first_position=first_position,
        stored_types=keys.integer("type_vocab_size", 2),
        classifier=classify(config.hidden_size),
        renamed=list_renamed(len(config.layers)),
    )


def attend_both_ways(config: DecoderConfig) -> DecoderConfig:
    return config.change_attentions(lambda _, it: replace(it, causal=False))


def classify(
    hidden: int,
    *,
    pooling: Pooling = "first",
    bias: bool = True,
    activation: Activation | Literal["tanh"] = "tanh",
    normed: bool = False,
) -> EncoderConfig:
    """A dense layer with an activation behind the pooling, and a score of the result."""
    dense = DenseConfig(hidden, hidden, bias, activation, normed)
    return EncoderConfig(result="scores", pooling=pooling, width=1, dense=(dense,), score_bias=True)


def list_renamed(
    layers: int, stack: str = "model.encoder.layer", behind: str = "output.LayerNorm"
) -> tuple[tuple[str, str], ...]:
    """Names of BERT's modules; the norm behind a layer (``behind``) is the next one's first, or the model's last."""
    tables = {"word": "tokens", "position": "positions", "token_type": "types"}
    nexts = [*(f"model.layers.{index}.input_layernorm" for index in range(1, layers)), "model.norm"]
    return (
        *((f"model.embeddings.{part}_embeddings", f"model.embed_{name}") for part, name in tables.items()),
        *(("model.embeddings.LayerNorm", "model.layers.0.input_layernorm"), (stack, "model.layers")),
        *((f"{stack}.{index}.{behind}", name) for index, name in enumerate(nexts)),
        *LAYER,
    )
