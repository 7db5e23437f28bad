"""Audio: the keys and the feature extractor of a checkpoint that hears, and the shape and torch modules of its tower.

:mod:`llmc.export.tower` makes the tower's graph.
"""
