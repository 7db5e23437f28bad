"""Tool calls and reasoning: the formats in which model families write them, read from text and enforced as grammars."""
