"""llmc turns a Hugging Face decoder checkpoint into a self-contained, verified bundle and runs it."""

__version__ = "0.1.0"
