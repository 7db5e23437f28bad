"""Lowering for ONNX Runtime on CPUs: the operators of its hot path, weights in the layouts its kernels stream."""
