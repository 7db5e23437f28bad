"""Tool calls and reasoning: the formats of model families, read from text and enforced as grammars."""
