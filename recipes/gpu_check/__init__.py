"""The parts of ``recipes/gpu_check.py``."""
