"""Grammars that may take long to compile, tried in a process first, which can be ended, as a thread cannot."""

import json
import subprocess
import sys
import threading
import time

from llmc.errors import DeadlineError, GrammarError

COMPILE_SECONDS = 5.0
"""A grammar that takes longer to compile is refused."""
_MEMORY_BYTES = 2 * 1024**3
# So that requests with such grammars at the same time cannot take all processors.
_MOST_AT_ONCE = threading.BoundedSemaphore(2)
_CODE = """
import json, sys, threading
paths, memory, stack, states, fuel = json.loads(sys.argv[1])
sys.path[:] = paths
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, OSError, ValueError):  # another system, which has the limit of time only
    pass
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
grammar = sys.stdin.buffer.read().decode("utf-8")
limits = LLParserLimits(max_lexer_states=states, step_lexer_fuel=fuel)
threading.stack_size(stack)
def compile():
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).compute_bitmask()
thread = threading.Thread(target=compile)
thread.start()
thread.join()
"""


class Clock:
    """The time that is left to compile a grammar: :data:`COMPILE_SECONDS`, or less by the request's own deadline.

    Args:
        deadline_s: seconds until the request's deadline; None without one.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        most = COMPILE_SECONDS if self._deadline_s is None else min(COMPILE_SECONDS, self._deadline_s)
        return max(0.0, self._start + most - time.monotonic())

    def over(self, kind: str) -> DeadlineError | GrammarError:
        """The error of a request that took too long."""
        if self._deadline_s is not None and self._deadline_s < COMPILE_SECONDS:
            return DeadlineError(f"the deadline of {self._deadline_s:g} s passed while {kind} was compiled")
        return GrammarError(f"{kind} takes longer than {COMPILE_SECONDS:g} s to compile; make it smaller")


def try_out(kind: str, grammar: str, clock: Clock, stack_bytes: int, lexer_states: int, lexer_fuel: int) -> None:
    """Compile a grammar, in the library's own format, in a process that is ended when its time is over.

    What is wrong with a grammar is left to be found when it is compiled here.

    Raises:
        GrammarError: it takes too long or too much memory; DeadlineError: it takes until the request's deadline.
    """
    if not _MOST_AT_ONCE.acquire(timeout=clock.seconds_left()):
        raise clock.over(kind)
    try:
        limits = json.dumps([[path for path in sys.path if path], _MEMORY_BYTES, stack_bytes, lexer_states, lexer_fuel])
        subprocess.run(
            [sys.executable, "-I", "-c", _CODE, limits],
            input=grammar.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=clock.seconds_left(),
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise clock.over(kind) from error
    except subprocess.CalledProcessError as error:
        raise GrammarError(
            f"{kind} takes more than {_MEMORY_BYTES // 1024**3} GiB to compile, or ends the process that tries to "
            f"(exit code {error.returncode}); make it smaller"
        ) from error
    except OSError as error:
        raise GrammarError(
            f"{kind} is large, and no process can be started to try it: {error}; make it smaller"
        ) from error
    finally:
        _MOST_AT_ONCE.release()
