"""Beam search, which knows nothing of caches and sessions."""
