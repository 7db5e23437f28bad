"""Reasoning before an answer: its marks, its end, and a budget that ends it."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from llmc.errors import UsageError, format_value
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.processors import Guide
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.harmony import ANALYSIS, FINAL

_BEFORE, _THINKING, _ANSWER = range(3)  # parts of an output


@dataclass(frozen=True)
class ThinkingMarks:
    """The texts around reasoning, mostly special tokens."""

    # before and after the reasoning
    begin: str
    end: str
    answer: str = ""  # text between the reasoning's end and the answer; if not empty, the model always reasons
    form: str = ""  # name of the call format that answers use even if no tool can be called; empty for plain text


MARKS = (
    ThinkingMarks("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, EXAONE 4, GLM-Z1, Hunyuan, Granite 4
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkingMarks(ANALYSIS, "<|end|>", FINAL, "harmony"),  # gpt-oss
)


def marks_of(template: str) -> ThinkingMarks | None:
    """The reasoning marks in a chat template's source; None if it has no reasoning."""
    return next((marks for marks in MARKS if (marks.answer or marks.end) in template), None)


def opens_reasoning(prompt: str, marks: ThinkingMarks | None) -> bool:
    """True if the prompt ends inside the reasoning."""
    return marks is not None and prompt.rstrip().endswith(marks.begin)


@dataclass(frozen=True)
class Thinking:
    """The reasoning of a request.

    Args:
        marks: around the reasoning.
        opened: True if the prompt ends inside the reasoning.
        budget: most tokens between the marks; None does not bound them.

    Raises:
        UsageError: the budget is not an integer of at least 0.
    """

    marks: ThinkingMarks
    opened: bool
    budget: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.budget)


def check_budget(budget: object) -> None:
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise UsageError("reasoning_budget", f"is {format_value(budget)}, expected an integer of at least 0, or None")


class ThinkingGuide:
    """The guide of an output that may begin with reasoning, which is free; ``answer`` guides the answer after it.

    When the reasoning has used its budget, only the tokens of the closing mark are allowed, even if the request bans
    them. A guided answer comes only after the closing mark: the reasoning may not end the sequence. One token of line
    ends is allowed between reasoning and a guided answer. If a mark stands before the answer, no line ends are allowed,
    and the output begins with the opening mark. If ``answer`` is None, the answer is free.
    """

    def __init__(
        self, thinking: Thinking, tokenizer: Tokenizer, eos_token_ids: Collection[int], answer: Guide | None
    ) -> None:
        marks = thinking.marks
        self._tokenizer, self._answer = tokenizer, answer
        self._begin, self._end = marks.begin.encode(), marks.end.encode()
        self._opener = tokenizer.token_to_id(marks.begin)
        self._closing = tokenizer.encode(marks.end, add_special_tokens=False)
        blanks = () if marks.answer else ("\n", "\n\n")
        self._line_ends = [found[0] for text in blanks if len(found := tokenizer.encode(text, False)) == 1]
        self._eos = list(eos_token_ids)
        self._left = thinking.budget
        self._forced: list[int] = []
        self._read = b""  # the end of the current part, where a mark may begin
        self._after_end = False
        self._place = _BEFORE
        if thinking.opened:
            self._think()
        elif marks.answer and answer is not None:
            self._forced = tokenizer.encode(marks.begin, add_special_tokens=False)

    @property
    def finished(self) -> bool:
        return self._place == _ANSWER and self._answer is not None and self._answer.finished

    def mask(self, logits: Logits) -> Logits:
        """``logits`` unchanged, or a copy with -inf for forbidden tokens.
        Raises GrammarError: the guide of the answer allows no token."""
        if self._forced:
            masked = np.full_like(logits, -np.inf)
            masked[self._forced[0]] = 0
            return masked
        if self._answer is None:
            return logits
        if self._place == _THINKING:
            free: Logits = logits.copy()
            free[self._eos] = -np.inf
            return free
        masked = self._answer.mask(logits)
        also = self._line_ends if self._after_end else []
        if self._place == _BEFORE and self._opener is not None:
            also = [self._opener]
        masked[also] = logits[also]
        return masked

    def accept(self, token: int) -> None:
        """Advance by the token chosen. Raises GrammarError: the guide of the answer does not allow it."""
        if self._forced:
            self._forced.pop(0)
            if not self._forced and self._place == _BEFORE:
                self._think()
            elif not self._forced:
                self._end_thinking(b"")
        elif self._place == _BEFORE:
            self._accept_before(token)
        elif self._place == _THINKING:
            self._accept_thought(token)
        else:
            blank, self._after_end = self._after_end and token in self._line_ends, False
            if self._answer is not None and not blank:
                self._answer.accept(token)

    def _accept_before(self, token: int) -> None:
        self._read += self._tokenizer.spell(token)
        read = self._read.lstrip()
        if read.startswith(self._begin):
            self._think()
        elif self._answer is not None:
            self._place = _ANSWER
            self._answer.accept(token)
        elif not self._begin.startswith(read):
            self._place = _ANSWER

    def _accept_thought(self, token: int) -> None:
        self._read += self._tokenizer.spell(token)
        if self._end in self._read:
            self._end_thinking(self._read.partition(self._end)[2])
            return
        self._read = self._read[-len(self._end) :]
        if self._left is not None:
            self._left -= 1
            self._close_if_spent()

    def _think(self) -> None:
        self._place, self._read = _THINKING, b""
        self._close_if_spent()

    def _close_if_spent(self) -> None:
        if self._left == 0:
            self._forced = list(self._closing)

    def _end_thinking(self, rest: bytes) -> None:
        """Begin the answer, possibly inside the token that ended the mark."""
        self._place, self._after_end = _ANSWER, not rest
        if self._answer is not None:
            for token in self._tokenizer.encode(rest.decode(errors="replace").lstrip(), False):
                self._answer.accept(token)
