"""Build a bundle on first use: a source that is none is built once, into the cache."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from llmc.bundle import BUNDLE_MANIFEST, CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_FILES, Geometry
from llmc.errors import LlmcError, MissingExtraError, ResourceError, require
from llmc.export import require_packages
from llmc.origin import copy_own
from llmc.publish import work_folder
from llmc.runtime.bench.phases import Phase, export_plan, refusal
from llmc.runtime.kv.budget import usable_memory
from llmc.runtime.text.trial import try_tokenizer
from llmc.sources import Kind, Located, Progress, locate, silent
from llmc.sources.shelf import lock, note_use, place_of, remove_leftovers, remove_older

if TYPE_CHECKING:
    from llmc.export.sources.checkpoint import Checkpoint
    from llmc.optimize.build import BuildReport
    from llmc.optimize.recipe import BuildRequest

log = logging.getLogger(__name__)
MB = 1_000_000


def find_bundle(
    name: str | Path,
    *,
    offline: bool | None = None,
    progress: Progress = silent,
    say: Callable[[str], object] = log.warning,
) -> Path:
    """Find the bundle of a source; build it if the cache has none.

    Integers of a quantized checkpoint or a GGUF file are kept, other weights become int8 without calibration. The
    bundle is used again as long as the source's files, llmc's version and the CPU's kind stay the same; its successor
    replaces it. Of several processes one builds, and the others wait for it.

    Args:
        name: what :func:`llmc.sources.locate` takes.
        offline: True uses no network; default: ``HF_HUB_OFFLINE``.
        progress: called with each step and the fraction of it that is done.
        say: called with a sentence before a build and after it.

    Raises:
        UsageError: there is nothing of that name, or the cache cannot be written.
        MissingExtraError: a package that a build needs is missing.
        ResourceError: memory or disk do not suffice.
        CheckpointError, BuildError: the source cannot be exported or built.
    """
    source = locate(name, offline=offline, progress=progress)
    if source.kind is Kind.BUNDLE:
        return source.path
    place = place_of(source)
    while not (place / BUNDLE_MANIFEST).exists():
        with lock(place, lambda: say(f"another process is building {source.name}: waiting for it")) as is_ours:
            if is_ours and not (place / BUNDLE_MANIFEST).exists():
                _build(source, place, progress, say)
    note_use(place)
    return place


def _build(source: Located, place: Path, progress: Progress, say: Callable[[str], object]) -> None:
    start = time.perf_counter()
    try:
        _require(source.kind)
        from llmc.optimize.build import build
        from llmc.optimize.recipe import BuildRequest
    except MissingExtraError as error:
        command = f"llmc build {shlex.quote(source.name)} -o BUNDLE"
        raise MissingExtraError(
            f"{source.name} has to be built before it runs, and {error.problem}",
            f"or build it on another machine ({command}) and copy it here (rsync -a BUNDLE THIS_MACHINE:)",
        ) from error
    remove_leftovers()
    say(f"building {source.name} for this machine, once")
    request = BuildRequest(source.path, output=place)
    with open_export(source, request, progress) as folder:
        report = build(replace(request, source=folder), progress)
    remove_older(place)
    say(_describe(report, time.perf_counter() - start))


def _describe(report: "BuildReport", seconds: float) -> str:
    precision = report.manifest.recipe.precision
    kept = precision == "source"
    how = "with its weights as they are" if kept else f"{precision} without calibration"
    better = "" if kept else "; llmc build makes a better one"
    return f"built {how} in {seconds:.0f} s, {report.size / MB:,.0f} MB: {report.output}{better}"


def _require(kind: Kind) -> None:
    """Raise MissingExtraError if a package that building a source of this kind needs is missing."""
    if kind is Kind.EXPORT:
        require("onnx_ir", "build")
    else:
        require_packages()


@contextmanager
def open_export(source: Located, request: "BuildRequest", progress: Progress) -> Iterator[Path]:
    """The export of a source: itself, or one that exists as long as the block runs, near the request's output.

    Raises:
        UsageError: the request does not suit the model.
        ResourceError: memory or disk do not suffice.
    """
    if source.kind is Kind.EXPORT:
        yield source.path
        return
    from llmc.export import export
    from llmc.optimize.build import check_room

    if checked := check_export(source.path, memory=request.memory):
        check_room(request.filled(), *checked)
    with work_folder(request.output) as folder:
        yield export(source.path, folder / source.path.resolve().name.removesuffix(".gguf"), progress=progress).output


def check_export(path: Path, text_only: bool = False, memory: int | None = None) -> tuple[Geometry, int] | None:
    """Refuse to export if memory does not suffice, or a tokenizer that does not work. Return the model's geometry and
    the bytes of its tokenizer; None for a broken checkpoint, which the exporter reports."""
    from llmc.export.sources.checkpoint import read_checkpoint

    try:
        checkpoint = read_checkpoint(path, text_only=text_only)
    except LlmcError:
        return None
    with open_tokenizer(checkpoint) as folder:
        try_tokenizer(folder)
        tokenizer_bytes = (folder / TOKENIZER_FILE).stat().st_size
    plan = export_plan(checkpoint.geometry, tokenizer_bytes)
    if problem := refusal([Phase(plan, plan.verdict(usable_memory(0, memory)))]):
        raise ResourceError(problem, path=path)
    return checkpoint.geometry, tokenizer_bytes


@contextmanager
def open_tokenizer(checkpoint: "Checkpoint") -> Iterator[Path]:
    """A folder with the tokenizer's files as an export writes them: the checkpoint's own, or one that exists as long as
    the block runs."""
    if not checkpoint.texts:
        yield checkpoint.folder
        return
    with TemporaryDirectory() as name:
        if CONFIG_FILE not in checkpoint.texts:
            copy_own(checkpoint.folder, set(TOKENIZER_FILES) - checkpoint.texts.keys(), Path(name))
        for file, text in checkpoint.texts.items():
            (Path(name) / file).write_text(text, encoding="utf-8")
        yield Path(name)
