"""Normalisations, and where a layer has them."""

from dataclasses import dataclass, replace

from llmc.bundle.model.norm import NormKind


@dataclass(frozen=True)
class NormConfig:
    """The normalisations of a decoder."""

    eps: float  # added to the mean square or variance
    kind: NormKind = "rms"
    bias: bool = False
    offset: bool = False  # checkpoints store weights minus one; export adds it back
    plain_end: bool = False  # those of the last norm are stored unchanged all the same


@dataclass(frozen=True)
class Placement:
    """Module names of a layer's norms by their place, empty if there is none.

    ``x + after(part(before(x)))`` is computed with the attention as the part and then with the MLP; if ``parallel``,
    both read the same x, through one norm if they name the same one. Experts beside an MLP read what the MLP reads, or
    x through a norm of their own; then both have a norm before they are added.
    """

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str
    parallel: bool = False
    before_experts: str = ""
    after_experts: str = ""
    after_dense: str = ""
    # Norms before a part whose output is also what the part's result is added to.
    carried: tuple[str, ...] = ()
    eps_after: float = 0.0  # epsilon of the norms behind attention and MLP, 0 for that of the others

    def choose_norm(self, name: str, norm: NormConfig) -> NormConfig:
        """The normalisation of the layer's norm with this name."""
        own = self.eps_after > 0 and name in (self.after_attention, self.after_mlp)
        return replace(norm, eps=self.eps_after) if own else norm


PRE = Placement("input_layernorm", "", "post_attention_layernorm", "")
POST = Placement("", "post_attention_layernorm", "", "post_feedforward_layernorm")
SANDWICH = Placement(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
PARALLEL = Placement("input_layernorm", "", "input_layernorm", "", parallel=True)
# Norms behind each sum, BERT's order: each stands before the next part here, and the last one is the model's.
BEHIND_SUMS = replace(PRE, carried=(PRE.before_attention, PRE.before_mlp))
PARALLEL_TWO_NORMS = Placement("input_layernorm", "", "post_attention_layernorm", "", parallel=True)
