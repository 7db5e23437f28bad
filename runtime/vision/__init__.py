"""Images in prompts: decode within bounds, cut into tiles, and compute embedding rows with the vision tower."""
