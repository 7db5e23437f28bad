"""Flags of the library's compiler that keep it from known mistakes, by GPU and by the library's version.

Not run on such a GPU: the table is what NVIDIA's own TensorRT Edge-LLM sets, and what its users reported. When the
compiler reads them is documented nowhere; Edge-LLM sets them after it has loaded the library and before it makes a
builder, and leaves them until the engine is serialized, and so does llmc.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmc.bundle import version

# An environment variable of the library's compiler (Myelin).
VARIABLE = "__LUNOWUD"
# Thor's compute capability since CUDA 13, and before: by CUDA's documents, no JetPack for Thor has CUDA 12.
THOR = ("11.0", "10.1")


@dataclass(frozen=True)
class Rule:
    """Flags for a GPU.

    Attributes:
        gpus: compute capabilities.
        since, before: versions of TensorRT, the second one excluded; None has no end.
        flags: as the compiler takes them.
        source: where the mistake is described.
    """

    gpus: tuple[str, ...]
    since: tuple[int, int]
    before: tuple[int, int] | None
    flags: str
    source: str


EDGE = "https://github.com/NVIDIA/TensorRT-Edge-LLM"
RULES = (
    Rule(THOR, (10, 13), (10, 15), "-peep:match_dual_gemm=off", f"{EDGE}, its builders"),
    Rule(THOR, (11, 0), None, "-peep:match_dual_gemm=off", f"{EDGE}, its builder in Python, from 10.0 on"),
    Rule(
        THOR,
        (10, 15),
        None,
        "-mlir:autotune:num_threads=1 -mlir:collective:fp4=off -cask_fusion:async_policy=1",
        f"{EDGE}, its builders",
    ),
    # Products that share an input are merged wrongly for a batch of one, as every engine's prefill has: fluent text
    # that is wrong.
    Rule(THOR, (10, 13), None, "-peep:fc_h_fusion=off", f"{EDGE}/issues/151 and /105"),
)


def compiler_flags(engine_version: str, capability: str) -> str:
    """The flags for a version of TensorRT and a GPU's compute capability; mostly none."""
    found, here = version(engine_version)[:2], (rule for rule in RULES if capability in rule.gpus)
    return " ".join(rule.flags for rule in here if rule.since <= found and (not rule.before or found < rule.before))


@contextmanager
def compiled_with(flags: str) -> Iterator[None]:
    """Let builders that are made meanwhile take ``flags``, behind those that the environment has already."""
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
