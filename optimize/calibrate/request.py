"""A build's calibration: whether there is one, its text, and the cache of results."""

import errno
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc import __version__
from llmc.bundle import Calibration, ExportManifest, Geometry, Recipe
from llmc.errors import ResourceError, UsageError, require
from llmc.exported import weights_identity
from llmc.optimize.lower.context import quant_configs
from llmc.optimize.progress import Progress
from llmc.optimize.quantize.pruning import Pruning
from llmc.optimize.recipe import BuildRequest, either, needs_calibration
from llmc.optimize.weights.store import Calibrated

if TYPE_CHECKING:
    from llmc.optimize.calibrate.text import CalibrationSamples

# GPTQ's paper uses 128 windows of 2,048 tokens; a thirtieth of that already estimates the second moments, in minutes.
DEFAULT_SAMPLES = 16
DEFAULT_LENGTH = 512
SHORTER = "fewer and shorter windows (--samples, --length), or round without one (--no-calibration)"
# Raised when calibration comes to other results than before: what is kept of it is made anew.
METHOD = 3
# Bytes of cached calibrations: finished ones, and those of interrupted builds.
KEPT_BYTES = 8_000_000_000


def calibrate_weights(
    request: BuildRequest, export: ExportManifest, recipe: Recipe, progress: Progress
) -> tuple[Calibrated, Calibration | None]:
    """The weights that a build lowers, and the calibration text (None if the recipe uses none)."""
    source = request.source
    pruning = Pruning(recipe.sparsity, list_pruned(export.geometry) if recipe.sparsity else ())
    wish = needs_calibration(recipe)
    if wish is None:
        if option := request.calibration_option:
            raise UsageError(option, "is given for calibration, but the recipe asks for none", "leave it out")
        return Calibrated(pruning=pruning), None
    if request.decoder is None:
        raise UsageError(
            wish,
            f"is {getattr(recipe, wish)!r}, which needs calibration",
            "leave --no-calibration out, or give BuildRequest(..., decoder=StreamedDecoder)",
        )
    torch = require("torch", "export")
    from llmc.optimize.calibrate.diffusion import hide_half
    from llmc.optimize.calibrate.layers import calibrate
    from llmc.optimize.calibrate.text import read_samples
    from llmc.runtime.host import disk_cache

    geometry = export.geometry
    count, length = check_windows(request, geometry.max_positions)
    vocabulary = geometry.vocab_size
    samples = read_samples(
        request.calibration, source, samples=count, length=length, vocab_size=vocabulary, remedy=SHORTER
    )
    samples = replace(samples, ids=hide_half(samples.ids, geometry))
    used = Calibration(samples.name, samples.sha256, samples.default, len(samples.ids), samples.ids.shape[1])
    folder = disk_cache.entry("calibration", _key(source, export, replace(recipe, calibration=used), samples))
    decoder = request.decoder(source, "cuda" if torch.cuda.is_available() else "cpu")
    stored = quant_configs(recipe, geometry)
    # Weights do not depend on how activations are quantized.
    decided = replace(stored.get("decode") or next(iter(stored.values())), w8a8=None)
    prompts = stored.get("prefill") or stored.get("shared")
    try:
        store = calibrate(decoder, samples.ids, recipe, decided, folder, progress, prompts)
        store.settle()
        calibrated, nearest = store.read("state")["experts"].tolist()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            "the disk of the cache is full", "free some space there, or set LLMC_CACHE to another folder", path=folder
        ) from error
    disk_cache.prune("calibration", KEPT_BYTES)
    return Calibrated(store, pruning), replace(used, experts=calibrated, nearest=nearest)


def list_pruned(geometry: Geometry) -> frozenset[str]:
    """The tensors of the layers' linears; the embedding and the head stay whole."""
    return frozenset(f"{linear.name}.weight" for linear in geometry.linears if linear.layer is not None)


def check_windows(request: BuildRequest, longest: int) -> tuple[int, int]:
    """Number and length of the calibration's windows, for a model whose context is ``longest``.
    Raises UsageError: one of them is out of range."""
    samples, length = either(request.samples, DEFAULT_SAMPLES), either(request.length, min(DEFAULT_LENGTH, longest))
    for name, value, highest in (("samples", samples, 100_000), ("length", length, longest)):
        if not 2 <= value <= highest:
            raise UsageError(name, f"is {value}, expected 2 ... {highest}")
    return samples, length


def _key(source: Path, export: ExportManifest, recipe: Recipe, samples: "CalibrationSamples") -> str:
    """A hash of all inputs of calibration. Keys are not sorted: the last matching pattern of layers wins."""
    # Engines have other integers; apart from that, the set of graphs does not matter.
    phases = "single" if recipe.phases == "single" else ""
    # ``kept`` is how a store keeps integers, those of experts too.
    settled: dict[str, Any] = {"name": "", "budget": None, "phases": phases, "kept": "two per byte"}
    if recipe.scheme == "rtn" or not recipe.rotates("prefill"):  # nothing is chosen for prompts
        settled |= {"activations": "", "rotated": ()}
    decided = {**asdict(recipe), **settled}
    weights = [export.source.fingerprint, weights_identity(source)]
    digest = hashlib.sha256(json.dumps([__version__, METHOD, weights, decided]).encode())
    digest.update(np.ascontiguousarray(samples.ids).tobytes())
    return digest.hexdigest()[:32]
