"""Draft heads: the shape and the torch modules of their start and end. :mod:`llmc.export.sources.heads` reads them."""
