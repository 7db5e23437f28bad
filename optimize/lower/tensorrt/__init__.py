"""The portable decoder for TensorRT: native cache updates and attention, or basic operators for older versions."""
