"""The portable decoder for ONNX Runtime on NVIDIA GPUs."""
