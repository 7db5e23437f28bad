"""RoBERTa and XLM-R: BERT with positions that begin behind the padding token's, and another head for scores."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.bert import read_encoder
from llmc.export.keys import Keys

HEAD = (("classifier.dense", "dense.0"), ("classifier.out_proj", "score.0"))


def read(keys: Keys) -> DecoderConfig:
    """The pooler is not used for scores."""
    config = read_encoder(keys, first_position=keys.integer("pad_token_id", 1) + 1)
    return replace(config, renamed=(*config.renamed, *HEAD), left_out=("pooler", "lm_head", "position_ids"))
