"""Portable decoder -> bundle: lower, quantize, write, run, judge, publish. Needs the extra ``build``."""

from llmc.errors import require

require("onnx_ir", "build")
