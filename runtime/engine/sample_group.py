"""Samples of one request, drawn side by side, and their ranking."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmc.errors import ProcessorError, text_of
from llmc.runtime.api.results import Delta, FinishReason, Output
from llmc.runtime.engine.branch import Branch, BranchGroup, RequestState, SamplerOutput
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.sampling.processors import Guide
from llmc.runtime.sampling.samplers import Choice, Sampler
from llmc.runtime.search.consensus import SIMILARITIES, compute_expected_similarities
from llmc.runtime.speculation.speculator import Speculator, verify
from llmc.runtime.text.detokenizer import TextStream


class Sample(Branch):
    """A branch whose tokens are chosen one by one, and streamed as text.

    Args:
        ends: tokens that end it, each with the reason to tell.
        guide: ends it where no token is allowed.
        speculate: makes its speculator by key.
    """

    def __init__(
        self,
        group: "SampleGroup",
        index: int,
        sampler: Sampler,
        text: TextStream,
        ends: Mapping[int, int | None],
        guide: Guide | None = None,
        speculate: Callable[[int], Speculator] | None = None,
    ) -> None:
        super().__init__(group, list(group.request.prompt))
        self.index = index
        self.tokens = self.context  # prompt and new tokens; the context is the same list until it slides
        self.sampler = sampler
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._text = text
        self._parts: list[str] = []
        self._ends = ends
        self._guide = guide
        self.speculates = speculate is not None
        self._speculator = None if speculate is None else speculate(self.key)
        self._rows = 1  # of the step that the last drafts were for
        self._logprobs: list[TokenLogprobs] = []

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def takes_ranked(self) -> bool:
        return self.sampler.takes_ranked

    @property
    def slid(self) -> bool:
        """True once its row holds less than all of its tokens."""
        return self.context is not self.tokens

    def propose(self, room: int, rows: int) -> list[int]:
        self._rows = rows
        if self._speculator is None or self.slid:
            return []
        wanted = self.request.params.max_tokens - (len(self.tokens) - len(self.request.prompt)) - 1
        return self._speculator.drafts(self.tokens, max(0, min(room, wanted)), rows)

    def sample(self, logits: Logits) -> SamplerOutput["Sample"]:
        """Draw tokens as long as they agree with the drafts, and one more."""
        output: SamplerOutput[Sample] = SamplerOutput(self)
        choices = output.choices

        def token(i: int) -> int:
            tokens = [*self.tokens, *(choice.token for choice in choices)] if choices else self.tokens
            choices.append(self.sampler(logits[i], tokens))
            return choices[-1].token

        try:
            for _ in verify(self.drafts, token):
                if self._guide is not None and self._guide.finished:
                    break
        except BaseException as error:  # noqa: BLE001  # raised again where the request is known
            output.error = error
        return output

    def commit(self, choices: Sequence[Choice]) -> None:
        """Append tokens and stream them, until the sample ends."""
        for choice in choices:
            self.request.emit(self._take(choice, latest=choice is choices[-1]))
            if self.finish_reason is not None:
                return

    def note_drafts(self, output: SamplerOutput["Sample"]) -> None:
        if self.drafts:
            self.request.timeline.draft(len(self.drafts), len(output.choices) - 1)
        if self._speculator is not None:
            self._speculator.note_committed(len(self.drafts), len(output.choices), self._rows)

    def close(self) -> None:
        if self._speculator is not None:
            self._speculator.close()

    def make_output(self) -> Output:
        """The finished completion, with its mean log-probability where ``best_of`` ranks it."""
        assert self.finish_reason is not None
        params, score = self.request.params, None
        if params.best_of is not None:
            score = sum(item.logprob for item in self._logprobs) / len(self._logprobs)
        return Output(
            index=self.index,
            text="".join(self._parts),
            token_ids=tuple(self.new_tokens),
            finish_reason=self.finish_reason,
            seed=self.sampler.seed,
            score=score,
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            stop_reason=self._stop_reason,
        )

    def _take(self, choice: Choice, latest: bool) -> Delta:
        token = choice.token
        self.tokens.append(token)
        if self.slid:
            self.context.append(token)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        self._logprobs += logprobs
        self.finish_reason, text = self._judge(token, latest)
        if text:
            self._parts.append(text)
        return Delta(self.index, text, (token,), logprobs if self.request.params.logprobs is not None else ())

    def _judge(self, token: int, latest: bool) -> tuple[FinishReason | None, str]:
        """The reason for which ``token`` ends the output, if it does, and the text that became final."""
        count, params = len(self.tokens) - len(self.request.prompt), self.request.params
        ended = token in self._ends and count > params.min_tokens
        silent = ended and not params.include_stop_str_in_output
        text = "" if silent else self._text.push(token, stopping=count > params.min_tokens)
        # A fulfilled grammar, where ignore_eos leaves no other end.
        complete = latest and self._guide is not None and self._guide.finished
        ended = ended or complete or self._text.stopped is not None or self._criterion_holds(text)
        if not ended and count < params.max_tokens:
            return None, text
        if self._text.stopped is None:
            text += self._text.finish()
            ended = ended or self._text.stopped is not None  # the rest may complete a stop string
        self._stop_reason = self._text.stopped or (self._ends.get(token) if count > params.min_tokens else None)
        return ("stop" if ended else "length"), text

    def _criterion_holds(self, text: str) -> bool:
        criteria = self.request.request.stopping_criteria
        if not criteria:
            return False
        so_far = "".join(self._parts) + text
        try:
            return any(bool(criterion(self.new_tokens, so_far)) for criterion in criteria)
        except BaseException as error:  # a client's function may raise anything
            raise ProcessorError(f"a stopping criterion raised {text_of(error)}") from error


class SampleGroup(BranchGroup[Sample]):
    """The samples of one request: the first feeds the prompt, the others fork from a row that holds it."""

    def __init__(self, request: RequestState, make: Callable[["SampleGroup", int], Sample]) -> None:
        super().__init__(request)
        self.draws = request.params.best_of or request.params.n
        self._make = make
        self._finished: list[Output] = []  # samples would keep the prompt, a sampler and a guide each
        self._first_logits: Logits | None = None

    @property
    def prompt_is_known(self) -> bool:
        """True once the logits after the prompt are kept for further samples."""
        return self._first_logits is not None

    def branch(self, index: int) -> Sample:
        return self._make(self, index)

    def begin(self, scheduler: Scheduler, branch: Sample, logits: Logits | None) -> bool:
        """Choose the first token; the first sample to come so far lets the others in."""
        if logits is not None:
            scheduler.keep_prefix(branch, len(self.request.prompt))
            if self.draws > 1 and self._first_logits is None:
                self._first_logits = logits.copy()
                scheduler.invite(self, self.draws)
        first = self._first_logits if logits is None else logits
        assert first is not None
        return self._commit(scheduler, branch, [branch.sampler(first, branch.tokens)])

    def step(self, scheduler: Scheduler, outputs: Sequence[SamplerOutput[Sample]]) -> bool:
        done = False
        for output in outputs:
            sample = output.branch
            if output.choices:
                sample.note_drafts(output)
                done = self._commit(scheduler, sample, output.choices, hand_on=True)
            # Drafts may have been verified beyond the end of the sample, where a guide has no token left.
            if output.error is not None and sample.finish_reason is None:
                raise output.error
        return done

    def _commit(self, scheduler: Scheduler, sample: Sample, choices: Sequence[Choice], hand_on: bool = False) -> bool:
        """Append tokens. With ``hand_on`` the row of a sample that ends may go to the next one."""
        sample.commit(choices)
        if sample.finish_reason is not None:
            if not (hand_on and not sample.slid and scheduler.hand_on(sample)):
                scheduler.release(sample, remember=not sample.slid)
            self._finished.append(sample.make_output())
        return len(self._finished) == self.draws

    def outputs(self) -> list[Output]:
        outputs = sorted(self._finished, key=lambda output: output.index)
        params = self.request.params
        if params.consensus is not None:
            scores = compute_expected_similarities([output.text for output in outputs], SIMILARITIES[params.consensus])
            outputs = [replace(output, score=score) for output, score in zip(outputs, scores, strict=True)]
        elif params.best_of is None:
            return outputs
        return sorted(outputs, key=lambda output: -(output.score or 0.0))[: params.n]
