"""Torch modules that decoders are made of, named like Hugging Face's.

Weights keep the dtype in which the checkpoint stores them; arithmetic is float32.
"""
