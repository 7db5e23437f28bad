"""Load a bundle and generate text: ``load(bundle).generate(prompt, max_tokens=64, temperature=0).text``.

Needs numpy, tokenizers, jinja2 and the engine of the bundle's target; never torch or onnx.
"""

from llmc.runtime.model import Model, Stream, load
from llmc.runtime.results import GenerationResult, Timings, Usage
from llmc.runtime.sampling import SamplingParams

__all__ = ["GenerationResult", "Model", "SamplingParams", "Stream", "Timings", "Usage", "load"]
