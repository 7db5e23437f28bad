"""Where a decoder's config and weights come from."""
