"""Decoding over several cache rows at once, in lockstep: beam search.

A :class:`Strategy` is told the logits of every row and answers which rows go on with which tokens; it knows nothing of
caches and sessions. :mod:`~llmc.runtime.search.consensus` compares outputs that are finished.
"""
