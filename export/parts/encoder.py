"""The end of a model that embeds or ranks."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.encoder import DENSE, SCORE, Encoder
from llmc.bundle.model.linear import Linear


@dataclass(frozen=True)
class DenseConfig:
    """A linear after an encoder's pooling, and its activation."""

    outputs: int
    inputs: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Encoder):
    """An encoder's end and its arithmetic."""

    dense: tuple[DenseConfig, ...] = ()  # between pooling and an embedding
    # The score is the first token's logit minus the second one's; empty if the checkpoint has a head for the score.
    score_rows: tuple[int, ...] = ()
    sigmoid: bool = False  # scores go through a sigmoid

    def list_linears(self, hidden: int, reads: str) -> list[Linear]:
        """Its linears in the order of computation; the first one reads ``reads``."""
        if self.result == "scores":
            return [Linear(f"{SCORE}.{i}", 1, hidden, False, reads, "", None) for i in range(len(self.score_rows) or 1)]
        names = [f"{DENSE}.{i}" for i in range(len(self.dense))]
        return [
            Linear(name, it.outputs, it.inputs, it.bias, source, "", None)
            for name, it, source in zip(names, self.dense, [reads, *names], strict=False)
        ]
