"""The weights that a lowering reads: the checkpoint's, as calibration left them.

Calibration writes one file per part of the model (each layer, and the head) into a folder: factors folded into rows
and columns of float weights, norms of inputs that pruning weighs weights with, integers that were chosen, and ranges of
activations. Whatever it did not decide is the checkpoint's own: the weight as stored, rounded to nearest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.exported import CodedTensor, Weight, in_parallel, pieces, rows_of, sizes
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import SMALLEST_SCALE, Float, Grid, Quantized, pack_rows, stack, unpack_rows
from llmc.optimize.quantize.pruning import Pruning
from llmc.runtime.host import disk_cache

Arrays = Mapping[str, NDArray[Any]]
# Marks integers that W8A8 multiplies, which are in the basis of its own graph.
PROMPTS = "prompts."


def grid_name(grid: Grid) -> str:
    """A grid in a few letters: int4x128, int8, int4x32z (with zero points), int4x128p (with scales above zero),
    int4x32s (shifted)."""
    kind = "p" if grid.positive else "s" if grid.shifted else "" if grid.symmetric else "z"
    return f"int{grid.bits}{f'x{grid.block}' if grid.block else ''}{kind}"


def layer_part(index: int) -> str:
    return f"layer-{index:03d}"


def arrays_of(tensor: str, quantized: Quantized, use: str = "") -> dict[str, NDArray[Any]]:
    """The arrays that a store keeps of a matrix [N, K] on a grid: of 4 bits two integers to a byte. ``use`` is
    :data:`PROMPTS` or empty."""
    key, grid, zeros = f"{use}{grid_name(quantized.grid)}:{tensor}", quantized.grid, quantized.zero_points
    arrays: dict[str, NDArray[Any]] = {f"values:{key}": pack_rows(quantized.values, grid)}
    arrays |= {f"scales:{key}": quantized.scales, f"inputs:{key}": np.array(quantized.values.shape[1])}
    return arrays if zeros is None else {**arrays, f"zeros:{key}": pack_rows(zeros, grid)}


class Store:
    """A folder of calibration results, one file per part; a part is there whole or not at all.

    As long as there is a store no process prunes its folder from the cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hold = disk_cache.Hold(folder)
        self._load = partial(_load, folder)  # no method: a store that refers to itself would hold on for longer
        # The arrays of a part; BuildError if the file is missing or broken.
        self.read: Callable[[str], Arrays] = lru_cache(maxsize=2)(self._load)

    def has(self, part: str) -> bool:
        return (self.folder / f"{part}.npz").exists()

    def write(self, part: str, arrays: Arrays) -> None:
        """Publish a part atomically."""
        with disk_cache.write_entry(self.folder / f"{part}.npz") as staging:
            np.savez(staging, **arrays)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Drop the activations that an interrupted run would go on from: all parts are there."""
        if self.has("state") and (state := self._load("state"))["hidden"].size:
            self.write("state", {**state, "hidden": state["hidden"][:0]})


def _load(folder: Path, part: str) -> Arrays:
    path = folder / f"{part}.npz"
    try:
        # Opened here, for np.load leaves a file open that turns out to be no archive.
        with path.open("rb") as data, np.load(data, allow_pickle=False) as file:
            return dict(file)
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise BuildError(f"{path} is broken ({error}); remove {folder} and build again") from error


def keep_codes(tensor: CodedTensor, grid: Grid) -> Quantized:
    """A matrix's own integers on a grid with smaller blocks, with the scales and zero points of the larger ones."""
    codes, scales, zeros, offsets = tensor.read()
    inputs = codes.shape[1]
    of_block = np.arange(grid.groups(inputs)) * grid.width(inputs) // tensor.kind.block
    scales = scales[:, of_block]
    if grid.positive and not (scales >= 0).all():
        raise BuildError(
            f"{tensor.name} has scales below zero, which the target does not take; build with --int{grid.bits} to have "
            "its integers chosen anew"
        )
    scales = np.maximum(scales, np.float32(SMALLEST_SCALE)) if grid.positive else scales
    return Quantized(
        codes,
        scales,
        grid,
        None if zeros is None else zeros[:, of_block],
        None if offsets is None else offsets[:, of_block],
    )


def quantize_matrix(matrix: Float, grid: Grid) -> Quantized:
    """The integers nearest to a matrix [N, K], on all cores."""
    return stack(list(in_parallel(lambda span: rtn.quantize(matrix[slice(*span)], grid), pieces(matrix.shape))))


