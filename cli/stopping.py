"""Handle SIGTERM (from schedulers and containers) like Ctrl-C in commands that write: no partial output remains."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

TERMINATED = 128 + signal.SIGTERM  # the exit code that shells report for SIGTERM
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def cleanly_stopped() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C, and then the process; partial output of the block is removed.

    A library may turn the interrupt into another error (an import in C++ turns Ctrl-C into an ImportError): the block
    still ends as interrupted. A signal that is ignored or has another handler is left alone.
    """
    stopped = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped != signal.SIGTERM:  # a second signal would interrupt the cleanup
            stopped = number
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
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
    if stopped:  # a library swallowed the interrupt
        raise _ending(stopped)


def _ending(number: int) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    click.echo("terminated", err=True)
    return SystemExit(TERMINATED)
