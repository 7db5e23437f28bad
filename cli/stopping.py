"""SIGTERM, which schedulers and containers send, ends what writes as Ctrl-C does: nothing half written stays."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

TERMINATED = 128 + signal.SIGTERM  # what shells report for a process that SIGTERM ended


@contextmanager
def cleanly_stopped() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C would, and then the process; what the block was writing is removed.

    Where SIGTERM is ignored, or somebody else handles it, that stays so.

    Raises:
        SystemExit: with :data:`TERMINATED`, after SIGTERM.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would come in the middle of clearing away
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:  # a library through which the interrupt went may have made another error of it
        if not stopped:
            raise
        click.echo("terminated", err=True)
        raise SystemExit(TERMINATED) from error
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
