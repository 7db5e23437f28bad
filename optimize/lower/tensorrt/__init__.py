"""The portable decoder for TensorRT: its own cache updates, attention and norms."""
