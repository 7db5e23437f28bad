"""Load a bundle and generate text: ``load(bundle).generate(prompt, max_tokens=64, temperature=0).text``.

Needs numpy, tokenizers, jinja2 and the engine of the bundle's target; never torch or onnx.
"""

from llmc.runtime.api.handle import Handle
from llmc.runtime.api.options import Determinism, EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta, GenerationResult, Output, Timings, Usage
from llmc.runtime.engine.engine import Engine
from llmc.runtime.model import Model, load
from llmc.runtime.sampling import SamplingParams

__all__ = [
    "Delta",
    "Determinism",
    "Engine",
    "EngineOptions",
    "GenerationResult",
    "Handle",
    "Model",
    "Output",
    "Request",
    "SamplingParams",
    "Timings",
    "Usage",
    "load",
]
