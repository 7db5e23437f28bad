"""Read a decoder's config and weights from checkpoints."""
