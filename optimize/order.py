"""A resolved request to build: all that its steps need to know."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.bundle import EngineConfig, ExportManifest, Limits, Recipe, read_export, version
from llmc.errors import UsageError, printable
from llmc.optimize import recipe as recipes
from llmc.optimize.calibrate.request import CalibrationRequest
from llmc.optimize.lower.onnxruntime import folded_heads
from llmc.optimize.progress import Progress
from llmc.optimize.recipe.engine import EngineRequest, check_heads
from llmc.optimize.targets import Capabilities, capabilities_for
from llmc.origin import check_unchanged
from llmc.publish import refuse_bytes
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.runtime.sessions.tensorrt.library import lists_gpu

if TYPE_CHECKING:
    from llmc.optimize.tensorrt.spec import EngineSpec


@dataclass(frozen=True)
class Order:
    """Model, target and choices of a build; ``hidden`` lists after how many layers a draft head reads hidden states."""

    source: Path
    export: ExportManifest
    target: Capabilities
    recipe: Recipe
    limits: Limits
    calibration: CalibrationRequest | None
    text: Path | None
    judged: bool
    progress: Progress
    engine: "EngineSpec | None" = None
    hidden: tuple[int, ...] = ()

    @property
    def passes(self) -> str:
        return f"{self.target.name}-encoder" if self.export.geometry.encoder else self.target.name

    @property
    def ragged_rows(self) -> bool:
        """True if each phase has a graph of its own, and the installed engine takes rows of different lengths."""
        return self.recipe.phases == "split" and self._takes_lengths

    @property
    def overwritten(self) -> int:
        """Positions behind a step's token that folded heads overwrite, 0 where heads are not folded.

        One graph for both phases folds heads over a float16 cache alone: with a float32 cache it runs on older engines.
        """
        folds = self.ragged_rows or (self.recipe.cache == "float16" and self._takes_lengths)
        return folded_heads.count_overwritten(self.export.geometry.attentions) if folds else 0

    @property
    def _takes_lengths(self) -> bool:
        """True if the installed engine's attention takes the length of each row, and the model's cache holds floats."""
        since, geometry = self.target.ragged_rows, self.export.geometry
        if not since or geometry.encoder or geometry.head or self.recipe.cache_type() == "int8":
            return False
        return version(import_onnxruntime(self.target.caches[self.recipe.cache]).__version__) >= version(since)

    @property
    def minimum(self) -> str:
        cache, geometry = self.target.caches[self.recipe.cache], self.export.geometry
        # The version in which kernels of recurrences and experts were measured; older ones lack some.
        newest = self.ragged_rows or self.overwritten or geometry.recurrents or geometry.mixtures
        return max(cache, self.target.ragged_rows, key=version) if newest else cache

    def with_engine(self, asked: EngineRequest | None) -> "Order":
        """The order with its engine's properties, if the target has an engine."""
        if not self.target.makes_engine:
            return self
        from llmc.optimize.tensorrt.spec import resolve_engine

        geometry = self.export.geometry
        check_heads(geometry)
        spec = resolve_engine(self.target, geometry, self.recipe, self.limits, asked or EngineRequest())
        return replace(self, engine=spec)


def take_order(
    source: Path,
    target: str,
    asked: recipes.Request,
    recipe: Path | recipes.Request | None,
    *,
    head: Path | None = None,
    calibration: CalibrationRequest | None,
    text: Path | None,
    progress: Progress,
) -> tuple[Order, EngineRequest | None]:
    """Resolve a request: options override the recipe. Returns the order, and the wishes for its engine."""
    refuse_bytes(source)
    export = read_export(source)
    check_unchanged(source, export)
    geometry = export.geometry
    written = recipes.read_recipe(recipe) if isinstance(recipe, Path) else recipe
    asked = asked.over(written) if written is not None else asked
    abilities = capabilities_for(target, asked.gpu_memory)
    name = printable(recipe.stem) if isinstance(recipe, Path) else "default"
    able = calibration is not None and calibration.is_possible
    chosen, limits = recipes.settle(asked, geometry, abilities, name, able)
    wish = "text" if text is not None else calibration and calibration.asked
    if wish and (geometry.encoder or geometry.head):
        raise UsageError(wish, "is for models that generate, and this one does not", "leave it out")
    if geometry.head and limits.adapters:
        raise UsageError("adapters", "is given, and a draft head reads none", "leave it out")
    judged = text is not None or bool(chosen.budget)
    hidden = () if head is None else _list_borders(export, abilities, head)
    order = Order(source, export, abilities, chosen, limits, calibration, text, judged, progress, hidden=hidden)
    return order, asked.engine


def _list_borders(export: ExportManifest, target: Capabilities, folder: Path) -> tuple[int, ...]:
    """The borders of the hidden states that the draft head reads whose export ``folder`` is."""
    geometry, other = export.geometry, read_export(folder).geometry
    head, least = other.head, 1
    if geometry.shares:  # its last layers compute the rows of logits alone, which is enough for heads without a cache
        least = geometry.layers if other.borrows else geometry.layers + 1
    barred = target.name != "cpu" or geometry.head or geometry.encoder or (head and min(head.borders) < least)
    if barred or not head or head.width != geometry.hidden_size or max(head.borders) > geometry.layers:
        reads = f"reads {head.width} values after {max(head.borders)} layers" if head else "is no draft head"
        raise UsageError(
            "head",
            f"{folder} {reads}, expected the export of a head for "
            f"this {geometry.model_type} of {geometry.layers} layers "
            f"of {geometry.hidden_size} values, which must generate, and on cpu (the target is {target.name})",
        )
    return head.borders


def check_places(source: Path, output: Path) -> None:
    """Raise UsageError if the bundle would overwrite its source."""
    place = Path(os.path.realpath(output))  # unlike resolve, accepts loops of links
    if place == Path(os.path.realpath(source)):
        raise UsageError("output", f"{output} is the export itself", "choose another output folder")


def runs_here(spec: "EngineSpec | None", plan: EngineConfig) -> bool:
    """True if there is an engine and a GPU that it and its library support."""
    if spec is None or spec.gpu is None or not plan.fits_gpu(spec.gpu.compute_capability):
        return False
    return lists_gpu(spec.library, spec.gpu.compute_capability)
