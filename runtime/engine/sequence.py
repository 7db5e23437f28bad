"""A request inside the engine: its prompt, and the strands of tokens that grow from it, a cache row each."""

import itertools
from collections.abc import Sequence as List
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError, ProcessorError, text_of
from llmc.runtime.api.handle import Mailbox
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta, FinishReason, GenerationResult, Output, Timings, Usage
from llmc.runtime.engine.scheduler import Waiting
from llmc.runtime.observe.metrics import RequestTimeline
from llmc.runtime.observe.tracing import current_context
from llmc.runtime.sampling import Choice, Guide, Logits, Sampler, SamplingParams, TokenLogprobs
from llmc.runtime.text.detokenizer import TextStream

_KEYS, _NUMBERS = itertools.count(), itertools.count()


class Strand:
    """Tokens of which a prefix lies in a row of the cache.

    Attributes:
        context: the tokens that the row holds or will hold, in order.
        cached: how many of them are in the row. A strand that decodes has all but the last.
        row: its row, -1 without one.
        fed_from: tokens that were in the row before the first chunk: the prefix cache's.
        needs: how many of the largest logits decide its next token, 0 for all of them.
    """

    needs = 0

    def __init__(self, job: "Job", context: list[int]) -> None:
        self.key = next(_KEYS)
        self.job = job
        self.context = context
        self.cached = 0
        self.row = -1
        self.fed_from = 0

    @property
    def holds_prompt(self) -> bool:
        """Whether its row begins with the whole prompt."""
        length = len(self.job.prompt)
        return self.row >= 0 and self.cached >= length and self.context[:length] == self.job.prompt

    @property
    def begun(self) -> bool:
        """Whether a chunk was fed already."""
        return self.cached > self.fed_from


