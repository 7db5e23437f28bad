"""The weights of an export: its graph says where each of them lies."""

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from llmc.bundle import DECODER_FILE
from llmc.errors import CheckpointError
from llmc.export.sources.safetensors import StoredTensor
from llmc.origin import find_own_file

IR_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I32": ir.DataType.INT32,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "I4": ir.DataType.INT4,
}
_NAMES = {kind: name for name, kind in IR_TYPES.items()}


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    try:
        graph = ir.load(folder / DECODER_FILE).graph
    except (OSError, DecodeError) as error:
        raise CheckpointError(
            f"{folder / DECODER_FILE} is missing or corrupt ({error}); export the checkpoint again"
        ) from error
    values = (value.const_value for value in graph.initializers.values())
    stored = [_locate_tensor(folder, tensor) for tensor in values if isinstance(tensor, ir.ExternalTensor)]
    sizes = {file: _size(folder, file) for file in {tensor.file for _, tensor in stored}}
    for name, tensor in stored:
        if tensor.offset + tensor.length > sizes[tensor.file]:
            raise CheckpointError(
                f"{folder / tensor.file} is truncated: it has {sizes[tensor.file]} bytes, and {name} ends at "
                f"{tensor.offset + tensor.length}; export the checkpoint again"
            )
    return dict(stored)


def _locate_tensor(folder: Path, tensor: ir.ExternalTensor) -> tuple[str, StoredTensor]:
    file, shape = str(tensor.location), tuple(int(size) for size in tensor.shape.numpy())
    if Path(file).name != file or tensor.dtype not in _NAMES or tensor.name is None or not tensor.length:
        raise CheckpointError(
            f"{folder / DECODER_FILE} says that {tensor.name} lies in {file!r:.80} as {tensor.dtype.name}, expected a "
            f"file of this folder and one of {', '.join(IR_TYPES)}; export the checkpoint again"
        )
    return tensor.name, StoredTensor(file, tensor.offset or 0, tensor.length, _NAMES[tensor.dtype], shape)


def _size(folder: Path, file: str) -> int:
    found = find_own_file(folder, file)
    if found is None:
        raise CheckpointError(f"{folder / file} is missing; export the checkpoint again")
    return found.stat().st_size
