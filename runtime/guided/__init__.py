"""Guided decoding: output that follows a JSON schema, a regular expression, a grammar or a list of choices.

A grammar becomes a mask over the vocabulary at every step (https://github.com/guidance-ai/llguidance; the approach of
Willard and Louf, Efficient Guided Generation for Large Language Models, https://arxiv.org/abs/2307.09702). It fails
closed: what cannot be enforced is refused, and a guide that cannot go on raises. The library alone would not do: after
an error its masks allow the end of the sequence, and unknown keywords of a schema go unnoticed.

What is constrained is the text of the tokens. Where only one text can come next, only the tokens that the tokenizer
would make of it are allowed; elsewhere, every token whose text fits. A tokenizer whose decoder drops a space at the
start of a text (Llama 2) also drops it from guided output. An output cut off by ``max_tokens`` is the beginning of one
that follows the grammar, and a grammar that recurses without an end is followed until then.
"""
