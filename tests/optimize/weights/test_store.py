"""Weights as calibration left them: stored integers first, then factors and masks, else the checkpoint's own."""

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import BuildError
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.weights.store import Calibrated, Store, arrays_of
from llmc.runtime.host import disk_cache

NAME = "model.layers.7.mlp.up_proj.weight"
ROWS, INPUTS = 70, 69  # a last byte of 4 bits is half full
GRID = Grid(4, 32)


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (ROWS, INPUTS)).astype(np.float32)


def stored(folder: Path, array: np.ndarray, name: str = NAME) -> ir.ExternalTensor:
    (folder / name).write_bytes(array.tobytes())
    shape = ir.Shape(array.shape)
    return ir.ExternalTensor(name, 0, array.nbytes, ir.DataType.FLOAT, shape=shape, name=name, base_dir=folder)


@pytest.fixture
def tensor(tmp_path, matrix) -> ir.ExternalTensor:
    return stored(tmp_path, matrix)


@pytest.fixture
def store(tmp_path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a matrix is read in several."""
    monkeypatch.setattr("llmc.exported.PIECE", 16 * INPUTS)


def test_without_a_store_weights_are_the_checkpoints(tensor, matrix):
    np.testing.assert_array_equal(Calibrated().matrix((tensor,)), matrix)
    np.testing.assert_array_equal(
        Calibrated().quantize_stacked((tensor,), GRID).dequantize(), rtn.quantize(matrix, GRID).dequantize()
    )


def test_rows_take_factors(tensor, matrix, store):
    rng = np.random.default_rng(1)
    rows, columns = rng.uniform(0.5, 2, ROWS).astype(np.float32), rng.uniform(0.5, 2, INPUTS).astype(np.float32)
    store.write("layer-007", {f"rows:{NAME}": rows, f"columns:{NAME}": columns})
    wanted = matrix * rows[:, None] * columns
    np.testing.assert_array_equal(Calibrated(store).matrix((tensor,)), wanted)
    np.testing.assert_array_equal(Calibrated(store).rows(tensor, 13, 20), wanted[13:20])
    found = Calibrated(store).quantize_stacked((tensor,), Grid(8))
    np.testing.assert_array_equal(found.values, rtn.quantize(wanted, Grid(8)).values)


@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_that_were_chosen_are_taken_on_their_grid_only(tensor, matrix, store, symmetric):
    grid = Grid(4, 32, symmetric)
    chosen = rtn.quantize(matrix[::-1].copy(), grid)
    store.write("layer-007", arrays_of(NAME, chosen))
    np.testing.assert_array_equal(Calibrated(store).quantize_stacked((tensor,), grid).dequantize(), chosen.dequantize())
    other = Grid(4, 32, not symmetric)
    rounded = rtn.quantize(matrix, other)
    np.testing.assert_array_equal(
        Calibrated(store).quantize_stacked((tensor,), other).dequantize(), rounded.dequantize()
    )


@pytest.mark.parametrize("ask", ["activation", "cache"])
def test_a_range_that_was_not_seen_is_refused(store, ask):
    store.write("layer-007", {"input:model.layers.7.mlp.up_proj": np.array([1.0, 3.0], np.float32)})
    calibrated = Calibrated(store)
    assert calibrated.activation("model.layers.7.mlp.up_proj") == 3.0
    with pytest.raises(BuildError, match="calibration holds no .* give a text with --calibration FILE"):  # noqa: RUF043
        if ask == "activation":
            calibrated.activation("model.layers.7.mlp.gate_proj")
        else:
            calibrated.cache_range(7, "key")


def test_nobody_prunes_what_a_store_works_with(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path))
    folder = tmp_path / "calibration" / "key"
    folder.mkdir(parents=True)
    store = Store(folder)
    store.write("head", {"a": np.zeros(3)})
    for there in (True, False):
        os.utime(folder, (0, 0))
        disk_cache.prune("calibration", 0)
        assert folder.exists() is there
        if there:
            np.testing.assert_array_equal(store.read("head")["a"], np.zeros(3))
            del store
            assert folder.stat().st_mtime > 0  # used until then
