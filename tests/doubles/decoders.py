"""The torch decoder with all of a checkpoint's weights, to compute eagerly with."""

from pathlib import Path

from safetensors.torch import load_file

from llmc.export.config import packed_parameters
from llmc.export.decoder import Decoder
from llmc.export.sources.checkpoint import read_checkpoint


def load_decoder(folder: Path) -> Decoder:
    checkpoint = read_checkpoint(folder)
    decoder = Decoder(checkpoint.config)
    weights = {name: tensor for shard in checkpoint.shards for name, tensor in load_file(shard.path).items()}
    for packed, names in packed_parameters(checkpoint.config).items():
        rows = [checkpoint.tensors[name].shape[0] for name in names]
        weights |= dict(zip(names, weights.pop(packed).split(rows), strict=True))
    decoder.load_state_dict({name: weights[name] for name in checkpoint.tensors}, assign=True)
    return decoder.eval()
