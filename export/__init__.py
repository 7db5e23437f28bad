"""Checkpoint -> portable graph: a Hugging Face folder or GGUF in, ``decoder.onnx`` with weights by reference out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmc.errors import UsageError, require
from llmc.export.report import ExportReport

__all__ = ["ExportReport", "export"]


def require_packages() -> None:
    """Raise an error if a package that an export needs is missing."""
    for module in ("torch", "onnx", "onnx_ir", "onnxscript"):
        require(module, "export")


def export(
    checkpoint: Path,
    output: Path,
    *,
    adapters: Sequence[tuple[Path, float]] = (),
    text_only: bool = False,
    of: Path | None = None,
    copy: bool = False,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ExportReport:
    """Export a local Hugging Face checkpoint, or a model in GGUF files of which ``checkpoint`` is the first, into the
    folder ``output``. Weights that need no conversion are neither read nor copied: the export has hard links to their
    files, or with ``copy`` the files themselves.

    ``adapters`` are PEFT folders, each with a factor, which are added to the weights in this order. ``text_only``
    exports only the text part. With ``of``, the checkpoint of a model, its draft head is
    exported: ``checkpoint`` is the head's folder, or the same one. ``progress`` gets each step in a few words. An
    existing ``output`` is replaced only with ``force``.

    Raises:
        CheckpointError: the checkpoint is broken, incomplete or not supported.
        UsageError: ``output`` exists, or cannot be written; adapters for a draft head.
        ResourceError: the disk is full.
        MissingExtraError: torch, onnx or onnx-ir is not installed.
    """
    start = time.perf_counter()
    require_packages()
    if of is not None and adapters:
        raise UsageError("adapters", "is given, and a draft head takes none", "leave one of them out")
    from llmc.export.sources.checkpoint import read_checkpoint
    from llmc.export.sources.heads import read_head
    from llmc.export.writer import write_export  # it imports torch

    folder = Path(checkpoint)
    read = partial(read_head, folder, of) if of else partial(read_checkpoint, folder, adapters, text_only=text_only)
    report = write_export(read, Path(output), copy, force, progress or (lambda step: None))
    return replace(report, seconds=time.perf_counter() - start)
