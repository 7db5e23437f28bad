"""From logits to results: draw tokens, commit them, end requests and rank their outputs."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from llmc.runtime.api.handle import mark_serving
from llmc.runtime.api.results import GenerationResult
from llmc.runtime.engine.branch import Branch, RequestState, SamplerOutput, name_error
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.host import threads
from llmc.runtime.observe.logs import event
from llmc.runtime.runner.prefill import Floats
from llmc.runtime.sampling.logprobs import prompt_logprobs

log = logging.getLogger(__name__)


class OutputProcessor:
    """Draw tokens, hand them to their requests, and end requests.

    Args:
        guarded: a context in which an error ends one request alone.
        ended: called with the number of a request that is done, from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guarded: Callable[[RequestState], AbstractContextManager[None]],
        ended: Callable[[int], None],
    ) -> None:
        self._scheduler = scheduler
        self._guarded = guarded
        self._ended = ended

    def keep_prompt_logprobs(self, branch: Branch, start: int, logits: Floats) -> None:
        """Keep the log-probabilities that a request wants of the prompt chunk that begins at ``start``."""
        request = branch.request
        following = branch.context[start + 1 : branch.cached + 1]
        top = request.params.prompt_logprobs
        if top is not None and len(request.prompt_logprobs) < len(request.prompt) - 1:
            request.prompt_logprobs += prompt_logprobs(logits[: len(following)], following, top)

    def begin(self, branch: Branch, logits: Floats | None = None) -> None:
        """Go on with a branch whose whole context is in its row, from the logits [V] after it; unless its request
        failed with another of its branches."""
        if branch not in branch.group.branches:
            return
        with self._guarded(branch.request):
            if branch.group.begin(self._scheduler, branch, logits):
                self._end(branch.request)

    def sample(self, call: Sequence[Branch], logits: Floats) -> list[SamplerOutput[Any]]:
        """Draw the tokens of a call's branches, from logits [B, 1 + drafts, V]; a dummy row may come after them."""
        return [branch.sample(row) for branch, row in zip(call, logits, strict=False)]

    def commit(self, outputs: Sequence[SamplerOutput[Any]]) -> None:
        by_request: dict[RequestState, list[SamplerOutput[Any]]] = {}
        for output in outputs:
            by_request.setdefault(output.branch.request, []).append(output)
        for request, own in by_request.items():
            with self._guarded(request):
                if request.group.step(self._scheduler, own):
                    self._end(request)

    def _end(self, request: RequestState) -> None:
        """End a request whose tokens are drawn. Comparing its samples may take long, so another thread does it."""
        if request.params.consensus is not None:
            request.comparing = True
            threads.start(partial(self._compare, request), "llmc-comparing")
        else:
            self._deliver(request)

    def _compare(self, request: RequestState) -> None:
        mark_serving()
        self._deliver(request)

    def _deliver(self, request: RequestState) -> None:
        try:
            outputs = request.group.outputs()
            self.close(request, outputs[0].finish_reason, lambda: request.result(outputs))
        except BaseException as error:  # noqa: BLE001  # it reaches the client
            self.close(request, "error", error=name_error(error))
        self._ended(request.number)

    def close(
        self,
        request: RequestState,
        reason: str,
        result: Callable[[], GenerationResult] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Tell the client, and write a line to the log."""
        request.timeline.finish(reason)
        # A kept traceback would keep everything that its frames saw; a failure inside still has it, in its cause.
        request.collector.end(result() if result else None, None if error is None else error.with_traceback(None))
        request.release()
        with suppress(Exception):  # a handler of the application's may fail
            if log.isEnabledFor(logging.INFO):
                event(log, "request ended", **vars(request.timeline.metrics()))
