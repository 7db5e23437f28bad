"""From logits to the next token, on the host, per request.

The steps run in the order of :mod:`llmc.runtime.sampling.processors`. Three promises shape the code:

* *Exact.* No step is approximated. Arithmetic is float32 over the vocabulary, with sums carried on in float64: a
  token's probability is right to about 1e-5 of itself, and only a token whose distance from the edge of the nucleus is
  below about 1e-6 of the total mass may fall on the other side of it. Tokens equally probable, to what float32 can
  tell, stay or go together.
* *Reproducible.* Randomness is a function of (seed, position, draw), not a stream, so a request's tokens do not depend
  on the batch it shares nor on how its steps are grouped. (Other CPUs and numpy versions round otherwise.)
* *Fast.* Sorting 150,000 logits takes 10 ms. Top-k needs a sort of a few candidates only, top-p none at all: see
  :class:`RandomSampler`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.sampling.candidates import suffice
    from llmc.runtime.sampling.draws import uniform
    from llmc.runtime.sampling.logprobs import TokenLogprobs, prompt_logprobs
    from llmc.runtime.sampling.masses import Logits
    from llmc.runtime.sampling.params import STEPS, SamplingParams
    from llmc.runtime.sampling.processors import Guide, Processor, SamplingContext, build_processors
    from llmc.runtime.sampling.samplers import Choice, GreedySampler, RandomSampler, Sampler, make_sampler

__all__ = [
    "STEPS",
    "Choice",
    "GreedySampler",
    "Guide",
    "Logits",
    "Processor",
    "RandomSampler",
    "Sampler",
    "SamplingContext",
    "SamplingParams",
    "TokenLogprobs",
    "build_processors",
    "make_sampler",
    "prompt_logprobs",
    "suffice",
    "uniform",
]
# Loaded on use: the command line reads the parameters' statements without numpy.
_HOMES = ("params", "candidates", "draws", "logprobs", "masses", "processors", "samplers")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
