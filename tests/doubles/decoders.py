"""The torch decoder with all of a checkpoint's weights, to compute eagerly with."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from llmc.bundle import MADE_FILE
from llmc.export.decoder import Decoder
from llmc.export.sources.checkpoint import Checkpoint, read_checkpoint
from llmc.export.sources.codes import flatten_tensors
from llmc.export.sources.made import write_made
from llmc.export.sources.safetensors import StoredTensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_decoder(folder: Path, checkpoint: Checkpoint | None = None) -> Decoder:
    checkpoint = checkpoint or read_checkpoint(folder)
    decoder = Decoder(checkpoint.config)
    with TemporaryDirectory() as scratch:
        places, _ = write_made(flatten_tensors(checkpoint.tensors), Path(scratch))
        folders = {name: Path(scratch) if tensor.file == MADE_FILE else folder for name, tensor in places.items()}
        weights = {name: _read(folders[name], tensor) for name, tensor in places.items()}
    decoder.load_state_dict(weights, assign=True)
    return decoder.eval()


def _read(folder: Path, tensor: StoredTensor) -> torch.Tensor:
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        return torch.frombuffer(bytearray(file.read(tensor.length)), dtype=DTYPES[tensor.dtype]).view(tensor.shape)
