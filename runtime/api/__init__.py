"""Requests, their handles and results, and the options of an engine: the part that clients see."""
