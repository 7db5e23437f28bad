"""Calibration: the text, what it shows of activations, what is decided by that, and the store of the decisions."""
