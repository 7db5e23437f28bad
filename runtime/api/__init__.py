"""Requests, their handles and results, and engine options: the types that clients use."""

DRAFT_WORDS = ("auto", "lookup", "none")
"""Values of ``draft`` that are not folders."""
