"""A resolved request to build: all that its steps need to know."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.bundle import EngineConfig, ExportManifest, Limits, Recipe, read_export, version
from llmc.bundle.model.kinds import allows
from llmc.errors import UsageError
from llmc.optimize.lower.context import QuantConfigs, quant_configs
from llmc.optimize.lower.onnxruntime import folded_heads
from llmc.optimize.progress import Progress, silent
from llmc.optimize.recipe import BuildRequest, settle
from llmc.optimize.recipe.engine import EngineRequest, check_heads
from llmc.optimize.targets import Capabilities, capabilities_for
from llmc.origin import check_unchanged
from llmc.publish import refuse_bytes
from llmc.runtime.host.machine import saturates
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.runtime.sessions.tensorrt.library import lists_gpu

if TYPE_CHECKING:
    from llmc.optimize.tensorrt.spec import EngineSpec


@dataclass(frozen=True)
class Order:
    """A build request with every choice made: the model, the target, and how its weights are compiled."""

    request: BuildRequest  # with what its recipe's file says
    export: ExportManifest
    target: Capabilities
    recipe: Recipe
    limits: Limits
    progress: Progress
    engine: "EngineSpec | None" = None
    hidden: tuple[int, ...] = ()  # borders of the hidden states that the graphs give to a draft head

    @property
    def source(self) -> Path:
        return self.request.source

    @cached_property
    def configs(self) -> dict[str, QuantConfigs]:
        """Storage of each graph's weights, by phase."""
        return quant_configs(self.recipe, self.export.geometry)

    @property
    def passes(self) -> str:
        geometry = self.export.geometry
        return self.target.name if geometry.generates else f"{self.target.name}-{geometry.role}"

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
        since, answers = self.target.ragged_rows, allows(self.export.geometry, "text")
        if not since or not answers or self.recipe.cache_type() == "int8":
            return False
        return version(import_onnxruntime(self.target.caches[self.recipe.cache]).__version__) >= version(since)

    @property
    def unsigned(self) -> bool:
        """True if the weights of integer products become uint8: the CPU here would add signed ones in 16 bits."""
        return self.target.name == "cpu" and self.recipe.activations != "none" and saturates()

    @property
    def minimum(self) -> str:
        cache, geometry = self.target.caches[self.recipe.cache], self.export.geometry
        # The version in which kernels of recurrences, experts and 2 bits were measured; older ones lack some.
        newest = self.ragged_rows or self.overwritten or geometry.recurrents or geometry.mixtures or geometry.two_bits
        return max(cache, self.target.ragged_rows, key=version) if newest else cache

    def with_engine(self) -> "Order":
        """This order with its engine's properties, if the target has an engine."""
        if not self.target.makes_engine:
            return self
        from llmc.optimize.tensorrt.spec import resolve_engine

        geometry = self.export.geometry
        check_heads(geometry)
        wishes = self.request.engine or EngineRequest()
        spec = resolve_engine(self.target, geometry, self.recipe, self.limits, wishes)
        return replace(self, engine=spec)


def take_order(request: BuildRequest, progress: Progress = silent) -> Order:
    """Make every choice that a request leaves open.

    Raises:
        UsageError: the request is out of range, contradicts itself, or does not go with the model.
        BundleError: the export is broken, or its weights changed.
    """
    refuse_bytes(request.source)
    export = read_export(request.source)
    check_unchanged(request.source, export)
    request = request.filled()
    abilities = capabilities_for(request.target, request.gpu_memory)
    recipe, limits = settle(request, export.geometry, abilities)
    hidden = () if request.draft_head is None else _list_borders(export, request.draft_head)
    return Order(request, export, abilities, recipe, limits, progress, hidden=hidden)


def _list_borders(export: ExportManifest, folder: Path) -> tuple[int, ...]:
    """List the borders of the hidden states that a draft head reads; ``folder`` is its export."""
    geometry, other = export.geometry, read_export(folder).geometry
    head, least = other.head, 1
    if geometry.shares:  # its last layers compute the rows of logits alone, which is enough for heads without a cache
        least = geometry.layers if other.borrows else geometry.layers + 1
    fits = head and min(head.borders) >= least and max(head.borders) <= geometry.layers
    if head is None or not fits or head.width != geometry.hidden_size:
        reads = f"reads {head.width} values after {max(head.borders)} layers" if head else "is no draft head"
        raise UsageError(
            "draft_head",
            f"is {folder}, which {reads}, expected the export of a head for this {geometry.model_type} of "
            f"{geometry.layers} layers of {geometry.hidden_size} values",
        )
    return head.borders


def runs_here(spec: "EngineSpec | None", plan: EngineConfig) -> bool:
    """True if there is an engine and a GPU that it and its library support."""
    if spec is None or spec.gpu is None or not plan.fits_gpu(spec.gpu.compute_capability):
        return False
    return lists_gpu(spec.library, spec.gpu.compute_capability)
