"""Beam search, which knows nothing of caches and sessions, and the comparison of finished outputs."""
