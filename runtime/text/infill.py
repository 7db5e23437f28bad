"""Fill in the middle: prompts with a gap, written with a model family's marks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenOf = Callable[[str], int | None]


@dataclass(frozen=True)
class Infill:
    """A family's marks, one token each."""

    # before the text before the gap, before the text after it, and where the gap begins; `middle` is empty if the gap
    # begins after the text before it
    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False  # True if the text after the gap comes first
    ends: tuple[str, ...] = ()  # further tokens that end an answer

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


# From each family's model card or paper.
FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4, Yi-Coder
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
                                                                      "<|file_separator|>")),
    # StarCoder, StarCoder2, Granite Code, StableCode
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>", "<repo_name>")),
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Infill("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
    Infill("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    Infill("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)  # fmt: skip


def find_infill(token_of: TokenOf) -> Infill | None:
    """The family of a tokenizer; None if it has no known marks. ``token_of``: a token's id by its text."""
    return next((each for each in FAMILIES if all(token_of(mark) is not None for mark in each.marks)), None)


def write_infill(infill: Infill, token_of: TokenOf, before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The prompt for a gap between the tokens of two texts."""

    def marked(mark: str, tokens: Sequence[int]) -> list[int]:
        token = token_of(mark) if mark else None
        return [*([] if token is None else [token]), *tokens]

    parts = [marked(infill.prefix, before), marked(infill.suffix, after)]
    if infill.suffix_first:
        parts.reverse()
    return [*parts[0], *parts[1], *marked(infill.middle, ())]


def find_ends(infill: Infill, token_of: TokenOf) -> list[int]:
    tokens = (token_of(mark) for mark in (*infill.marks, *infill.ends))
    return [token for token in tokens if token is not None]
