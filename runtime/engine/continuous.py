"""Continuous batching: requests join and leave the batch between two steps, and prompts are fed beside it in chunks."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import GpuError
from llmc.runtime.api.options import Determinism, EngineOptions, in_pairs
from llmc.runtime.api.results import Delta, Output
from llmc.runtime.engine.input_processor import SINK_TOKENS, Intake
from llmc.runtime.engine.output_processor import Drawn, draw, draw_one, neighbours
from llmc.runtime.engine.ranking import ranked
from llmc.runtime.engine.scheduler import ChunkPacer, Queue
from llmc.runtime.engine.search_group import Lockstep
from llmc.runtime.engine.sequence import Job, Sample, Strand, named
from llmc.runtime.kv.budget import CacheBudget, next_capacity
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.rows import Rows, TornError
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.runner.model_runner import CHUNK_WITH_ALL_LOGITS, make_calls, next_end
from llmc.runtime.sampling import Choice, Logits, prompt_logprobs
from llmc.runtime.sessions import Session
from llmc.runtime.speculation import LENGTHS, Drafter, Ledger, Speculator


@dataclass(frozen=True)
class Sibling:
    """Another sample of a job, waiting for a row; it is made when it gets one."""

    job: Job
    index: int


class ContinuousBatch:
    """Everything that happens on the engine's thread between a request's arrival and its end.

    Args:
        session: the loaded graphs and their cache.
        manifest: of the bundle.
        intake: makes samples and strategies.
        waiting: who waits for rows.
        end: told that a job is done, with what makes its outputs.
        fail: told that it is not, and why.
        metrics: told of every call.
        options: of the engine.
        prefill_chunk: prompt tokens per call.
        budget: bounds the cache.
        prefixes: the prefix cache, or None.
        drafter: guesses tokens, or None.
        pool: threads for sampling, None to sample on the engine's own.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        intake: Intake,
        waiting: Queue,
        *,
        end: Callable[[Job, Callable[[], Sequence[Output]]], None],
        fail: Callable[[Job, BaseException], None],
        metrics: EngineMetrics,
        options: EngineOptions,
        prefill_chunk: int,
        budget: CacheBudget,
        prefixes: PrefixCache | None = None,
        drafter: Drafter | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._session = session
        self._intake = intake
        self._waiting = waiting
        self._end = end
        self._fail = fail
        self._options = options
        self._chunk = prefill_chunk
        self._budget = budget
        self._prefixes = prefixes
        self._drafter = drafter
        self._pool = pool
        self._rows = Rows(session.cache)
        self._in_pairs = in_pairs(manifest, options.determinism) and intake.max_rows > 1
        self._costs = StepCosts()
        self._calls = make_calls(
            options.determinism, session, manifest, self._rows, self._costs, metrics, in_pairs=self._in_pairs
        )
        self._pacer = ChunkPacer(options.decode_steps_per_chunk)
        self._speculators: dict[int, Speculator] = {}
        self._ledger = Ledger()
        self._lengths = tuple(length for length in LENGTHS if length <= options.max_draft_tokens)
        self._lockstep: dict[Job, Lockstep] = {}
        self._cache_per_token = (manifest.device or manifest.memory).cache_per_token
        self._limit = intake.max_context + (options.determinism is Determinism.STRICT)

    @property
    def reserved_bytes(self) -> int:
        """Address space of the cache, in the memory that it lies in."""
        return self._session.cache.rows * self._session.cache.capacity * self._cache_per_token

    @property
    def used_bytes(self) -> int:
        """What valid positions fill of it."""
        return sum(strand.cached for strand in self._strands()) * self._cache_per_token

    # ------------------------------------------------------------------------------------------ admission

    @property
    def _promised(self) -> int:
        """Rows that are held, or that those in lockstep will fork into."""
        return len(self._rows) + sum(job.width - len(job.strands) for job in self._lockstep)

    def admit(self) -> None:
        """Give rows to those who wait, in order; nobody passes one who is too wide for what is free."""
        while (unit := self._waiting.peek()) is not None:
            job = unit if isinstance(unit, Job) else unit.job
            needed = self._promised + (job.width if unit is job else 1)
            if needed > self._intake.max_rows:
                return
            longest = max([job.final_length, *(strand.job.final_length for strand in self._strands())])
            positions = next_capacity(min(longest, self._intake.max_context), self._limit)
            if not self._budget.fits(positions, needed):
                if len(self._rows):
                    return
                self._fail(job, self._budget.refusal(positions, job.width))
                continue
            self._waiting.pop()
            with self._guarded(job):
                self._start(job) if unit is job else self._join(job, unit.index)

    def _start(self, job: Job) -> None:
        """Place a job's first strand."""
        strategy = self._intake.strategy(job)
        if strategy is not None:
            self._lockstep[job] = Lockstep(job, strategy, self._rows)
        strand = self._intake.sample(job, 0) if strategy is None else Strand(job, list(job.prompt))
        self._place(strand)
        job.timeline.admit(strand.cached)

    def _join(self, job: Job, index: int) -> None:
        """Place another sample of a job: with a copy of the prompt from one that still has it, if there is one."""
        sample = self._intake.sample(job, index)
        donor = next((strand for strand in job.strands if strand.holds_prompt), None)
        assert job.first_logits is not None
        if donor is None and job.params.max_tokens > 1:
            self._place(sample)
            return
        job.strands.append(sample)
        if donor is not None:
            self._reserve(len(self._rows) + 1, len(job.prompt))
            self._rows.fork(donor, sample, len(job.prompt))
        self._commit(sample, [sample.choose(job.first_logits)])

    def _place(self, strand: Strand) -> None:
        """A row, with what the prefix cache has of its context; at least two tokens are left to feed."""
        strand.job.strands.append(strand)
        self._reserve(len(self._rows) + 1, len(strand.context))
        self._rows.admit(strand)
        limit = len(strand.context) - 2
        if self._prefixes is None or limit < self._prefixes.block or self._wants_prompt(strand.job):
            return
        with self._prefixes.match(strand.context, limit) as match:
            for i, values in enumerate(match.blocks):
                start = i * self._prefixes.block
                self._session.cache.write(strand.row, start, start + self._prefixes.block, values)
        strand.cached = strand.fed_from = match.length

    def _wants_prompt(self, job: Job) -> bool:
        """Whether every position of the prompt has to be computed."""
        lockstep = self._lockstep.get(job)
        return job.params.prompt_logprobs is not None or (
            lockstep is not None and lockstep.strategy.prompt_chunk_outputs
        )

    # ------------------------------------------------------------------------------------------ prefill

    def feed(self) -> None:
        """Feed the next chunk of one prompt: of one not yet begun, or of the oldest, if it is its time."""
        feeding = [strand for strand in self._strands() if strand.row >= self._rows.decoding]
        if not feeding:
            return
        due = self._pacer.due
        strand = min(feeding, key=lambda item: (item.begun != due, item.key))
        first = not strand.begun
        if not self._pacer.allows(first, self._rows.decoding > 0):
            return
        with self._guarded(strand.job):
            begun = time.perf_counter()
            self._feed_chunk(strand)
            self._pacer.fed(time.perf_counter() - begun, first)

    def _feed_chunk(self, strand: Strand) -> None:
        job, start, total = strand.job, strand.cached, len(strand.context)
        every = self._wants_prompt(job) and start < len(job.prompt)
        end = next_end(start, total, min(self._chunk, CHUNK_WITH_ALL_LOGITS) if every else self._chunk)
        outputs = range(end - start) if every else [end - start - 1] if end == total else []
        logits = self._calls.feed(strand, end, outputs)
        if every:
            self._note_prompt(strand, logits, end)
        strand.cached = end
        if end == total:
            self._fed(strand, logits[-1])

    def _note_prompt(self, strand: Strand, logits: NDArray[np.float32], end: int) -> None:
        """Keep what a job wants to know of its prompt: log-probabilities, hidden states."""
        job = strand.job
        if job.params.prompt_logprobs is not None and len(job.prompt_logprobs) < len(job.prompt) - 1:
            following = strand.context[strand.cached + 1 : end + 1]
            job.prompt_logprobs += prompt_logprobs(logits[: len(following)], following, job.params.prompt_logprobs)
        if job in self._lockstep and self._session.hidden is not None:
            job.prompt_hidden.append(self._session.hidden[0].copy())

    def _fed(self, strand: Strand, logits: Logits) -> None:
        """The whole context is in the row: choose the first token, and let the job's other samples in."""
        job = strand.job
        self._rows.promote(strand)
        if isinstance(strand, Sample):
            self._keep_prefix(strand, len(job.prompt))
            if job.first_logits is None and job.draws > 1:
                self._invite_siblings(job, logits)
            self._commit(strand, [strand.choose(logits)])
        else:
            self._reserve(len(self._rows) + job.width - 1, strand.cached + 1)
            hidden = np.concatenate(job.prompt_hidden) if job.prompt_hidden else None
            self._advanced(job, self._lockstep[job].start(strand, logits, hidden))

    def _invite_siblings(self, job: Job, logits: Logits) -> None:
        assert job.ticket is not None
        job.first_logits = logits.copy()
        for index in range(1, job.draws):
            self._waiting.again(job.ticket, Sibling(job, index))

    def _keep_prefix(self, strand: Strand, length: int) -> None:
        """Remember the first ``length`` positions of the row."""
        if self._prefixes is not None and length >= self._prefixes.block:
            read = partial(self._session.cache.read_blocks, strand.row, self._prefixes.block)
            self._prefixes.insert(strand.context[:length], read)

    # ------------------------------------------------------------------------------------------ decode

    def decode(self) -> None:
        """One step of every strand that decodes: in one call, but for those that have drafts to verify."""
        for strand in [strand for strand in self._decoding() if len(strand.context) > self._intake.max_context]:
            self._slide(strand)
        drafts: dict[int, list[int]] = {}
        strands = self._with_room(drafts)
        if not strands:
            return
        begun = time.perf_counter()
        drawn: list[Drawn] = []
        failed: dict[Job, BaseException] = {}
        for group in neighbours(strands, drafts):
            try:
                drawn += self._run(group, drafts)
            except Exception as error:  # the call that they share failed
                if is_fatal(error):
                    raise
                failed |= {strand.job: named(error) for strand in group}
        self._pacer.decoded(time.perf_counter() - begun)
        for item in drawn:  # all of them before anyone leaves: whoever leaves has rows moved
            item.strand.cached += max(1, len(item.choices))
        for job, reason in failed.items():
            self._fail(job, reason)
        for job in dict.fromkeys(strand.job for strand in strands if strand.job not in failed):
            with self._guarded(job):
                self._take(job, [item for item in drawn if item.strand.job is job], len(strands))

    def _with_room(self, drafts: dict[int, list[int]]) -> list[Strand]:
        """Those who decode, their drafts, and room in the cache for all; a job for which there is none fails."""
        while strands := self._decoding():
            for strand in strands:
                if strand.key not in drafts:
                    with self._guarded(strand.job):
                        drafts[strand.key] = self._drafts(strand, len(strands))
            if any(strand.row < 0 for strand in strands):  # someone failed, and others have moved
                continue
            longest = max(strands, key=lambda strand: strand.cached + len(drafts[strand.key]))
            with self._guarded(longest.job):
                needed = longest.cached + 1 + len(drafts[longest.key])
                self._reserve(len(self._rows), needed + (self._options.determinism is Determinism.STRICT))
                return strands
        return []

    def _run(self, strands: Sequence[Strand], drafts: dict[int, list[int]]) -> list[Drawn]:
        """Run neighbours in one call and draw their tokens; strands in lockstep get their logits and hidden states."""
        guesses = drafts[strands[0].key]
        if guesses:
            return [draw(strands[0], guesses, self._calls.verify(strands[0], guesses))]
        logits, hidden = self._calls.decode(strands)
        states = [None] * len(strands) if hidden is None else hidden
        work = zip(strands, logits, states, strict=False)  # a call may have a dummy row more
        return list(self._pool.map(draw_one, work) if self._pool and len(strands) > 1 else map(draw_one, work))

    def _drafts(self, strand: Strand, rows: int) -> list[int]:
        """Guesses at a sample's next tokens, as many as pay; none for a strand that does not speculate."""
        if not isinstance(strand, Sample) or (speculator := self._speculator(strand)) is None:
            return []
        room = min(
            self._intake.max_context - len(strand.context),
            strand.job.params.max_tokens - len(strand.new_tokens) - 1,
            self._options.max_draft_tokens,
        )
        return speculator.drafts(strand.tokens, max(0, room), rows)

    def _speculator(self, sample: Sample) -> Speculator | None:
        if self._drafter is None or sample.job.params.speculate is False or sample.context is not sample.tokens:
            return None
        if sample.key not in self._speculators:
            self._speculators[sample.key] = Speculator(
                sample.key,
                self._drafter,
                self._costs,
                self._calls.verify_phase,
                self._lengths,
                self._calls.step_seconds,
                self._ledger,
            )
        return self._speculators[sample.key]

    def _take(self, job: Job, drawn: Sequence[Drawn], rows: int) -> None:
        """What a job's strands drew becomes part of them."""
        if job in self._lockstep:
            self._reserve(len(self._rows) + job.width - len(drawn), drawn[0].strand.cached + 1)
            by_key = {item.strand.key: item for item in drawn}  # rows may have changed places
            ordered = [by_key[strand.key] for strand in self._lockstep[job].strands]
            logits = np.stack([item.logits for item in ordered if item.logits is not None])
            hidden = [item.hidden for item in ordered if item.hidden is not None]
            self._advanced(job, self._lockstep[job].step(logits, np.stack(hidden) if hidden else None))
            return
        for item in drawn:
            assert isinstance(item.strand, Sample)
            if item.choices:
                self._note_drafts(item, rows)
                self._commit(item.strand, item.choices)
            # Drafts may have been verified beyond the end of the sample, where a guide has no token left.
            if item.error is not None and item.strand.finish_reason is None:
                raise item.error

    def _note_drafts(self, item: Drawn, rows: int) -> None:
        if item.drafted:
            item.strand.job.timeline.draft(item.drafted, len(item.choices) - 1)
        if (speculator := self._speculators.get(item.strand.key)) is not None:
            speculator.committed(item.drafted, len(item.choices), rows)

    def _slide(self, strand: Strand) -> None:
        """The context is full: go on with its start and its recent half, fed anew."""
        assert isinstance(strand, Sample)
        strand.job.truncated_tokens += strand.slide(SINK_TOKENS, self._intake.max_context // 2)
        strand.job.timeline.overflow()
        self._rows.demote(strand)

    # ------------------------------------------------------------------------------------------ results

    def _commit(self, sample: Sample, choices: Sequence[Choice]) -> None:
        """Append tokens to a sample, until it ends."""
        for choice in choices:
            sample.job.emit(sample.take(choice, latest=choice is choices[-1]))
            if sample.finish_reason is not None:
                self._finish(sample)
                return

    def _finish(self, sample: Sample) -> None:
        job = sample.job
        if self._options.determinism is Determinism.FAST and sample.context is sample.tokens:
            self._keep_prefix(sample, sample.cached)
        self._free(sample)
        job.finished.append(sample)
        if len(job.finished) == job.draws:
            self._end(job, partial(ranked, job))

    def _advanced(self, job: Job, done: bool) -> None:
        """A strategy made a step."""
        if not done:
            job.timeline.token()
            return
        found = self._lockstep.pop(job).strategy.outputs()
        outputs = [self._intake.output(job, index, item) for index, item in enumerate(found)]
        for output in outputs:
            job.emit(Delta(output.index, output.text, output.token_ids), timed=False)
        self._end(job, lambda: outputs)

    def drop(self, job: Job) -> None:
        """Take a job out of the queue and off its rows."""
        self._waiting.remove(lambda unit: unit is job or getattr(unit, "job", None) is job)
        for strand in list(job.strands):
            self._free(strand)
        self._lockstep.pop(job, None)

    def abandon(self, jobs: Iterable[Job]) -> list[Job]:
        """Take every row from who holds it, for nobody knows what is in them; which of ``jobs`` that was."""
        held = [strand for job in jobs for strand in job.strands if strand.row >= 0]
        self._rows.clear()
        for strand in held:  # one that was about to leave may be in no row's place any more
            strand.row = -1
        return list(dict.fromkeys(strand.job for strand in held))

    def _free(self, strand: Strand) -> None:
        if strand.row >= 0:
            self._rows.release(strand)
        strand.job.strands.remove(strand)
        if (speculator := self._speculators.pop(strand.key, None)) is not None:
            speculator.close()

    @contextmanager
    def _guarded(self, job: Job) -> Iterator[None]:
        """What goes wrong inside is the end of this job and of no other, unless it concerns all rows."""
        try:
            yield
        except BaseException as error:  # even a client's SystemExit is not the engine's end
            if is_fatal(error):
                raise
            self._fail(job, named(error))

    # ------------------------------------------------------------------------------------------ the cache

    def _strands(self) -> list[Strand]:
        """Who holds a row, in the order of rows."""
        return [strand for row in range(len(self._rows)) if isinstance(strand := self._rows.at(row), Strand)]

    def _decoding(self) -> list[Strand]:
        return self._strands()[: self._rows.decoding]

    def _reserve(self, rows: int, positions: int) -> None:
        """Make room in the cache, in steps; a batch that runs in pairs of rows needs an even number of them."""
        self._session.cache.grow(rows + (rows % 2 if self._in_pairs else 0), max(positions, 1), self._limit)


def is_fatal(error: BaseException) -> bool:
    """Whether it concerns everyone who holds a row."""
    return isinstance(error, TornError) or is_lost(error)


def is_lost(error: BaseException) -> bool:
    """Whether nothing in this process can use the GPU any more."""
    return isinstance(error, GpuError) and error.lost
