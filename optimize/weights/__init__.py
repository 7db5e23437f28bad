"""Weights: read from the checkpoint, decided by calibration, written into a bundle."""
