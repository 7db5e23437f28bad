"""What keeps an engine from being done before a test has done its part, however long that takes."""

import threading
import time
from typing import Any

PATIENCE = 120.0  # seconds after which a request that nobody lets go on counts as forgotten


class Brake:
    """A stopping criterion that stops nothing: it holds its request, and the engine's thread with it, until
    :meth:`let_go`.

    Args:
        after: tokens that the request gets before.
    """

    def __init__(self, after: int) -> None:
        self._left = after
        self._let_go = threading.Event()

    def __call__(self, *_: Any) -> bool:
        self._left -= 1
        if self._left < 0:
            assert self._let_go.wait(PATIENCE), "nobody let the request go on"
        return False

    def let_go(self) -> None:
        self._let_go.set()


def slowed(engine: Any, seconds: float) -> None:
    """From here on every step of ``engine`` takes some seconds longer."""
    step = engine.step

    def slowly() -> None:
        time.sleep(seconds)
        step()

    engine.step = slowly
