"""Diagnose the machine: which targets can run and build here, and whether a bundle runs here."""
