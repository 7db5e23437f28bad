"""Diffusion language models: which masks become tokens, step by step and block by block."""
