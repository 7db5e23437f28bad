"""Load a bundle and generate text: ``load(bundle).generate(prompt, max_tokens=64, temperature=0).text``.

Needs numpy, tokenizers, jinja2 and the engine of the bundle's target; never torch or onnx. What is imported from here
is loaded on use, so that the command line reads the parameters' statements without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_HOMES = ("sampling.params", "api.handle", "api.options", "api.request", "api.results", "engine.engine", "model")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
