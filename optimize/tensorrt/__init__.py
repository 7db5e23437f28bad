"""From a lowered graph to a TensorRT engine: the library is injected, so that every version takes one path."""
