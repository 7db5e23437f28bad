"""The small tables of encoders: positions, types of tokens, and biases by the distance of two tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmc.bundle.model.names import DISTANCES, EMBEDDING, POSITIONS, TYPES
from llmc.errors import CheckpointError
from llmc.export.config import DecoderConfig
from llmc.export.parts.attention import RANGES, find_range
from llmc.export.sources.codes import Weight, rows_of
from llmc.export.sources.made import MadeTensor
from llmc.export.sources.parameters import Array, explain_shape, read_pieces
from llmc.export.sources.safetensors import FLOATS, StoredTensor

Floats = StoredTensor | MadeTensor


def place_tables(folder: Path, config: DecoderConfig, tensors: dict[str, Weight], longest: int, types: int) -> None:
    """Make the tables of a graph for texts of ``longest`` tokens and this many types in place of the stored ones."""
    positions, hidden = config.max_positions, config.hidden_size
    if config.learned_positions:
        first = config.first_position
        table = _find(folder, tensors, POSITIONS, (first + positions, hidden))
        tensors[f"{POSITIONS}.weight"] = rows_of(table, first, first + longest)
    if config.distance_ranges:
        ranges = _find(folder, tensors, DISTANCES, (2 * RANGES, config.geometry.most_heads))
        tensors[f"{DISTANCES}.weight"] = _spread(folder, ranges, longest)
    if config.stored_types and not types:
        kind = _find(folder, tensors, TYPES, (config.stored_types, hidden))
        name, rows = (POSITIONS, longest) if config.learned_positions else (EMBEDDING, config.vocab_size)
        tensors[f"{name}.weight"] = _add_first(folder, _find(folder, tensors, name, (rows, hidden)), kind)
        del tensors[f"{TYPES}.weight"]


def _find(folder: Path, tensors: dict[str, Weight], name: str, shape: tuple[int, ...]) -> Floats:
    table = tensors.get(f"{name}.weight")
    if not isinstance(table, Floats) or table.dtype not in FLOATS:
        raise CheckpointError(f"{folder}: tensor {name}.weight is missing or quantized; download the checkpoint again")
    if table.shape != shape:
        raise CheckpointError(f"{folder}: {explain_shape(f'{name}.weight', table.shape, shape)}")
    return table


def _spread(folder: Path, table: Floats, positions: int) -> MadeTensor:
    """A row for every distance of two tokens, ascending, of a table with a row for each range of distances."""
    rows = [find_range(distance) for distance in range(1 - positions, positions)]

    def pieces() -> Iterator[Array]:
        yield np.concatenate(list(read_pieces(folder, table))).astype(np.float32)[rows]

    return MadeTensor("F32", (len(rows), *table.shape[1:]), pieces)


def _add_first(folder: Path, table: Floats, types: Floats) -> MadeTensor:
    """A table with the first type, that of all tokens, added to every row."""

    def pieces() -> Iterator[Array]:
        first = next(iter(read_pieces(folder, rows_of(types, 0, 1)))).astype(np.float32)
        return (piece.astype(np.float32) + first for piece in read_pieces(folder, table))

    return MadeTensor("F32", table.shape, pieces)
