"""Made tensors are written in pieces, and the graph of an export says where they lie."""

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import DECODER_FILE, MADE_FILE
from llmc.errors import CheckpointError
from llmc.export.graph import build_graph
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.made import MadeTensor, write_made
from llmc.export.streaming import StreamedDecoder

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def export(window_case, tmp_path):
    """An export of which one matrix is made: twice the checkpoint's, in three pieces."""
    for path in window_case.export.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = read_checkpoint(window_case.checkpoint)
    rows = 2 * StreamedDecoder(window_case.export).rows(NAME).numpy()
    tensors = {**source.tensors, NAME: MadeTensor("F32", rows.shape, lambda: iter(np.split(rows, [1, 30])))}
    places, new_bytes = write_made(tensors, tmp_path)
    assert (list(places), new_bytes) == (list(source.tensors), rows.nbytes)
    ir.save(build_graph(source.config, places, tmp_path), tmp_path / DECODER_FILE)
    return tmp_path, rows


def test_a_made_file_that_is_gone_or_short_is_named(export):
    folder, rows = export
    (folder / MADE_FILE).write_bytes(rows.tobytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{MADE_FILE} is truncated: .* export the checkpoint again"):
        StreamedDecoder(folder)
    (folder / MADE_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{MADE_FILE} is missing; export the checkpoint again"):
        StreamedDecoder(folder)


def test_a_graph_that_points_out_of_its_folder_is_refused(export):
    folder, _ = export
    model = ir.load(folder / DECODER_FILE)
    value = model.graph.initializers[NAME]
    stored = value.const_value
    value.const_value = ir.ExternalTensor(
        f"../{MADE_FILE}", 0, stored.length, stored.dtype, shape=stored.shape, name=NAME, base_dir=folder
    )
    ir.save(model, folder / DECODER_FILE)
    with pytest.raises(CheckpointError, match=r"says that .* is in .* expected a file of this folder"):
        StreamedDecoder(folder)
