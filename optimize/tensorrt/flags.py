"""Flags of the library's compiler that keep it from known mistakes, by its version.

Not run on a GPU: they are what NVIDIA's own TensorRT Edge-LLM sets (https://github.com/NVIDIA/TensorRT-Edge-LLM), on
every GPU, and what its users reported (issues 151 and 105). When the compiler reads them is documented nowhere;
Edge-LLM sets them before it makes a builder, and leaves them until the engine is serialized, and so does llmc.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from llmc.bundle import version

# An environment variable of the library's compiler (Myelin).
VARIABLE = "__LUNOWUD"
FLAGS = (
    # Edge-LLM's builders, from 10.15 on, the oldest version that llmc takes.
    "-mlir:autotune:num_threads=1 -mlir:collective:fp4=off -cask_fusion:async_policy=1"
    # Products that share an input are merged wrongly for a batch of one, as every engine's prefill has: fluent text
    # that is wrong.
    " -peep:fc_h_fusion=off"
)
# From 11 on on Blackwell and Thor, and behind 11.0 everywhere.
DUAL_PRODUCTS, TILES = " -peep:match_dual_gemm=off", " -kgen:codegen:cuda_tile=0"
BLACKWELL = (10, 0)


def compiler_flags(engine_version: str, capability: str) -> str:
    """The flags for a version of TensorRT and a GPU's compute capability."""
    release = version(engine_version)[:2]
    dual = DUAL_PRODUCTS if release >= (11, 0) and version(capability) >= BLACKWELL else ""
    return FLAGS + dual + (TILES if release > (11, 0) else "")


@contextmanager
def use_flags(flags: str) -> Iterator[None]:
    """Append ``flags`` to those of the environment, for builders that are made within this context."""
    before = os.environ.get(VARIABLE)
    if flags:
        os.environ[VARIABLE] = f"{before} {flags}" if before else flags
    try:
        yield
    finally:
        if flags and before is None:
            os.environ.pop(VARIABLE, None)
        elif flags and before is not None:
            os.environ[VARIABLE] = before
