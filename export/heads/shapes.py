"""The shape of a draft head's start and end."""

from dataclasses import dataclass

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.draft_head import CENTROIDS, HEAD_INPUT, HEAD_OUTPUT, DraftHead
from llmc.bundle.model.linear import Linear
from llmc.export.parts.norm import Placement

# The norms of a head whose attention reads the embedding beside the stream; EMBEDDING_NORM is the embedding's.
BESIDE, EMBEDDING_NORM = Placement("hidden_norm", "", "post_attention_layernorm", ""), "input_layernorm"


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftHead):
    """A draft head's start and end, and their arithmetic."""

    # Attention reads the normed embedding beside the stream, and the stream begins with a linear of the other model's
    # hidden states (EAGLE-3). Otherwise it begins with a linear of both, each normed.
    beside: bool
    normed: bool = False  # the residual is taken after attention's norm, not before it
    input_norm: bool = False  # the other model's hidden states are normed, all together
    # For each token the row of the head that is its logit, one after the last for none; empty if each has its own.
    tokens: tuple[int, ...] = ()
    rows: int = 0  # of the head, 0 for one of each token
    # Caches of the model that the layers read (Gemma 4's assistants). A linear then projects the last norm's output to
    # the model's width.
    lent: tuple[Cache, ...] = ()
    clusters: tuple[int, ...] = ()  # for each token its cluster; empty if every token has a logit, or only
    best: int = 0  # the tokens of so many best clusters

    @property
    def norms(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the norms before the first layer, in order."""
        names = "target_norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
        given = (("input_norm", self.given),) if self.input_norm else ()
        return (*given, *((name, self.width) for name in (() if self.beside else names[:1] if self.lent else names)))

    @property
    def given(self) -> int:
        """Width of the other model's hidden states of a token together."""
        return len(self.borders) * self.width

    @property
    def inputs(self) -> int:
        """Width of what the first linear reads."""
        return self.given if self.beside else 2 * self.width

    def list_linears(self, hidden: int, last: int, norm: str) -> tuple[list[Linear], list[Linear]]:
        """The linears before the first layer and those after ``norm``, the norm behind layer ``last``."""
        ends = list[Linear]()
        if self.lent:
            ends.append(Linear(HEAD_OUTPUT, self.own_width, hidden, False, norm, norm, last))
        if self.clusters:
            ends.append(Linear(CENTROIDS, 1 + max(self.clusters), hidden, False, norm, norm, last, exact=True))
        return [Linear(HEAD_INPUT, hidden, self.inputs, False, f"{HEAD_INPUT}.rows", "", 0)], ends
