"""Calibration: its text, statistics of activations, the decisions made from them, and their store."""
