"""Sources of a decoder's config and weights."""