class Calibrated:
    """Float weights and integers of a checkpoint. Without a store, all weights are as the checkpoint has them, but for
    those that are pruned."""

    def __init__(self, store: Store | None = None, pruning: Pruning | None = None) -> None:
        self._store = store
        self._pruning = pruning or Pruning()

    def _arrays(self, tensor: str) -> Arrays:
        part = layer_part(int(tensor.split(".")[2])) if tensor.startswith("model.layers.") else "head"
        return self._store.read(part) if self._store else {}

    def rows(self, tensor: Weight, start: int = 0, stop: int | None = None) -> Float:
        """Rows of a tensor [N, K] or [N] as float32: stored values, times their factors, pruned ones zero."""
        assert tensor.name is not None
        arrays = self._arrays(tensor.name)
        rows = self._pruning.prune(tensor.name, rows_of(tensor, start, stop), arrays.get(f"norms:{tensor.name}"))
        span = slice(start, start + len(rows))
        if (factors := arrays.get(f"rows:{tensor.name}")) is not None:
            rows *= factors[span] if rows.ndim == 1 else factors[span, None]
        if (factors := arrays.get(f"columns:{tensor.name}")) is not None:
            rows *= factors
        return rows

    def matrix(self, tensors: Sequence[Weight]) -> Float:
        """Stacked matrices as float32 [N, K], or vectors [N]."""
        return np.concatenate([self.rows(t, *span) for t in tensors for span in pieces(sizes(t))])

    def keeps(self, tensor: CodedTensor, grid: Grid) -> bool:
        """True if the checkpoint's own integers are on ``grid``, and neither calibration nor pruning changed them."""
        assert tensor.name is not None
        arrays, (_, inputs) = self._arrays(tensor.name), sizes(tensor)
        changed = any(f"{kind}:{tensor.name}" in arrays for kind in ("rows", "columns", f"values:{grid_name(grid)}"))
        return not changed and tensor.name not in self._pruning.tensors and grid.holds(tensor.kind, inputs)

    def chosen(self, tensor: str, grid: Grid, use: str = "") -> Quantized | None:
        """The integers that calibration chose for a matrix, or for those of all experts one below the other."""
        arrays, key = self._arrays(tensor), f"{use}{grid_name(grid)}:{tensor}"
        if f"values:{key}" not in arrays:
            return None
        values = unpack_rows(arrays[f"values:{key}"], grid, int(arrays[f"inputs:{key}"]))
        scales, zeros = arrays[f"scales:{key}"], arrays.get(f"zeros:{key}")
        return Quantized(values, scales, grid, None if zeros is None else unpack_rows(zeros, grid, scales.shape[1]))

    def quantize_stacked(self, tensors: Sequence[Weight], grid: Grid) -> Quantized:
        """Stacked matrices on ``grid``: the checkpoint's own integers where they are on it, columns as they are stored;
        else those that calibration chose, or else those nearest.

        Works in pieces on all cores; only integers and scales stay in memory.
        """
        return stack([part for tensor in tensors for part in self._quantize_float(tensor, grid)])

    def _quantize_float(self, tensor: Weight, grid: Grid) -> list[Quantized]:
        assert tensor.name is not None
        if isinstance(tensor, CodedTensor) and tensor.order is None and self.keeps(tensor, grid):
            return [keep_codes(tensor, grid)]
        if chosen := self.chosen(tensor.name, grid):
            return [chosen]
        spans = pieces(sizes(tensor))
        return list(in_parallel(lambda span: rtn.quantize(self.rows(tensor, *span), grid), spans))

    def activation(self, module: str) -> float:
        """Largest magnitude of the input of the linear called ``module``; BuildError if calibration did not see it."""
        return float(self._range(f"input:{module}", module).max())

    def cache_range(self, layer: int, part: str) -> Float:
        """Largest magnitude of each channel of keys or values (``part``), float32 [kv_heads, head_dim], as above."""
        return self._range(f"cache:{part}", f"model.layers.{layer}.self_attn")

    def _range(self, key: str, module: str) -> Float:
        arrays = self._arrays(f"{module}.weight")
        if key not in arrays:
            raise BuildError(f"{module}: calibration holds no {key}; give a text with --calibration FILE")
        return np.asarray(arrays[key], np.float32)
