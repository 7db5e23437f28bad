"""What a build measures of a finished bundle and records in its manifest: quality, and which calls agree."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Invariance:
    """Which calls of a graph compute the same bits for a token, whatever is computed beside it; found by measuring.

    Each number is 1 if calls of any size do, 2 if those of an even size do, and 0 if nothing is known to.

    Attributes:
        rows: of calls with one new token in each of several rows, how many rows.
        tokens: of calls with two or more new tokens in one row, how many tokens; except 64 k + 1 of them, of which
            nothing is known: attention works in tiles of 64 queries, and a lone last one takes other code.
        outputs: of calls of one row, how many logits.
        single: whether a new token alone in its row is computed as one among several in the same row.
    """

    rows: int = 0
    tokens: int = 0
    outputs: int = 0
    single: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether every number is one that has a meaning."""
        return {self.rows, self.tokens, self.outputs} <= {0, 1, 2}


NOTHING_KNOWN = Invariance()


@dataclass(frozen=True)
class PhaseQuality:
    """One path of a bundle, prefill or decode, on a text; None where there was no unquantized model to compare with.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the scored tokens.
        mean_kl, p99_kl: mean and 99th percentile of KL(reference || bundle) in nats over positions.
        top1_agreement: share of positions with the same most likely token, 0 ... 1.
    """

    perplexity: float
    mean_kl: float | None
    p99_kl: float | None
    top1_agreement: float | None


@dataclass(frozen=True)
class Quality:
    """Bundle against the unquantized model on a text. The properties are those of the worse of the two paths.

    Attributes:
        text: what it was measured on: a file's name, or "golden prompts".
        sha256: of the file, empty for golden prompts.
        positions: scored positions of each path.
        window: tokens per window, each of which starts from an empty cache; 0 for golden prompts.
        reference_perplexity: of the unquantized model.
        phases: by the path's name, prefill and decode: they are different graphs.
        greedy_match: mean number of the bundle's greedy tokens after a golden prompt before the first one that the
            unquantized model, given the same tokens before it, would not have chosen.
        greedy_tokens: how many tokens were generated after each golden prompt, so the largest possible greedy_match.
    """

    text: str
    sha256: str
    positions: int
    window: int
    reference_perplexity: float | None
    phases: dict[str, PhaseQuality]
    greedy_match: float | None
    greedy_tokens: int

    @property
    def perplexity(self) -> float:
        """The larger perplexity."""
        return max(phase.perplexity for phase in self.phases.values())

    @property
    def mean_kl(self) -> float | None:
        """The larger mean KL."""
        return self._worst(max, [phase.mean_kl for phase in self.phases.values()])

    @property
    def p99_kl(self) -> float | None:
        """The larger 99th percentile of KL."""
        return self._worst(max, [phase.p99_kl for phase in self.phases.values()])

    @property
    def top1_agreement(self) -> float | None:
        """The smaller agreement."""
        return self._worst(min, [phase.top1_agreement for phase in self.phases.values()])

    @staticmethod
    def _worst(choose: Callable[[list[float]], float], values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return choose(known) if known else None
