"""Threads that start or say why not, and that all end before Python does."""

import threading
import weakref
from collections.abc import Iterator

import pytest

from llmc.errors import ResourceError
from llmc.runtime.host import threads


class Limit:
    """So many more threads can be started."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.left == 0:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            start(thread)

        patch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other threads of llmc's, which other tests may have left running."""
    monkeypatch.setattr(threads, "_running", {})
    yield
    threads._leaving = False


@pytest.mark.threat("no-threads")
def test_a_thread_that_cannot_start_is_an_error_and_leaves_nothing(alone, limit):
    with pytest.raises(ResourceError, match="the thread llmc-x cannot be started"):
        threads.start(lambda: None, "llmc-x")
    assert threads._running == {}
    limit.left = 1
    threads.start(lambda: None, "llmc-x").join()
    assert threads._running == {}


def test_all_threads_are_told_to_end_before_any_is_waited_for(alone):
    told = [threading.Event() for _ in range(3)]

    def wait_for_all() -> None:
        for event in told:
            event.wait()

    started = [threads.start(wait_for_all, "llmc-x", event.set) for event in told]
    threads._leave()
    assert not any(thread.is_alive() for thread in started)
    with pytest.raises(ResourceError, match="Python is ending"):
        threads.start(lambda: None, "llmc-x")


def test_what_keeps_a_thread_busy_is_interrupted_after_a_while(alone, monkeypatch):
    class Owner:
        """Of something that takes long."""

    monkeypatch.setattr(threads, "GRACE_S", 0.01)
    monkeypatch.setattr(threads, "_interrupts", weakref.WeakKeyDictionary())
    busy, gone, owner, told = threading.Event(), threading.Event(), Owner(), threading.Event()
    threads.on_leaving(owner, busy.set)
    threads.on_leaving(Owner(), gone.set)
    thread = threads.start(busy.wait, "llmc-x", told.set)
    threads._leave()
    assert told.is_set() and not thread.is_alive() and not gone.is_set()
