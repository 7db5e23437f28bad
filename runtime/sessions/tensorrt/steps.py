"""One call of TensorRT's on the device: how it is queued, and how it is recorded and replayed.

Inputs go up in one copy and candidates come down in one, from and to memory that never moves; so a whole step, copies
included, can be recorded as a CUDA graph. Logits are copied after it, where they are asked for.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import GpuError, LlmcError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.sessions.cuda.blocks import Block, Outputs, Part, Shape, size_of
from llmc.runtime.sessions.tensorrt.engine import Context

log = logging.getLogger(__name__)

# Steps that are kept with their recordings: one for each of 1 to 8 rows, in two buckets. The memory plan counts 6 MB of
# the GPU's memory for each in a model of 16 layers; a board of 8 GB has none for many more.
KEPT_STEPS = 16
# A longer call keeps the device busy for so long that queueing its kernels one by one costs nothing.
RECORDED_TOKENS = 16


@dataclass(frozen=True)
class Call:
    """All that tells one call from another once its numbers are left out; a recorded call has it baked in."""

    profile: int  # of the engine: decode or prefill
    # B, S, O
    rows: int
    sequence: int
    outputs: int
    first_row: int
    attended: int  # cache positions that attention looks at


class Step:
    """A call with its addresses, and its arrays in pinned memory.
    ``fixed``: shapes and addresses of all other tensors: the cache, and which of its positions are attended to."""

    def __init__(
        self,
        call: Call,
        blocks: tuple[Block, Block],
        places: tuple[Mapping[str, Part], Mapping[str, Part]],
        fixed: tuple[Mapping[str, Shape], Mapping[str, int]],
    ) -> None:
        self.call = call
        self.has_run = False
        self.graph = 0
        (taken, given), (inputs, outputs) = blocks, places
        self._taken, self._size = taken, size_of(inputs)
        self.shapes = {**{name: part.shape for name, part in inputs.items()}, **fixed[0]}
        self.addresses = {
            **fixed[1],
            **{name: taken.device + part.offset for name, part in inputs.items()},
            **{name: given.device + part.offset for name, part in outputs.items()},
        }
        self.inputs = {name: taken.array(part) for name, part in inputs.items()}
        self.outputs = Outputs(given, outputs)

    def upload(self, stream: int) -> None:
        self._taken.upload(self._size, stream)


class Steps:
    """Runs steps, and records each when it comes for the second time: from then on it is launched as a whole, kernels
    and copies.

    ``contexts``: for each profile of the engine the one that its calls share.
    """

    def __init__(self, driver: Driver, stream: int, contexts: Sequence[Context]) -> None:
        self._driver = driver
        self._stream = stream
        self._contexts = contexts
        self._last: dict[int, Step] = {}  # whose shapes and addresses the context of a profile has
        self._kept: OrderedDict[Call, Step] = OrderedDict()
        self.records = True

    def find(self, call: Call) -> Step | None:
        step = self._kept.get(call)
        if step is not None:
            self._kept.move_to_end(call)
        return step

    def keep(self, step: Step) -> None:
        """Keep a step that may be recorded, and let the one go that was unused for longest."""
        if step.call.sequence > RECORDED_TOKENS:
            return
        self._kept[step.call] = step
        if len(self._kept) > KEPT_STEPS:
            self._forget(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        while self._kept:
            self._forget(self._kept.popitem()[1])

    def _forget(self, step: Step) -> None:
        graph, step.graph = step.graph, 0
        if graph:
            self._driver.destroy_graph(graph)
        self._last = {profile: last for profile, last in self._last.items() if last is not step}

    def run(self, step: Step, whole: bool = True) -> None:
        """Run a step and wait for it. Its inputs are in its arrays, and then so are its outputs, with the ``whole`` of
        its logits if these are wanted.
        Raises RequestError: its shapes are not in the engine's profile; GpuError: the engine or the GPU fails."""
        self._driver.activate()
        if step.graph:
            if self._last.get(step.call.profile) is not step:  # what was recorded is its context's, as it was set then
                self._prepare(step)
            self._driver.launch(step.graph, self._stream)
        else:
            self._queue(step)
        if whole:
            step.outputs.download_logits(self._stream)
        self._driver.synchronize(self._stream)
        if step.has_run and not step.graph and self.records:  # a plain run, which is over, has set up the library
            step.graph = self._record(step)
        step.has_run = True

    def _queue(self, step: Step) -> None:
        self._prepare(step)
        step.upload(self._stream)
        self._contexts[step.call.profile].run(self._stream)
        step.outputs.download(self._stream)

    def _prepare(self, step: Step) -> None:
        self._last.pop(step.call.profile, None)  # until all are set, they are nobody's
        self._contexts[step.call.profile].prepare(step.shapes, step.addresses)
        self._last[step.call.profile] = step

    def _record(self, step: Step) -> int:
        """Record a step, which does not run meanwhile; 0 where the library forbids it, and where it fails: then no step
        is recorded any more."""
        if not self._contexts[step.call.profile].can_be_recorded(self._stream):
            return 0
        failure: LlmcError | None = None
        graph = 0
        self._driver.begin_capture(self._stream)
        try:
            self._queue(step)
        except LlmcError as error:
            failure = error
        try:
            graph = self._driver.end_capture(self._stream)
        except LlmcError as error:  # also for want of memory, which a recorded step holds
            failure = failure or error
        if failure is None:
            return graph
        if isinstance(failure, GpuError) and failure.lost:
            raise failure
        if graph:
            self._driver.destroy_graph(graph)
        log.warning("recording a CUDA graph failed (%s): every kernel is launched by itself", failure)
        self.records = False
        return 0
