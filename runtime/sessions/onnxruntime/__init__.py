"""ONNX Runtime, on CPUs and on NVIDIA GPUs."""
