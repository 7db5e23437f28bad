"""Portable decoder -> bundle: lower, quantize, write, run, judge, publish. Needs the extra ``export``."""

from llmc.errors import require

require("onnx_ir", "export")
