"""What Ctrl-C does during an answer, before it, and when nobody types."""

import signal

import pytest

from llmc.cli.keys import Interrupts


class FakeHandle:
    """Counts how often it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


def press(keys: Interrupts) -> None:
    keys.press(signal.SIGINT, None)


def test_one_that_came_while_the_request_was_made_cancels_it():
    keys, handle = Interrupts(), FakeHandle()
    press(keys)
    with keys.cancel_on_interrupt(handle):
        assert handle.cancelled == 1


def test_one_that_had_nothing_to_stop_is_heard_once():
    keys = Interrupts()
    press(keys)
    with pytest.raises(KeyboardInterrupt):
        keys.refuse_pressed()
    keys.refuse_pressed()
