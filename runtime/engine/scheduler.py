"""The order of work: admission in a fair order, rows of the cache, and what each step feeds and decodes."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from llmc.bundle import MemoryPlan
from llmc.runtime.api.options import DECODE_STEPS_PER_CHUNK, Determinism, EngineOptions
from llmc.runtime.engine.sequence import RequestState, SamplerOutput, Sequence, SequenceGroup
from llmc.runtime.kv.budget import CacheBudget, next_capacity
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.rows import Rows
from llmc.runtime.runner.model_runner import ModelRunner

# What a step of priority is worth: a request overtakes those with a priority one worse that came at most so many
# requests before it. Finite, so that nobody waits for ever.
ARRIVALS_PER_PRIORITY = 64
# Of layers with states the prefix cache keeps these after so many tokens of a prompt, and near its end: not in the last
# few tokens, in place of which the next turn of a chat may have others.
STATES_EVERY, PROMPT_END = 1024, 8


class Queue:
    """Units that wait, by priority and arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Any]] = []  # place, entry, unit
        self._arrivals, self._entries = itertools.count(1), itertools.count()

    def push(self, unit: Any, priority: int) -> tuple[int, int]:
        """Let ``unit`` wait; its place lets others wait there too, with :meth:`again`."""
        arrival = next(self._arrivals)
        place = (arrival + priority * ARRIVALS_PER_PRIORITY, arrival)
        self.again(place, unit)
        return place

    def again(self, place: tuple[int, int], unit: Any) -> None:
        """Queue a further sample of a request in the place that the request had."""
        heapq.heappush(self._heap, (place, next(self._entries), unit))

    def peek(self) -> Any | None:
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Any:
        return heapq.heappop(self._heap)[-1]

    def remove(self, where: Callable[[Any], bool]) -> None:
        self._heap = [entry for entry in self._heap if not where(entry[-1])]
        heapq.heapify(self._heap)


class ChunkedPrefill:
    """Decides when the next chunk of a prompt may be fed while others decode.

    The first chunk of a prompt goes at once. A further one waits until ``spacing`` decode steps have run since the
    last, and until decoding had as much time as that chunk took. First chunks of others count as steps.

    Args:
        spacing: decode steps between chunks; 0 feeds prompts as fast as possible.
    """

    def __init__(self, spacing: int = DECODE_STEPS_PER_CHUNK) -> None:
        self._spacing = spacing
        self._steps = max(1, spacing)
        self._owed = 0.0

    @property
    def due(self) -> bool:
        """True if a further chunk of a begun prompt runs before the first chunk of a new one."""
        return self._steps >= max(1, self._spacing) and self._owed <= 0

    def allows(self, first_chunk: bool, decoding: bool) -> bool:
        """True if a chunk may be fed now."""
        return first_chunk or not decoding or not self._spacing or self.due

    def note_fed(self, seconds: float, first_chunk: bool) -> None:
        """A chunk was fed and took so long."""
        if first_chunk and not self.due:
            self.note_decoded(seconds)
        else:
            self._steps, self._owed = 0, seconds

    def note_decoded(self, seconds: float) -> None:
        """A decode step ran, or whatever else goes before a further chunk, and took so long."""
        self._steps += 1
        self._owed -= seconds


