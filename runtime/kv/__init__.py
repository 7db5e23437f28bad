"""The KV store: what a model keeps of the tokens before, in which row, within which memory, and on disk."""
