"""Judges a finished bundle: quality compared with the unquantized model, loss by layer, and invariance of results."""
