"""Lowering for ONNX Runtime: what its CPU and CUDA providers share, and in ``cpu_`` and ``cuda_`` what is one's own."""
