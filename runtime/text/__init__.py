"""Text to token ids and back: the tokenizer, the streaming detokenizer and the checkpoint's chat template."""
