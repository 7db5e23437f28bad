"""The end of a model that embeds or ranks."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.encoder import DENSE, SCORE, Encoder
from llmc.bundle.model.experts import Activation
from llmc.bundle.model.linear import Linear


@dataclass(frozen=True)
class DenseConfig:
    """A linear after an encoder's pooling, its activation, and a norm."""

    outputs: int
    inputs: int
    bias: bool
    activation: Literal["identity", "tanh"] | Activation
    normed: bool = False  # the decoder's kind of norm follows


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Encoder):
    """An encoder's end and its arithmetic."""

    dense: tuple[DenseConfig, ...] = ()  # between pooling and the result
    # The score is the first token's logit minus the second one's; empty if the checkpoint has a head for the score.
    score_rows: tuple[int, ...] = ()
    score_bias: bool = False
    sigmoid: bool = False  # scores go through a sigmoid

    def list_linears(self, hidden: int, reads: str) -> list[Linear]:
        """Its linears in the order of computation; the first one reads ``reads``."""
        listed = list[Linear]()
        for i, it in enumerate(self.dense):
            listed.append(Linear(f"{DENSE}.{i}", it.outputs, it.inputs, it.bias, reads, "", None))
            reads, hidden = f"{DENSE}_norm.{i}" if it.normed else listed[-1].name, it.outputs
        scores = range(len(self.score_rows) or 1) if self.result == "scores" else ()
        return listed + [Linear(f"{SCORE}.{i}", 1, hidden, self.score_bias, reads, "", None) for i in scores]

    def list_norms(self) -> list[tuple[str, int]]:
        """Names and sizes of the norms behind its linears."""
        return [(f"{DENSE}_norm.{i}", it.outputs) for i, it in enumerate(self.dense) if it.normed]
