"""Requests, their handles and results, and the options of an engine: the part that clients see."""

DRAFT_WORDS = ("auto", "lookup", "none")
"""Values of ``draft`` that are no folder."""
