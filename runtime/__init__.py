"""Load a bundle and generate text: ``load(bundle).generate(prompt, max_tokens=64, temperature=0).text``.

Needs numpy, tokenizers, jinja2 and the engine of the bundle's target; never torch or onnx. Names are imported on use,
so that the command line reads the statements of parameters without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.api.chat import ChatHandle, ChatResult, Message, MessageDelta, ToolCall, ToolCallDelta
    from llmc.runtime.api.handle import Handle
    from llmc.runtime.api.options import Determinism, EngineOptions
    from llmc.runtime.api.request import Request
    from llmc.runtime.api.results import Delta, GenerationResult, Output, Timings, Usage
    from llmc.runtime.embedder import Embedder
    from llmc.runtime.engine.engine import Engine
    from llmc.runtime.generator import Generator, Model
    from llmc.runtime.loaded import LoadedBundle
    from llmc.runtime.loading import load
    from llmc.runtime.sampling.params import SamplingParams

__all__ = [
    "ChatHandle",
    "ChatResult",
    "Delta",
    "Determinism",
    "Embedder",
    "Engine",
    "EngineOptions",
    "GenerationResult",
    "Generator",
    "Handle",
    "LoadedBundle",
    "Message",
    "MessageDelta",
    "Model",
    "Output",
    "Request",
    "SamplingParams",
    "Timings",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "load",
]
_HOMES = {
    "api.chat": {"ChatHandle", "ChatResult", "Message", "MessageDelta", "ToolCall", "ToolCallDelta"},
    "api.handle": {"Handle"},
    "api.options": {"Determinism", "EngineOptions"},
    "api.request": {"Request"},
    "api.results": {"Delta", "GenerationResult", "Output", "Timings", "Usage"},
    "engine.engine": {"Engine"},
    "embedder": {"Embedder"},
    "generator": {"Generator", "Model"},
    "loading": {"load"},
    "loaded": {"LoadedBundle"},
    "sampling.params": {"SamplingParams"},
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
