"""What Ctrl-C does at the prompt, during an answer, between the two, and when the signal wakes nobody."""

import os
import signal
import threading

import pytest

from llmc.cli.keys import Interrupts, interrupts

PATIENCE_S = 120.0  # for what takes milliseconds; only a failing test waits for so long


class FakeHandle:
    """Counts how often it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


def press(keys: Interrupts) -> None:
    keys.press(signal.SIGINT, None)


def test_at_the_prompt_it_raises_and_elsewhere_not():
    keys = Interrupts()
    with pytest.raises(KeyboardInterrupt), keys.prompting():
        press(keys)
    press(keys)


def test_one_that_comes_while_another_is_dealt_with_is_kept_for_the_next_prompt():
    keys = Interrupts()
    with pytest.raises(KeyboardInterrupt), keys.prompting():
        try:
            press(keys)
        finally:
            press(keys)  # must not raise: it would go through what deals with the first one
    with pytest.raises(KeyboardInterrupt), keys.prompting():
        pytest.fail("the second one is lost")
    with keys.prompting():
        pass


def test_one_that_stopped_an_answer_does_not_count_at_the_prompt():
    keys, handle = Interrupts(), FakeHandle()
    with keys.stopping(handle):
        press(keys)
    with keys.prompting():
        pass
    assert handle.cancelled == 1


def test_one_that_came_while_the_request_was_made_cancels_it():
    keys, handle = Interrupts(), FakeHandle()
    press(keys)
    with keys.stopping(handle):
        assert handle.cancelled == 1


def test_what_python_makes_of_two_handlers_in_a_row_is_ctrl_c_too():
    keys = Interrupts()
    with pytest.raises(KeyboardInterrupt), keys.prompting():
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()
    with pytest.raises(SystemError, match="something else"), keys.prompting():
        raise SystemError("something else")


def test_a_signal_that_another_thread_gets_interrupts_the_prompt():
    """As one does that comes just before the main thread waits: its system call is not interrupted by it."""
    reader, writer = os.pipe()
    over = threading.Event()

    def elsewhere() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not over.wait(PATIENCE_S):
            os.write(writer, b"x")  # nobody was woken: the test fails instead of waiting on

    thread = threading.Thread(target=elsewhere)
    try:
        with interrupts(True) as keys, pytest.raises(KeyboardInterrupt), keys.prompting():
            thread.start()
            os.read(reader, 1)
    finally:
        over.set()
        thread.join()
        os.close(reader)
        os.close(writer)


def test_handlers_and_threads_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGURG)]
    threads = threading.active_count()
    with interrupts(True):
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGURG)] == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_nothing_is_taken_over_where_nobody_types():
    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    with interrupts(False):
        assert (signal.getsignal(signal.SIGINT), threading.active_count()) == (before, threads)
