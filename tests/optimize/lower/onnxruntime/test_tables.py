"""Rows of a table in blocks of a GGUF file are what its library makes of them, in the bytes that are planned."""

from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest
from doubles.ggufs import Kind, dequantize, write_gguf
from doubles.lowerings import open_session

from llmc.bundle import Geometry, Limits
from llmc.bundle.model.names import EMBEDDING
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.ggml import LAYOUTS
from llmc.optimize.lower.context import LoweringContext, QuantConfigs, choose_table_config, quant_configs
from llmc.optimize.lower.onnxruntime.embedding import lower_embedding
from llmc.optimize.lower.rewrite import LLMC, remove_dead
from llmc.optimize.plan.sizes import table_bytes
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import OLD, capabilities
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated

TABLE = f"{EMBEDDING}.weight"


def write_table(path: Path, folder: Path) -> tuple[ir.Model, Geometry]:
    """A GGUF file's table as an export has it: a graph that gathers rows of it, and the model's inventory."""
    checkpoint = read_checkpoint(path)
    table = checkpoint.tensors[TABLE]
    [stored] = table.parts().values()
    place = (stored.file, stored.offset, stored.length, ir.DataType.UINT8)
    tensor = ir.ExternalTensor(*place, shape=ir.Shape(stored.shape), name=TABLE, base_dir=folder)
    packed = ir.val(TABLE, const_value=tensor)
    ids = ir.val("input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "sequence"]))
    unpack = ir.node(table.dtype, [packed], domain=LLMC)
    gather = ir.node("Gather", [unpack.outputs[0], ids], {"axis": 0}, name=EMBEDDING)
    [out] = gather.outputs
    out.name, out.type = "rows", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([ids], [out], nodes=[unpack, gather], initializers=[packed], name="table")
    return ir.Model(graph, ir_version=OLD[1]), checkpoint.geometry


def store_by_default(geometry: Geometry) -> QuantConfigs:
    recipe = resolve(Request(phases="shared"), capabilities("cpu"), 128, "x", coded=bool(geometry.coded))[0]
    return quant_configs(recipe, geometry)["shared"]


@pytest.fixture(scope="module", params=["llama-biases", "llama-llama3-rope-tied"], ids=["untied", "tied"])
def checkpoint(request, random_checkpoint_writer, tmp_path_factory) -> Path:
    return random_checkpoint_writer(tmp_path_factory.mktemp("checkpoint"), request.param, hidden_size=256)


@pytest.mark.parametrize("kind", sorted(LAYOUTS.keys() & Kind.__members__.keys()))
def test_rows_are_the_files_to_the_last_bit_in_the_bytes_of_the_plan(checkpoint, kind, tmp_path):
    kinds = defaultdict(lambda: "F32", {"token_embd.weight": kind})
    path = write_gguf(checkpoint, tmp_path / "model.gguf", kinds)
    model, geometry = write_table(path, tmp_path)
    stored = store_by_default(geometry)
    (folder := tmp_path / "bundle").mkdir()
    weights = WeightFile(folder)
    lower_embedding(model.graph, LoweringContext("", geometry, Limits(24, 1, 24), stored, weights, Calibrated()))
    weights.close()
    remove_dead(model.graph)
    model.opset_imports.update({"": OLD[0], "com.microsoft": 1})
    ir.save(model, folder / "table.onnx")
    ids = np.random.default_rng(0).permutation(geometry.vocab_size).reshape(2, -1)
    [found] = open_session(folder / "table.onnx").run(None, {"input_ids": ids})
    table = next(it for it in gguf.GGUFReader(path).tensors if it.name == "token_embd.weight")
    np.testing.assert_array_equal(found, dequantize(table.data, kind)[ids])
    listed = geometry.tables[0]
    written = {it.offset: it.nbytes for node in model.graph for it in map(stored_weight, node.inputs) if it}
    planned = table_bytes(listed, choose_table_config(stored, geometry, listed))
    assert sum(written.values()) == planned or (
        kind in ("MXFP4", "NVFP4") and sum(written.values()) < planned
    )  # scales that float16 holds, too
    if not geometry.tied_head and kind in ("Q4_0", "Q5_0", "Q8_0"):
        assert sum(written.values()) == table.n_bytes  # as many as in the file


def stored_weight(value: ir.Value | None) -> ir.ExternalTensor | None:
    tensor = value.const_value if value is not None else None
    return tensor if isinstance(tensor, ir.ExternalTensor) else None
