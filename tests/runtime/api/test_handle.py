"""A request's other end: read and awaited from threads and event loops, cancelled, timed out, dropped."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from doubles.brakes import Brake
from doubles.refusals import about

from llmc.errors import CancelledError, ProcessorError, UsageError
from llmc.runtime.api.handle import Handle, OutputCollector
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta
from llmc.runtime.sampling.params import SamplingParams

PATIENCE = 120
SOON = 0.02  # seconds after which a wait for what does not come ends
PROMPT = [11, 12, 13, 14]
LONG = SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
RESULT: Any = object()


class Pieces:
    """A mailbox and its handle; counts how often the request is cancelled."""

    def __init__(self, outputs: int = 1, keep: bool = False) -> None:
        self.mailbox = OutputCollector()
        self.cancelled = 0
        self.handle: Handle | None = Handle(self.mailbox, self._cancel, outputs, keep)

    def _cancel(self) -> bool:
        self.cancelled += 1
        self.mailbox.end(None, CancelledError("cancelled"))
        return self.cancelled == 1

    def put(self, *texts: str) -> None:
        for number, text in enumerate(texts):
            self.mailbox.put(Delta(0, text, (number,)))


def later(*actions: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(SOON, lambda: [action() for action in actions])
    timer.start()
    return timer


def test_iterating_gives_the_texts_that_are_not_empty_and_collects_every_token():
    pieces = Pieces()
    pieces.put("a", "", "b")
    pieces.mailbox.end(RESULT)
    assert list(pieces.handle) == ["a", "b"]
    assert pieces.handle.token_ids == [0, 1, 2]
    assert list(pieces.handle) == []
    assert pieces.handle.result() is RESULT


def test_texts_of_several_outputs_are_not_mixed():
    handle = Pieces(outputs=2).handle
    with pytest.raises(UsageError, check=about("n")):
        iter(handle)

    async def read() -> None:
        async for _ in handle:
            pass

    with pytest.raises(UsageError, check=about("n")):
        asyncio.run(read())


def test_pieces_come_before_the_error_that_ended_the_request():
    pieces = Pieces()
    pieces.put("a")
    pieces.mailbox.end(None, ProcessorError("mine"))
    assert next(pieces.handle) == "a"
    for wait in (lambda: next(pieces.handle), pieces.handle.result, lambda: list(pieces.handle.events())):
        with pytest.raises(ProcessorError, match="mine"):
            wait()


def test_a_wait_that_takes_too_long_ends_and_the_request_goes_on():
    pieces = Pieces()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.02 s; it goes on"):
        pieces.handle.result(SOON)
    with pytest.raises(TimeoutError, match=r"nothing came within 0\.02 s; the request goes on"):
        next(pieces.handle.events(SOON))
    assert (pieces.cancelled, pieces.handle.done) == (0, False)
    pieces.put("a")
    pieces.mailbox.end(RESULT)
    assert list(pieces.handle) == ["a"]


@pytest.mark.parametrize(("ended", "keep", "cancelled"), [(False, False, 1), (True, False, 1), (False, True, 0)])
def test_a_dropped_handle_cancels_unless_someone_else_listens(ended, keep, cancelled):
    """After the end the cancellation finds nothing to do; that is the engine's business."""
    pieces = Pieces(keep=keep)
    if ended:
        pieces.mailbox.end(RESULT)
    pieces.handle = None
    assert pieces.cancelled == cancelled
    assert pieces.mailbox.result is (RESULT if ended else None)


def test_an_event_loop_reads_and_awaits(make_engine, alone):
    engine = make_engine()

    async def client(seed: int) -> tuple[str, Any, list[int]]:
        params = SamplingParams(max_tokens=10, temperature=1.0, seed=seed, ignore_eos=True)
        handle = engine.submit(Request(PROMPT, params))
        text = "".join([piece async for piece in handle])
        return text, await handle, alone(PROMPT, params)

    async def main() -> list[Any]:
        return await asyncio.gather(*map(client, range(8)))

    for text, result, tokens in asyncio.run(main()):
        assert (result.text, list(result.token_ids)) == (text, tokens)


def test_what_comes_from_another_thread_wakes_the_loop():
    pieces = Pieces()

    async def main() -> tuple[list[str], Any]:
        timer = later(lambda: pieces.put("a", "b"))
        read = [await anext(pieces.handle.events_async())]
        timer.join()
        waiting = asyncio.ensure_future(asyncio.wait_for(pieces.handle, PATIENCE))
        await asyncio.sleep(SOON)
        later(lambda: pieces.put("c"), lambda: pieces.mailbox.end(RESULT)).join()
        result = await waiting
        return [*(delta.text for delta in read), *[piece async for piece in pieces.handle]], result

    assert asyncio.run(main()) == (["a", "b", "c"], RESULT)


@pytest.mark.parametrize("read", [False, True])
def test_cancelling_a_task_cancels_its_request(make_engine, remembering, read):
    engine = make_engine(remembering())
    brake = Brake(3)

    async def client(handle: Handle, reading: asyncio.Event) -> None:
        async for _ in handle.events_async():
            reading.set()
            if not read:
                break
        await handle

    async def main() -> None:
        reading = asyncio.Event()
        handle = engine.submit(Request(PROMPT, LONG, stopping_criteria=[brake]))
        task = asyncio.ensure_future(client(handle, reading))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        brake.let_go()
        with pytest.raises(CancelledError):
            await handle

    asyncio.run(main())
    assert engine.metrics.snapshot().requests["cancelled"] == 1


def test_no_piece_is_missed_however_threads_and_readers_meet():
    """Pieces come while readers of two loops look, wait, are woken and leave."""
    pieces, count = Pieces(), 3000

    def read() -> list[int]:
        async def main() -> list[int]:
            return [token async for delta in pieces.handle.events_async() for token in delta.token_ids]

        return asyncio.run(asyncio.wait_for(main(), PATIENCE))

    def bring() -> None:
        for number in range(count):
            pieces.mailbox.put(Delta(0, "a", (number,)))
            if number % 7 == 0:
                time.sleep(0)  # lets readers run dry now and then
        pieces.mailbox.end(RESULT)

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read), pool.submit(read)]
        pool.submit(bring).result(PATIENCE)
        found = [reader.result(PATIENCE) for reader in readers]
    assert sorted(found[0] + found[1]) == list(range(count))
    assert all(tokens == sorted(tokens) for tokens in found)
