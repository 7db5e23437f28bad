"""Images: the keys and the processor of a checkpoint that sees, and the shape and the torch modules of its tower.

:mod:`llmc.export.tower` makes the tower's graph.
"""
