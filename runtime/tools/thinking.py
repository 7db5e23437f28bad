"""Reasoning before an answer: what encloses it, where it ends, and a budget that ends it."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from llmc.errors import UsageError, format_value
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.processors import Guide
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.harmony import ANALYSIS, FINAL

_BEFORE, _THINKING, _ANSWER = range(3)  # places in an output


@dataclass(frozen=True)
class ThinkingMarks:
    """The texts, mostly tokens of their own, that enclose reasoning.

    Attributes:
        begin, end: before and after it.
        answer: what stands between its end and an answer; if there is any, the model always reasons.
        form: the format of calls in which answers are written even where none can be called; empty for plain text.
    """

    begin: str
    end: str
    answer: str = ""
    form: str = ""


MARKS = (
    ThinkingMarks("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, EXAONE 4, GLM-Z1, Hunyuan, Granite 4
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkingMarks(ANALYSIS, "<|end|>", FINAL, "harmony"),  # gpt-oss
)


def marks_of(template: str) -> ThinkingMarks | None:
    """The marks that a chat template's source holds, None if it knows no reasoning."""
    return next((marks for marks in MARKS if (marks.answer or marks.end) in template), None)


def opens_reasoning(prompt: str, marks: ThinkingMarks | None) -> bool:
    """True if the prompt, as the template wrote it, ends inside the reasoning."""
    return marks is not None and prompt.rstrip().endswith(marks.begin)


@dataclass(frozen=True)
class Thinking:
    """The reasoning of a request.

    Args:
        marks: what encloses it.
        opened: the prompt ends inside it.
        budget: tokens between the marks at most; None does not bound them.

    Raises:
        UsageError: the budget is no integer of at least 0.
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
    """The guide of an output that may begin with reasoning, which is free: what guides the answer counts after it.

    Once the reasoning has as many tokens as its budget, the tokens of the closing mark are the only ones allowed, even
    if the request bans them. An answer that is guided can only be reached through the closing mark: the reasoning is
    not allowed to end the sequence. Between reasoning and a guided answer one token of line ends is allowed. Where a
    mark stands before the answer there is none, and the output begins with the opening mark. ``answer``: the guide of
    the answer; None leaves it free.
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
        self._read = b""  # of the place that it is in, as far as a mark may begin there
        self._after_end = False
        self._place = _BEFORE
        if thinking.opened:
            self._think()
        elif marks.answer and answer is not None:
            self._forced = tokenizer.encode(marks.begin, add_special_tokens=False)

    @property
    def finished(self) -> bool:
        """True if the answer is guided and complete."""
        return self._place == _ANSWER and self._answer is not None and self._answer.finished

    def mask(self, logits: Logits) -> Logits:
        """``logits`` as they are, or a copy with -inf for what may not come.
        Raises GrammarError: the guide of the answer allows no token."""
        if self._forced:
            return _only(self._forced[:1], logits)
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
        """Go on by the token chosen. Raises GrammarError: the guide of the answer does not allow it."""
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
        """The answer begins, maybe in the very token that ended the mark."""
        self._place, self._after_end = _ANSWER, not rest
        if self._answer is not None:
            for token in self._tokenizer.encode(rest.decode(errors="replace").lstrip(), False):
                self._answer.accept(token)


def _only(tokens: list[int], logits: Logits) -> Logits:
    masked = np.full_like(logits, -np.inf)
    masked[tokens] = 0
    return masked
