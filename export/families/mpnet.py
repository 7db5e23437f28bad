"""MPNet: RoBERTa without types of tokens, with a bias of attention by the distance of two tokens, for all layers."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.bert import read_encoder
from llmc.export.families.roberta import HEAD
from llmc.export.keys import Keys

RENAMED = (
    ("model.encoder.relative_attention_bias", "model.distance_bias"),
    *((f"attention.attn.{part}", f"self_attn.{part}_proj") for part in "qkvo"),
    ("attention.LayerNorm", "post_attention_layernorm"),
)


def read(keys: Keys) -> DecoderConfig:
    """Padding is token 1 in transformers, whatever ``pad_token_id`` says."""
    keys.fixed("relative_attention_num_buckets", 32, ", the number in transformers whatever the key says")
    config = read_encoder(keys, first_position=2)
    return replace(
        config,
        stored_types=0,
        distance_ranges=True,
        renamed=(*config.renamed, *RENAMED, *HEAD),
        left_out=("pooler", "lm_head", "position_ids"),
    )
