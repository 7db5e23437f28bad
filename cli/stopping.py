"""SIGTERM, which schedulers and containers send, ends what writes as Ctrl-C does: nothing half written stays."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

TERMINATED = 128 + signal.SIGTERM  # what shells report for a process that SIGTERM ended
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def cleanly_stopped() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C would, and then the process; what the block was writing is removed.

    A library through which the interrupt goes may make another error of it (an import in C++ makes an ImportError of
    Ctrl-C): the block ends as interrupted all the same. Where a signal is ignored, or somebody else handles it, that
    stays so.
    """
    stopped = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped != signal.SIGTERM:  # a second one would come in the middle of clearing away
            stopped = number
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()  # no other may take signals over
    ours = [number for number, default in DEFAULTS.items() if main and signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except BaseException as error:
        if not stopped:
            raise
        raise _ending(stopped) from error
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])
    if stopped:  # some library swallowed the interrupt
        raise _ending(stopped)


def _ending(number: int) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    click.echo("terminated", err=True)
    return SystemExit(TERMINATED)
