"""Measure speed on a machine, for one request and under load."""