class Sample(Strand):
    """A strand whose tokens are chosen one by one, and streamed as text.

    Attributes:
        tokens: prompt and new tokens; ``context`` is the same list until the window slides.
    """

    def __init__(
        self,
        job: "Job",
        index: int,
        sampler: Sampler,
        text: TextStream,
        ends: frozenset[int],
        guide: Guide | None = None,
    ) -> None:
        super().__init__(job, list(job.prompt))
        self.index = index
        self.tokens = self.context
        self.sampler = sampler
        self.needs = sampler.needs
        self.finish_reason: FinishReason | None = None
        self._text = text
        self._parts: list[str] = []
        self._ends = ends
        self._guide = guide
        self._logprobs: list[TokenLogprobs] = []

    @property
    def new_tokens(self) -> list[int]:
        """What came after the prompt."""
        return self.tokens[len(self.job.prompt) :]

    def choose(self, logits: Logits) -> Choice:
        """Draw the token after the present ones."""
        return self.sampler(logits, self.tokens)

    @property
    def complete(self) -> bool:
        """Whether its grammar was fulfilled by the tokens drawn so far, and allows no more."""
        return self._guide is not None and self._guide.finished

    def take(self, choice: Choice, latest: bool = True) -> Delta:
        """Append a token, the ``latest`` that was drawn or one before it; afterwards ``finish_reason`` says whether it
        was the last."""
        token = choice.token
        self.tokens.append(token)
        if self.context is not self.tokens:
            self.context.append(token)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        self._logprobs += logprobs
        self.finish_reason, text = self._judge(token, latest)
        if text:
            self._parts.append(text)
        return Delta(self.index, text, (token,), logprobs if self.job.params.logprobs is not None else ())

    def slide(self, sink: int, keep: int) -> int:
        """Leave out the middle of the context, so that its first ``sink`` and last tokens remain, ``keep`` in all, to
        be fed anew; says how many were left out."""
        before = len(self.context)
        self.context = [*self.context[:sink], *self.context[before - keep + sink :]]
        self.cached = self.fed_from = 0
        return before - keep

    def output(self, score: float | None = None) -> Output:
        """The finished completion."""
        assert self.finish_reason is not None
        asked = self.job.params.logprobs is not None
        return Output(
            index=self.index,
            text="".join(self._parts),
            token_ids=tuple(self.new_tokens),
            finish_reason=self.finish_reason,
            seed=self.sampler.seed,
            score=score,
            logprobs=tuple(self._logprobs) if asked else None,
        )

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the new tokens before any processor, for ranking."""
        return sum(item.logprob for item in self._logprobs) / len(self._logprobs)

    def _judge(self, token: int, latest: bool) -> tuple[FinishReason | None, str]:
        """Whether ``token`` ends the output, and the text that became final."""
        count, params = len(self.tokens) - len(self.job.prompt), self.job.params
        ended = token in self._ends and count > params.min_tokens
        text = "" if ended else self._text.push(token, stopping=count > params.min_tokens)
        complete = latest and self.complete  # where ignore_eos leaves no other end
        ended = ended or complete or self._text.stopped is not None or self._criterion_holds(text)
        if not ended and count < params.max_tokens:
            return None, text
        if self._text.stopped is None:
            text += self._text.finish()
            ended = ended or self._text.stopped is not None  # the rest may complete a stop string
        return ("stop" if ended else "length"), text

    def _criterion_holds(self, text: str) -> bool:
        if not self.job.request.stopping_criteria:
            return False
        so_far = "".join(self._parts) + text
        try:
            return any(bool(criterion(self.new_tokens, so_far)) for criterion in self.job.request.stopping_criteria)
        except BaseException as error:  # a client's function may raise anything
            raise ProcessorError(f"a stopping criterion raised {text_of(error)}") from error


class Job:
    """A request on its way.

    Attributes:
        number: names it.
        request: as it came; ``params`` have every default and the seed filled in.
        prompt: the token ids to feed, after any truncation.
        width: rows that it needs at once before it may start.
        draws: samples to be drawn.
        strands: those that hold or wait for a row.
        finished: samples that ended.
        first_logits: after the prompt, for the samples after the first.
        ticket: its place in the queue.
        trace: the client's trace, for spans.
    """

    def __init__(
        self, request: Request, params: SamplingParams, prompt: List[int], mailbox: Mailbox, timeline: RequestTimeline
    ) -> None:
        self.number = next(_NUMBERS)
        self.request = request
        self.params = params
        self.prompt = list(prompt)
        self.mailbox = mailbox
        self.timeline = timeline
        self.width = 1
        self.draws = params.best_of or params.n
        self.strands: list[Strand] = []
        self.finished: list[Sample] = []
        self.first_logits: Logits | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_hidden: list[NDArray[np.float32]] = []
        self.truncated_tokens = 0
        self.ticket: Waiting | None = None
        self.trace = current_context()

    @property
    def deadline(self) -> float:
        """When it fails, on the monotonic clock."""
        limit = self.request.deadline_s
        return float("inf") if limit is None else self.timeline.queued + limit

    @property
    def final_length(self) -> int:
        """Positions that it takes at most."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def streams(self) -> int:
        """How many outputs it streams."""
        return max(self.draws, self.params.num_return_sequences or 1)

    def progress(self) -> str:
        """How far it came, for messages."""
        if self.timeline.admitted is None:
            return "it was still waiting in the queue"
        tokens = len(self.timeline.token_times())
        return f"{tokens} tokens were generated by then" if tokens else "its prompt was still being fed"

    def emit(self, delta: Delta, timed: bool = True) -> None:
        """Hand a piece to the client; ``timed`` if its tokens came just now.

        Raises:
            ProcessorError: the client's function raised.
        """
        if delta.token_ids and timed:
            self.timeline.token(len(delta.token_ids), output=delta.index)
        if self.request.on_delta is not None:
            try:
                self.request.on_delta(delta)
            except BaseException as error:  # a client's function may raise anything
                raise ProcessorError(f"on_delta raised {text_of(error)}") from error
        self.mailbox.put(delta)

    def result(self, outputs: List[Output]) -> GenerationResult:
        """What the client gets at the end."""
        metrics = self.timeline.metrics()
        if self.params.num_beams > 1 or self.params.penalty_alpha is not None:
            completion = sum(len(output.token_ids) for output in outputs)
        else:
            completion = metrics.output_tokens
        seeds = [output.seed for output in outputs if output.seed is not None]
        ttft = metrics.ttft_s or 0.0
        return GenerationResult(
            outputs=tuple(outputs),
            usage=Usage(len(self.prompt), completion, metrics.cached_tokens, self.truncated_tokens),
            timings=Timings(
                ttft_s=ttft,
                decode_s=(metrics.e2e_s or ttft) - ttft,
                prompt_tokens=len(self.prompt) - metrics.cached_tokens,
                decode_tokens=max(len(output.token_ids) for output in outputs) - 1,
                queue_s=metrics.queue_s or 0.0,
            ),
            params=self.params if self.params.seed is not None or not seeds else replace(self.params, seed=seeds[0]),
            metrics=metrics,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
        )


def named(error: BaseException) -> BaseException:
    """``error`` as clients see it: ours as they are, anything else named as a bug."""
    if isinstance(error, LlmcError):
        return error
    wrapped = LlmcError(f"llmc failed inside ({text_of(error)}); please report it")
    wrapped.__cause__ = error
    return wrapped
