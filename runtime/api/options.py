"""Options of an engine."""

import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from llmc.bundle import Invariance, Manifest
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.errors import UsageError
from llmc.runtime.sampling.ranges import Range, integer, one_of, optional
from llmc.runtime.tools.formats import FORMATS

# Decode steps between two chunks of one prompt while other requests stream. One step in 29 is slow then, so the 95th
# percentile of the time between tokens does not include the chunks; few large chunks also feed the prompt faster than
# many small ones, since a chunk of one token costs almost as much as one of 32.
DECODE_STEPS_PER_CHUNK = 28


class Determinism(str, Enum):
    """The things that a request's tokens may depend on, besides its prompt, its parameters and its seed.

    FAST: on the requests that share its batches, on prefixes cached while tokens were generated, and on speculation. A
        request alone, without speculation, gives the same tokens every time. The fastest kernels run.
    BATCH: on nothing; speculation is refused. Costs up to a fifth of a lone request's speed (README, "Determinism").
    STRICT: on nothing, with speculation or without. Requests run one by one, so that batches gain nothing.
    """

    FAST = "fast"
    BATCH = "batch"
    STRICT = "strict"


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of :func:`llmc.runtime.load` that concern the engine.
    Raises UsageError: a value is out of its range."""

    # requests that run at once; None: as many as the bundle was built for, which is also the most
    max_batch: int | None = None
    max_queue: int = 256  # requests that may wait; one more is refused
    determinism: Determinism = Determinism.FAST  # what tokens may depend on
    # decode steps between two chunks of a long prompt while other requests stream; 0 feeds prompts as fast as possible
    decode_steps_per_chunk: int = DECODE_STEPS_PER_CHUNK
    # memory of the prefix cache; 0: no cache; None: an eighth of the available memory, at most 256 MB
    prefix_cache_bytes: int | None = None
    prefix_cache_folder: str | Path | None = None  # folder that keeps prefixes across restarts; None: no folder
    prefix_cache_disk_bytes: int = 4 << 30  # disk space of that folder
    # speculative decoding: ``lookup``, the folder of a draft bundle, ``none``, or ``auto``: ``lookup`` if it changes no
    # bit of an answer
    draft: str | Path | None = None
    # new tokens of a request without ``max_tokens``, at most what the context has room for
    default_max_tokens: int = 256
    tool_format: str | None = None  # format of tool calls; None: the format that the chat template teaches

    def __post_init__(self) -> None:
        for name, values in _RANGES.items():
            values.check(name, getattr(self, name))
        object.__setattr__(self, "determinism", Determinism(self.determinism))
        if self.prefix_cache_folder is not None and self.prefix_cache_bytes == 0:
            raise UsageError("prefix_cache_folder", "needs prefix_cache_bytes above 0: prefixes pass through memory")
        if self.draft == "none":
            object.__setattr__(self, "draft", None)
        if self.draft not in (None, "auto") and self.determinism is Determinism.BATCH:
            raise UsageError(
                "draft",
                "is set and determinism is 'batch', which cannot promise the same tokens with speculation as without",
                "use 'strict', or 'fast'",
            )


_PATH = optional(
    Range("path", "a path", lambda path: isinstance(path, str | os.PathLike) and str(path) not in ("", "."), "a path")
)
_RANGES = {
    "determinism": one_of(*(level.value for level in Determinism)),
    "max_batch": optional(integer(1, 1024)),
    "max_queue": integer(1, 1_000_000),
    "decode_steps_per_chunk": integer(0, 1_000_000),
    "prefix_cache_bytes": optional(integer(0, 1 << 50, most="2**50")),
    "prefix_cache_folder": _PATH,
    "prefix_cache_disk_bytes": integer(0, 1 << 50, most="2**50"),
    "draft": _PATH,
    "default_max_tokens": integer(1, 1 << 31, most="2**31"),
    "tool_format": replace(optional(one_of(*FORMATS)), short="name of a format"),
}


def check_level(manifest: Manifest, level: Determinism) -> None:
    """Refuse a level of determinism that the bundle's arithmetic did not keep when it was built."""
    if level is Determinism.FAST or takes_whole_texts(manifest.geometry):
        return
    decode = manifest.graphs["decode"].invariance
    prefill = manifest.graphs["prefill"].invariance
    kept = {"chunks of prompts": prefill.tokens > 0}
    if level is Determinism.BATCH:
        kept["rows of a batch"] = decode.rows > 0 or manifest.limits.max_batch == 1
    else:
        kept |= {"tokens of a call": decode.tokens > 0, "outputs of a call": decode.outputs > 0}
    missing = [what for what, holds in kept.items() if not holds]
    if missing and manifest.geometry.mixtures and decode == Invariance():
        raise UsageError(
            "determinism",
            f"is {level.value!r}, but this model has experts: the rows of a call that choose the same expert are "
            "multiplied together, and rounded by their number",
            "use determinism 'fast'",
        )
    if missing:
        raise UsageError(
            "determinism",
            f"is {level.value!r}, but in the build results depended on the number of {', '.join(missing)}",
            "build the bundle on this kind of machine, or with --fp32, or use determinism 'fast'",
        )


def row_limit(manifest: Manifest, options: EngineOptions) -> int:
    """Rows that may run at once, also if rows run in pairs; UsageError for more than the bundle was built for."""
    check_level(manifest, options.determinism)
    most = manifest.limits.max_batch
    rows = most if options.max_batch is None else options.max_batch
    if rows > most:
        raise UsageError("max_batch", f"is {rows}, the bundle was built for {most}", "build with a larger --max-batch")
    return rows - rows % 2 if in_pairs(manifest, options.determinism) and rows > 1 else rows


def in_pairs(manifest: Manifest, level: Determinism) -> bool:
    """True if batches must have an even number of rows."""
    return level is Determinism.BATCH and manifest.graphs["decode"].invariance.rows == 2
