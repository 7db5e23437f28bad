"""The names of modules that every decoder has, by llmc's own names."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

# Tables of learned positions, of the types of tokens, and of biases by the distance of two tokens.
POSITIONS, TYPES, DISTANCES = "model.embed_positions", "model.embed_types", "model.distance_bias"

# The norm of embeddings, in models that have one before the first layer.
EMBEDDED_NORM = "model.embed_norm"

# Table of an input for every layer, and the linear that adds to it.
PER_LAYER, PER_LAYER_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"

# Recipes' name of :attr:`Geometry.sensitive`.
SENSITIVE = "sensitive"

# The output of a graph that gives hidden states.
HIDDEN = "hidden"
