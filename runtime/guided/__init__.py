"""Guided decoding: output that follows a JSON schema, a regular expression, a grammar or a list of choices.

A grammar becomes a mask over the vocabulary at every step (https://github.com/guidance-ai/llguidance; the approach of
Willard and Louf, Efficient Guided Generation for Large Language Models, https://arxiv.org/abs/2307.09702). It fails
closed: a schema or grammar that cannot be enforced is refused, and a guide that fails raises. The library alone does
neither: after an error its masks allow the end of the sequence, and it ignores unknown keywords of a schema.

The text of the tokens is constrained. Where only one text can come next, only the tokenizer's own tokens for that text
are allowed; elsewhere, every token whose text fits. A tokenizer whose decoder drops a space at the start of a text
(Llama 2) also drops it from guided output. An output cut off by ``max_tokens`` is the beginning of a valid one; a
grammar that can recurse forever runs until then.
"""
