"""Judgement of what was built: quality beside the unquantized model's, where it is lost, and invariance of results."""
