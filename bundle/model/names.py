"""The names of modules that every decoder has, by llmc's own names."""

# Modules that every decoder has, by llmc's own names.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

# Of those that add a learned vector to each position's embedding.
POSITIONS = "model.embed_positions"

# Of those that give every layer an input of its own, from a row of the token.
PER_LAYER = "model.embed_tokens_per_layer"

PER_LAYER_PROJECTION = "model.per_layer_model_projection"

# What recipes call :attr:`Geometry.sensitive`.
SENSITIVE = "sensitive"
