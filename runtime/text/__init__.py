"""Text to token ids and back: the tokenizer, the detokenizer of a stream, and the checkpoint's chat template."""
