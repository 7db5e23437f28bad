"""What Ctrl-C does during an answer, before it, and when nobody types."""

import signal

import pytest

from llmc.cli.keys import Interrupts, interrupts


class FakeHandle:
    """Counts how often it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


def press(keys: Interrupts) -> None:
    keys.press(signal.SIGINT, None)


def test_one_that_stopped_an_answer_does_not_count_afterwards():
    keys, handle = Interrupts(), FakeHandle()
    with keys.stopping(handle):
        press(keys)
    keys.refuse_pressed()
    assert handle.cancelled == 1


def test_one_that_came_while_the_request_was_made_cancels_it():
    keys, handle = Interrupts(), FakeHandle()
    press(keys)
    with keys.stopping(handle):
        assert handle.cancelled == 1


def test_one_that_had_nothing_to_stop_is_heard_once():
    keys = Interrupts()
    press(keys)
    with pytest.raises(KeyboardInterrupt):
        keys.refuse_pressed()
    keys.refuse_pressed()


@pytest.mark.parametrize("install", [True, False])
def test_the_handler_is_as_before_afterwards(install: bool):
    before = signal.getsignal(signal.SIGINT)
    with interrupts(install):
        assert (signal.getsignal(signal.SIGINT) == before) is not install
    assert signal.getsignal(signal.SIGINT) == before
