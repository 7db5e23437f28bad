"""The library's messages while it parses and builds: those that mean that the engine would be wrong, and the others.

Only the parser leaves out parts of a graph. What the builder calls unused or unsupported are kernels, formats and
platforms, and its work may have taken an hour: its warnings are kept, and fail nothing.
"""

import json
import re
from collections.abc import Sequence

from llmc.errors import BuildError, GpuError, LlmcError, ResourceError
from llmc.runtime.sessions.tensorrt.library import INFO, Message

# Said of healthy graphs: indices are int64 on purpose, and kernels that do not fit are passed over all the time.
HARMLESS = re.compile(r"Make sure (in|out)put \S+ has Int64 binding|\btactics?\b", re.IGNORECASE)
# The parser leaves out what it does not know, and says so in passing: results would be wrong, not the build. Flags and
# platforms may be unsupported or ignored as well, so these words count only beside a part of a graph.
UNUSED = re.compile(r"\bunused\b", re.IGNORECASE)
REFUSED = re.compile(r"\bunsupported\b|\bignored\b|\bnot supported\b", re.IGNORECASE)
PART = re.compile(r"\b(?:node|operator|layer|attribute|input|output|tensor)s?\b", re.IGNORECASE)
NO_DRIVER = re.compile(r"cudaError 35|CUDA_SUCCESS|CUDA initialization failure")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|FAILED_ALLOCATION|insufficient memory", re.IGNORECASE)
# Also said where there is no kernel whatever the workspace, as of attention by TensorRT 10.7 on Orin.
NO_WORKSPACE = re.compile(r"insufficient workspace|within workspace limit", re.IGNORECASE)
# Attention that must not be decomposed and for which no kernel fits (TensorRT-RTX 1.7.1, NvInfer.h of TensorRT 11).
NO_KERNEL = re.compile(r"not supported by a dedicated kernel", re.IGNORECASE)
NAMED_AT_MOST = 4


def list_dropped(messages: Sequence[Message]) -> list[str]:
    """Messages of the parser that say that something of the graph was left out."""
    return [
        text
        for text in (message.text for message in messages)
        if (UNUSED.search(text) or (REFUSED.search(text) and PART.search(text))) and not HARMLESS.search(text)
    ]


def remarks(messages: Sequence[Message]) -> tuple[str, ...]:
    texts = (it.text for it in messages if it.severity != INFO and not HARMLESS.search(it.text))
    return tuple(dict.fromkeys(texts))


def transcript(messages: Sequence[Message]) -> str:
    """All messages in the library's own words: a list in JSON of severities and texts, a line for each message."""
    lines = [json.dumps([message.severity, message.text]) for message in messages]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def lacks_fused_attention(messages: Sequence[Message]) -> bool:
    """True if a failed build had an attention without a kernel of its own, in some profile."""
    return any(NO_KERNEL.search(message.text) for message in messages)


def failure(what: str, messages: Sequence[Message], workspace: int | None = None) -> LlmcError:
    """The error for a build that the library gave up, by the messages that it logged.

    A build without a driver ends in the same errors of CUDA as one on a broken GPU, so they are told apart from what
    the graph is to blame for. ``workspace``: bytes that the builder was allowed; None for the library's own limit, all
    of the GPU's memory.
    """
    errors = list(dict.fromkeys(message.text.strip() for message in messages if message.is_error))
    if errors and not NO_DRIVER.search(errors[0]):
        errors = [error for error in errors if not NO_DRIVER.search(error)]  # its aftermath where there is no driver
    reason = "; ".join(errors[:NAMED_AT_MOST]) or "it said nothing"
    if workspace is not None and NO_WORKSPACE.search(reason):
        return ResourceError(
            f"{what} found no kernel within a workspace of {workspace} bytes: {reason}; allow more with workspace in "
            "the recipe's [engine] table, or ask for a smaller context, chunk or batch"
        )
    if OUT_OF_MEMORY.search(reason):
        return ResourceError(f"{what} ran out of memory: {reason}; ask for a smaller context, chunk or batch")
    if errors and NO_DRIVER.search(errors[0]):
        return GpuError(f"{what} needs a GPU and its driver: {reason}; build on a machine with the GPU")
    return BuildError(f"{what} failed: {reason}; try another precision (--fp16, --int4), and report this")
