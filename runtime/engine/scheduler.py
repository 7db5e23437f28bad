"""The order of work: admission in a fair order, rows of the cache, and what each step feeds and decodes."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from llmc.bundle import MemoryPlan
from llmc.runtime.api.options import DECODE_STEPS_PER_CHUNK, Determinism, EngineOptions
from llmc.runtime.engine.branch import Branch, BranchGroup, RequestState, SamplerOutput
from llmc.runtime.kv.budget import CacheBudget, next_capacity
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.rows import Rows
from llmc.runtime.runner.model_runner import ModelRunner

# A request overtakes requests of the next worse priority that came at most so many requests before it. Finite, so that
# no request waits for ever.
ARRIVALS_PER_PRIORITY = 64
# Save recurrent states every STATES_EVERY prompt tokens, and once PROMPT_END tokens before the prompt's end, since the
# next chat turn may change the last few.
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
    """Decides which branch gets a row, which prompt is fed next and which branches decode; it sees no logits.

    Rows are packed: first the branches that decode, then the branches whose prompt is being fed.

    Args:
        plan: of the memory that the cache lies in.
        guarded: a context in which an error ends one request alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Rows[Branch],
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
        self._heirs: list[Branch] = []  # of rows that hold their prompt; they begin in the next step
        self._begun = 0.0
        self._first_chunk = False

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the cache may fill without growing, in the memory that it lies in."""
        return self._cache_bytes(self._cache.capacity, self._cache.rows)

    @property
    def used_bytes(self) -> int:
        """Bytes of it that valid positions fill."""
        return sum(self._cache_bytes(branch.cached) for branch in self._rows.held)

    def _cache_bytes(self, positions: int, rows: int = 1) -> int:
        parts = self._plan.parts(positions, rows)
        return parts.get("cache", 0) + parts.get("states", 0)

    # ------------------------------------------------------------------------------------------ admission

    def add(self, request: RequestState) -> None:
        request.place = self._queue.push((request.group, 0), request.request.priority)

    def invite(self, group: BranchGroup[Any], count: int) -> None:
        """Let the branches 1 ... ``count - 1`` of a group wait for rows."""
        for index in range(1, count):
            self._queue.again(group.request.place, (group, index))

    def admit(self) -> list[Branch]:
        """Give free rows to waiting requests, in order. Returns the branches whose prompt is computed already."""
        ready, self._heirs = [heir for heir in self._heirs if heir.row >= 0], []  # of requests that did not fail
        while len(ready) < self.max_rows and (waiting := self._queue.peek()) is not None:
            group, index = waiting
            held = self._rows.held
            needed = len(held) + (1 if index else group.width)
            needed += sum(other.promised for other in {branch.group for branch in held})
            if needed > self.max_rows:
                break
            longest = max(request.final_length for request in (group.request, *(item.request for item in held)))
            positions = next_capacity(min(longest, self.max_context), self._runner.max_context)
            fits = self._budget.fits(positions, needed)
            if held and not fits:
                break
            self._queue.pop()
            with self._guarded(group.request):
                if not fits:
                    raise self._budget.refusal(positions, group.width)
                if (begins := self._start(group.branch(index))) is not None:
                    ready.append(begins)
        return ready

    def _start(self, branch: Branch) -> Branch | None:
        """Give a branch a row; return it if it can begin with a copy of another's prompt."""
        group, length = branch.group, len(branch.context)
        donors = (other for other in group.branches if other.holds_prompt and self._rows.can_fork(other, length))
        donor = next(donors, None)
        if donor is not None:
            self.reserve(1, length)
            self.fork(donor, branch, length)
        elif group.prompt_is_known and group.request.params.max_tokens == 1:  # needs no row at all
            group.branches.append(branch)
        else:
            self._place(branch)
            if not group.prompt_is_known:
                group.request.timeline.admit(branch.cached)
            if branch.is_fed:
                return None
            self._rows.promote(branch)
        return branch

    def _place(self, branch: Branch) -> None:
        """Give a row, with what the prefix cache has of the context; at least two tokens are left to feed."""
        branch.group.branches.append(branch)
        branch.long = self._is_long(branch)
        self.reserve(1, branch.room)
        self._rows.admit(branch)
        limit = len(branch.context) - 2
        if self._prefixes is None or limit < self._prefixes.block or branch.group.wants_prompt:
            return
        with self._prefixes.match(branch.names, limit, branch.prefix_names) as match:
            if (donor := self._find_donor(branch, match.length)) is not None:
                self._rows.copy(donor, branch, 0, match.length)
            for i, values in enumerate(match.blocks if donor is None else ()):
                start = i * self._prefixes.block
                self._cache.write(branch.row, start, start + self._prefixes.block, values)
                self._cache.let_go(branch.row, start + self._prefixes.block)
            if match.states is not None:
                self._cache.write_states(branch.row, match.length, match.states)
        branch.cached = branch.reused = match.length
        if not self._cache.can_rewind:
            end = len(branch.context) - PROMPT_END
            branch.stop = end - end % self._prefixes.block

    def _find_donor(self, branch: Branch, length: int) -> Branch | None:
        """A branch whose row begins with the same tokens: rows may share their memory."""

        def gives(other: Branch) -> bool:
            has = other.holds_prompt and length <= len(other.request.prompt) and self._rows.can_fork(other, length)
            same = other.prefix_names == branch.prefix_names
            return has and same and other.names[:length] == branch.names[:length]

        return next(filter(gives, self._rows.held), None) if length else None

    # ------------------------------------------------------------------------------------------ steps

    def next_prefill(self) -> list[Branch]:
        """The branches to feed now: new ones that share a call, or the oldest one if its next chunk is due."""
        feeding = self._rows.held[self._rows.decoding :]
        if not feeding:
            return []
        due = self._chunks.due
        branch = min(feeding, key=lambda item: (item.begun != due, item.key))
        self._first_chunk = not branch.begun
        if not self._chunks.allows(self._first_chunk, self._rows.decoding > 0):
            return []
        self._begun = time.perf_counter()
        behind = itertools.takewhile(_is_new, self._rows.held[branch.row :])
        return self._runner.group_prefill(list(behind)) or [branch]

    def note_prefilled(self, branches: Iterable[Branch]) -> list[Branch]:
        """Note that chunks were fed in one call. Returns the branches whose whole context is in their row."""
        self._chunks.note_fed(time.perf_counter() - self._begun, self._first_chunk)
        for branch in branches:
            self._let_go(branch)
            self._copy_states(branch)
        whole = [branch for branch in branches if branch.cached == len(branch.context)]
        for branch in whole:
            self._rows.promote(branch)
        return whole

    def next_decode(self) -> list[Branch]:
        """Choose the branches that decode in this step, with drafts to verify, and make room for them in the cache."""
        decoding = self._list_decoding()
        full = [item for item in decoding if len(item.context) > self.max_context]
        for branch in full:
            self._slide(branch)
        grown = [item for item in decoding if item not in full and item.long != self._is_long(item)]
        for branch in grown:
            self._switch(branch)
        decoding = self._list_decoding() if full or grown else decoding
        for branch in decoding:
            if branch.speculates and branch.row >= 0:  # its request did not fail with another branch
                with self._guarded(branch.request):
                    most = self.max_context if branch.long or not self._long_after else self._long_after
                    branch.drafts = branch.propose(most - len(branch.context), len(decoding))
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
        for output in outputs:  # all of them before any branch leaves, which moves rows
            output.branch.cached += output.tokens
            self._let_go(output.branch)
            if self._remembers:
                self._copy_states(output.branch)

    def _slide(self, branch: Branch) -> None:
        """Feed the start and the recent half of a full context anew."""
        branch.request.truncated_tokens += branch.slide(self.max_context // 2)
        branch.request.timeline.overflow()
        branch.long = self._is_long(branch)
        self._rows.demote(branch)

    def _is_long(self, branch: Branch) -> bool:
        """True if its text takes the rope factors of long texts."""
        return 0 < self._long_after < branch.text_length

    def _switch(self, branch: Branch) -> None:
        """Feed a text anew that became long for its rope factors, as transformers does."""
        if self._remembers:
            self.keep_prefix(branch, branch.cached)
        branch.begin_anew()
        branch.long = branch.switched = True
        self._rows.demote(branch)

    # ------------------------------------------------------------------------------------------ rows

    def reserve(self, more: int, positions: int) -> None:
        """Make room for ``more`` rows than are held, of so many positions."""
        self._runner.reserve(len(self._rows) + more, positions)

    def fork(self, parent: Branch, child: Branch, cached: int) -> None:
        """Give ``child`` a row with the first ``cached`` positions of ``parent``."""
        self._rows.fork(parent, child, cached)
        child.long, child.switched = parent.long, parent.switched
        child.group.branches.append(child)

    def copy(self, source: Branch, target: Branch, start: int, cached: int) -> None:
        """Make ``target`` equal to ``source`` up to ``cached`` positions; they agree before ``start``."""
        self._rows.copy(source, target, start, cached)
        target.states = 0, None

    def release(self, branch: Branch, remember: bool = False) -> None:
        """Take a branch off its row; with ``remember`` the prefix cache may keep what it holds."""
        if remember and self._remembers:
            self.keep_prefix(branch, branch.cached)
        if branch.row >= 0:
            self._rows.release(branch)
        branch.group.branches.remove(branch)
        branch.close()

    def hand_on(self, branch: Branch) -> bool:
        """Give the row of a branch that ends to the next branch of its group, which then need not feed the prompt: if
        that one is next in the queue and the row can go back to the prompt's end."""
        group, length = branch.group, len(branch.request.prompt)
        waiting = self._queue.peek()
        if waiting is None or waiting[0] is not group or not branch.holds_prompt:
            return False
        if not self._rows.can_fork(branch, length):
            return False
        if self._remembers:
            self.keep_prefix(branch, branch.cached)
        heir = group.branch(self._queue.pop()[1])
        self._rows.hand_on(branch, heir, length)
        heir.long = branch.long
        group.branches.append(heir)
        self._heirs.append(heir)
        self.release(branch)
        return True

    def keep_prefix(self, branch: Branch, length: int) -> None:
        """Let the prefix cache keep the first ``length`` positions of a row, with states those up to the last copy."""
        states = None
        if not self._cache.can_rewind:
            length, states = branch.states
            if length > len(branch.context):  # it counts drafts that were not committed yet, or came after the end
                return
        if self._prefixes is not None and length >= self._prefixes.block:
            read = partial(self._cache.read_blocks, branch.row, self._prefixes.block)
            whole_from = self._cache.whole_from(branch.row)
            self._prefixes.insert(branch.names[:length], read, branch.prefix_names, whole_from, states)

    def _copy_states(self, branch: Branch) -> None:
        """Copy the states of a row at the border of a block: a prefix is of use only with the states at its end. The
        prefix cache keeps them every :data:`STATES_EVERY` tokens."""
        if self._prefixes is None or self._cache.can_rewind or branch.row < 0:
            return
        before, length = branch.states[0], branch.cached
        if length % self._prefixes.block == 0 and length != before:
            branch.states = length, self._cache.read_states(branch.row, length)
            if length // STATES_EVERY != before // STATES_EVERY:
                self.keep_prefix(branch, length)

    def _let_go(self, branch: Branch) -> None:
        """Free positions that windows have passed, after the prefix cache kept them."""
        if branch.row < 0 or not self._cache.is_overdue(branch.row, branch.cached):
            return
        length, prompt = branch.cached, branch.request.prompt
        if branch.context[: min(length, len(prompt))] == prompt[:length]:  # it did not slide
            self.keep_prefix(branch, length if self._remembers else min(length, len(prompt)))
        self._cache.let_go(branch.row, length)

    def drop(self, request: RequestState) -> None:
        """Take a request out of the queue and off its rows."""
        self._queue.remove(lambda unit: unit[0] is request.group)
        for branch in list(request.group.branches):
            self.release(branch)

    def abandon(self, requests: Iterable[RequestState]) -> list[RequestState]:
        """Free all rows after a failed call; return the requests that lost one, or were about to get one."""
        held = [branch for request in requests for branch in request.group.branches]
        self._rows.clear()
        for branch in held:  # one that was about to leave may be in no row's place any more
            branch.row = -1
        return list(dict.fromkeys(branch.request for branch in held))

    def _list_decoding(self) -> list[Branch]:
        return list(self._rows.held[: self._rows.decoding])


def _is_new(branch: Branch) -> bool:
    """True if nothing of its prompt was fed, and only the last token's logits are wanted."""
    return not (branch.begun or branch.wants_every_logit)
