"""Images in prompts: decoded within bounds, cut into tiles, and turned into rows of embeddings by a tower."""