class Scheduler:
    """Decides who gets a row, which prompt is fed next and who decodes; it sees no logits.

    Rows are packed: sequences that decode first, then those whose prompt is being fed. ``plan`` is of the memory that
    the cache lies in, and ``guarded`` a context in which an error ends one request alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Rows[Sequence],
        *,
        max_rows: int,
        max_context: int,
        budget: CacheBudget,
        options: EngineOptions,
        plan: MemoryPlan,
        guarded: Callable[[RequestState], AbstractContextManager[None]],
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.max_context = max_context
        self._runner = runner
        self._cache = runner.session.cache
        self._rows = rows
        self._budget = budget
        self._guarded = guarded
        self._prefixes = prefixes
        self._queue = Queue()
        self._chunks = ChunkedPrefill(options.decode_steps_per_chunk)
        # Elsewhere no request may depend on what shared batches and verified drafts computed.
        self._remembers = options.determinism is Determinism.FAST
        self._plan = plan
        self._long_after = runner.long_after
        self._heirs: list[Sequence] = []  # of rows that hold their prompt; they begin in the next step
        self._begun = 0.0
        self._first_chunk = False

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the cache may fill without growing, in the memory that it lies in."""
        return self._cache_bytes(self._cache.capacity, self._cache.rows)

    @property
    def used_bytes(self) -> int:
        """Bytes of it that valid positions fill."""
        return sum(self._cache_bytes(sequence.cached) for sequence in self._rows.held)

    def _cache_bytes(self, positions: int, rows: int = 1) -> int:
        parts = self._plan.parts(positions, rows)
        return parts.get("cache", 0) + parts.get("states", 0)

    # ------------------------------------------------------------------------------------------ admission

    def add(self, request: RequestState) -> None:
        request.place = self._queue.push((request.group, 0), request.request.priority)

    def invite(self, group: SequenceGroup[Any], count: int) -> None:
        """Let the sequences 1 ... ``count - 1`` of a group wait for rows."""
        for index in range(1, count):
            self._queue.again(group.request.place, (group, index))

    def admit(self) -> Iterator[Sequence]:
        """Give rows to those who wait, in order; yield those whose prompt is computed already, as many as there are
        rows."""
        heirs, self._heirs = self._heirs, []
        for heir in heirs:
            if heir.row >= 0:  # its request did not fail meanwhile
                yield heir
        begun = 0
        while begun < self.max_rows and (waiting := self._queue.peek()) is not None:
            group, index = waiting
            held = self._rows.held
            needed = len(held) + (1 if index else group.width)
            needed += sum(other.promised for other in {sequence.group for sequence in held})
            if needed > self.max_rows:
                return
            longest = max(request.final_length for request in (group.request, *(item.request for item in held)))
            positions = next_capacity(min(longest, self.max_context), self._runner.max_context)
            fits = self._budget.fits(positions, needed)
            if held and not fits:
                return
            self._queue.pop()
            begins = None
            with self._guarded(group.request):
                if not fits:
                    raise self._budget.refusal(positions, group.width)
                begins = self._start(group.sequence(index))
            if begins is not None:  # handed out where an error is not taken for one of admission
                begun += 1
                yield begins

    def _start(self, sequence: Sequence) -> Sequence | None:
        """Place a sequence; return it if a copy of another's prompt lets it begin."""
        group, length = sequence.group, len(sequence.context)
        donors = (other for other in group.sequences if other.holds_prompt and self._rows.can_fork(other, length))
        donor = next(donors, None)
        if donor is not None:
            self.reserve(1, length)
            self.fork(donor, sequence, length)
        elif group.prompt_is_known and group.request.params.max_tokens == 1:  # needs no row at all
            group.sequences.append(sequence)
        else:
            self._place(sequence)
            if not group.prompt_is_known:
                group.request.timeline.admit(sequence.cached)
            if sequence.is_fed:
                return None
            self._rows.promote(sequence)
        return sequence

    def _place(self, sequence: Sequence) -> None:
        """Give a row, with what the prefix cache has of the context; at least two tokens are left to feed."""
        sequence.group.sequences.append(sequence)
        sequence.long = self._is_long(sequence)
        self.reserve(1, sequence.room)
        self._rows.admit(sequence)
        limit = len(sequence.context) - 2
        if self._prefixes is None or limit < self._prefixes.block or sequence.group.wants_prompt:
            return
        with self._prefixes.match(sequence.names, limit, *sequence.prefix_names) as match:
            if (donor := self._find_donor(sequence, match.length)) is not None:
                self._rows.share(donor, sequence, 0, match.length)
            for i, values in enumerate(match.blocks if donor is None else ()):
                start = i * self._prefixes.block
                self._cache.write(sequence.row, start, start + self._prefixes.block, values)
                self._cache.let_go(sequence.row, start + self._prefixes.block)
            if match.states is not None:
                self._cache.write_states(sequence.row, match.length, match.states)
        sequence.cached = sequence.reused = match.length
        if not self._cache.can_rewind:
            end = len(sequence.context) - PROMPT_END
            sequence.stop = end - end % self._prefixes.block

    def _find_donor(self, sequence: Sequence, length: int) -> Sequence | None:
        """A sequence whose prompt begins with the same tokens, and whose row has them: rows may share their memory."""

        def gives(other: Sequence) -> bool:
            has = other.holds_prompt and length <= len(other.request.prompt) and self._rows.can_fork(other, length)
            same = other.prefix_names == sequence.prefix_names
            return has and same and other.names[:length] == sequence.names[:length]

        return next(filter(gives, self._rows.held), None) if length else None

    # ------------------------------------------------------------------------------------------ steps

    def next_prefill(self) -> list[Sequence]:
        """The sequences to feed now: one not yet begun with those that share its call, or the oldest if a further chunk
        is due."""
        feeding = self._rows.held[self._rows.decoding :]
        if not feeding:
            return []
        due = self._chunks.due
        sequence = min(feeding, key=lambda item: (item.begun != due, item.key))
        self._first_chunk = not sequence.begun
        if not self._chunks.allows(self._first_chunk, self._rows.decoding > 0):
            return []
        self._begun = time.perf_counter()
        behind = itertools.takewhile(_is_new, self._rows.held[sequence.row :])
        return self._runner.share(list(behind)) or [sequence]

    def note_prefilled(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Note that chunks were fed in one call; yield the sequences whose whole context is in their row."""
        self._chunks.note_fed(time.perf_counter() - self._begun, self._first_chunk)
        for sequence in sequences:
            self._let_go(sequence)
            self._copy_states(sequence)
            if sequence.row >= 0 and sequence.cached == len(sequence.context):  # its request did not fail with another
                self._rows.promote(sequence)
                yield sequence

    def next_decode(self) -> list[Sequence]:
        """Choose the sequences that decode in this step, with drafts to verify, and make room for them in the cache."""
        decoding = self._list_decoding()
        full = [item for item in decoding if len(item.context) > self.max_context]
        for sequence in full:
            self._slide(sequence)
        grown = [item for item in decoding if item not in full and item.long != self._is_long(item)]
        for sequence in grown:
            self._switch(sequence)
        decoding = self._list_decoding() if full or grown else decoding
        for sequence in decoding:
            if sequence.speculates and sequence.row >= 0:  # its request did not fail with another sequence
                with self._guarded(sequence.request):
                    most = self.max_context if sequence.long or not self._long_after else self._long_after
                    sequence.drafts = sequence.propose(most - len(sequence.context), len(decoding))
        while decoding := self._list_decoding():
            longest = max(decoding, key=lambda item: len(item.context) + len(item.drafts))
            with self._guarded(longest.request):
                self.reserve(0, len(longest.context) + len(longest.drafts))
                self._begun = time.perf_counter()
                return decoding
        return []

    def note_decoded(self, outputs: Iterable[SamplerOutput[Any]]) -> None:
        """The step's calls were made, and gave these outputs."""
        self._chunks.note_decoded(time.perf_counter() - self._begun)
        for output in outputs:  # all of them before anyone leaves: whoever leaves has rows moved
            output.sequence.cached += output.tokens
            self._let_go(output.sequence)
            if self._remembers:
                self._copy_states(output.sequence)

    def _slide(self, sequence: Sequence) -> None:
        """The context is full: go on with its start and its recent half, fed anew."""
        sequence.request.truncated_tokens += sequence.slide(self.max_context // 2)
        sequence.request.timeline.overflow()
        sequence.long = self._is_long(sequence)
        self._rows.demote(sequence)

    def _is_long(self, sequence: Sequence) -> bool:
        """True if its text has other factors of ropes than short ones."""
        return 0 < self._long_after < sequence.text_length

    def _switch(self, sequence: Sequence) -> None:
        """The text has outgrown the factors of short ones: feed all of it anew, as transformers does."""
        if self._remembers:
            self.keep_prefix(sequence, sequence.cached)
        sequence.begin_anew()
        sequence.long = sequence.switched = True
        self._rows.demote(sequence)

    # ------------------------------------------------------------------------------------------ rows

    def reserve(self, more: int, positions: int) -> None:
        """Make room for ``more`` rows than are held, of so many positions."""
        self._runner.reserve(len(self._rows) + more, positions)

    def fork(self, parent: Sequence, child: Sequence, cached: int) -> None:
        """Give ``child`` a row with the first ``cached`` positions of ``parent``."""
        self._rows.fork(parent, child, cached)
        child.long, child.switched = parent.long, parent.switched
        child.group.sequences.append(child)

    def share(self, source: Sequence, target: Sequence, start: int, cached: int) -> None:
        """Make ``target`` equal to ``source`` up to ``cached`` positions; they agree before ``start``."""
        self._rows.share(source, target, start, cached)
        target.states = 0, None

    def release(self, sequence: Sequence, remember: bool = False) -> None:
        """Take a sequence off its row; with ``remember`` the prefix cache may keep what it holds."""
        if remember and self._remembers:
            self.keep_prefix(sequence, sequence.cached)
        if sequence.row >= 0:
            self._rows.release(sequence)
        sequence.group.sequences.remove(sequence)
        sequence.close()

    def hand_on(self, sequence: Sequence) -> bool:
        """Give the row of a sequence that ends to the next of its group, if that is next in the queue and the row can
        go back to the prompt, which would have to be fed anew otherwise.
        """
        group, length = sequence.group, len(sequence.request.prompt)
        waiting = self._queue.peek()
        if waiting is None or waiting[0] is not group or not sequence.holds_prompt:
            return False
        if not self._rows.can_fork(sequence, length):
            return False
        if self._remembers:
            self.keep_prefix(sequence, sequence.cached)
        heir = group.sequence(self._queue.pop()[1])
        self._rows.hand_on(sequence, heir, length)
        heir.long = sequence.long
        group.sequences.append(heir)
        self._heirs.append(heir)
        self.release(sequence)
        return True

    def keep_prefix(self, sequence: Sequence, length: int) -> None:
        """Let the prefix cache keep the first ``length`` positions of a row, with states those up to the last copy."""
        states = None
        if not self._cache.can_rewind:
            length, states = sequence.states
            if length > len(sequence.context):  # drafts that nobody has drawn yet, or that stood behind a stop
                return
        if self._prefixes is not None and length >= self._prefixes.block:
            read = partial(self._cache.read_blocks, sequence.row, self._prefixes.block)
            names, whole_from = sequence.prefix_names, self._cache.whole_from(sequence.row)
            self._prefixes.insert(sequence.names[:length], read, *names, whole_from, states)

    def _copy_states(self, sequence: Sequence) -> None:
        """Copy the states of a row that is at the border of a block; now and then the prefix cache keeps them at once.

        They cannot be had later, and a prefix is of use only with them.
        """
        if self._prefixes is None or self._cache.can_rewind or sequence.row < 0:
            return
        before, length = sequence.states[0], sequence.cached
        if length % self._prefixes.block == 0 and length != before:
            sequence.states = length, self._cache.read_states(sequence.row, length)
            if length // STATES_EVERY != before // STATES_EVERY:
                self.keep_prefix(sequence, length)

    def _let_go(self, sequence: Sequence) -> None:
        """Free what windows have passed; the prefix cache has the last chance to keep it."""
        if sequence.row < 0 or not self._cache.is_overdue(sequence.row, sequence.cached):
            return
        length, prompt = sequence.cached, sequence.request.prompt
        if sequence.context[: min(length, len(prompt))] == prompt[:length]:  # it did not slide
            self.keep_prefix(sequence, length if self._remembers else min(length, len(prompt)))
        self._cache.let_go(sequence.row, length)

    def drop(self, request: RequestState) -> None:
        """Take a request out of the queue and off its rows."""
        self._queue.remove(lambda unit: unit[0] is request.group)
        for sequence in list(request.group.sequences):
            self.release(sequence)

    def abandon(self, requests: Iterable[RequestState]) -> list[RequestState]:
        """Free all rows after a failed call; return the requests that lost one, or were about to get one."""
        held = [sequence for request in requests for sequence in request.group.sequences]
        self._rows.clear()
        for sequence in held:  # one that was about to leave may be in no row's place any more
            sequence.row = -1
        return list(dict.fromkeys(sequence.request for sequence in held))

    def _list_decoding(self) -> list[Sequence]:
        return list(self._rows.held[: self._rows.decoding])


def _is_new(sequence: Sequence) -> bool:
    """True for a prompt of which nothing was fed, and whose last token's logits are enough."""
    return not (sequence.begun or sequence.wants_every_logit)
