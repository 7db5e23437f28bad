"""SIGTERM, which schedulers and containers send, ends what writes as Ctrl-C does: nothing half written stays."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

TERMINATED = 128 + signal.SIGTERM  # what shells report for a process that SIGTERM ended


@contextmanager
def cleanly_stopped() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C would, and then the process; what the block was writing is removed.

    Where SIGTERM is ignored, or somebody else handles it, that stays so.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:  # a second one would come in the middle of clearing away
            stopped = True
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()  # no other may take signals over
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:  # a library through which the interrupt went may have made another error of it
        if not stopped:
            raise
        raise _make_exit() from error
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if stopped:  # some library swallowed the interrupt
        raise _make_exit()


def _make_exit() -> SystemExit:
    click.echo("terminated", err=True)
    return SystemExit(TERMINATED)
