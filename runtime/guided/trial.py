"""Compile slow grammars in another process first, because a process can be killed and a thread cannot."""

import json
import signal
import subprocess
import sys
import threading
import time

from llmc.errors import DeadlineError, GrammarError, ResourceError

COMPILE_SECONDS = 5.0
"""A grammar that takes more CPU time to compile is refused."""
WAIT_SECONDS = 60.0
"""A request waits at most this long for its turn to compile and for a free processor."""
_MEMORY_BYTES = 2 * 1024**3
# So that concurrent requests with such grammars cannot take all processors.
_MOST_AT_ONCE = threading.BoundedSemaphore(2)
# SIGPROF counts CPU time after the interpreter has started, and ends the process.
_CODE = """
import json, resource, signal, sys, threading
sys.path[:] = json.loads(sys.argv[1])
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
grammar, seconds, memory, stack, states, fuel = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
limits = LLParserLimits(max_lexer_states=states, step_lexer_fuel=fuel)
def compile():
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).compute_bitmask()
threading.stack_size(stack)
signal.setitimer(signal.ITIMER_PROF, seconds)
thread = threading.Thread(target=compile)
thread.start()
thread.join()
"""


class Clock:
    """The time left for compiling a request's grammar; the request's deadline is in ``deadline_s`` seconds."""

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        most = WAIT_SECONDS if self._deadline_s is None else min(WAIT_SECONDS, self._deadline_s)
        return max(0.0, self._start + most - time.monotonic())

    def over(self, kind: str) -> DeadlineError | ResourceError:
        """The error of a request that waited too long, although its grammar may be fine."""
        if self._deadline_s is not None and self._deadline_s < WAIT_SECONDS:
            return DeadlineError(f"the deadline of {self._deadline_s:g} s passed while {kind} was compiled")
        return ResourceError(
            f"{kind} could not be compiled within {WAIT_SECONDS:g} s because other requests use the processors; "
            "try again later"
        )


def try_out(kind: str, grammar: str, clock: Clock, stack_bytes: int, lexer_states: int, lexer_fuel: int) -> None:
    """Compile a grammar, in the library's own format, in a process that is killed after a time limit.

    Other errors of the grammar are reported when this process compiles it.

    Raises:
        GrammarError: it takes too long or too much memory.
        DeadlineError, ResourceError: as :meth:`Clock.over`.
    """
    if not _MOST_AT_ONCE.acquire(timeout=clock.seconds_left()):
        raise clock.over(kind)
    try:
        given = json.dumps([grammar, COMPILE_SECONDS, _MEMORY_BYTES, stack_bytes, lexer_states, lexer_fuel])
        command = [sys.executable, "-I", "-c", _CODE, json.dumps([entry for entry in sys.path if entry])]
        # A new session: Ctrl-C in a terminal must not reach this process.
        status = subprocess.run(
            command,
            input=given.encode(),
            timeout=clock.seconds_left(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise clock.over(kind) from error
    except OSError as error:
        raise GrammarError(
            kind, f"is large, and no process can be started to try it: {error}", "make it smaller"
        ) from error
    finally:
        _MOST_AT_ONCE.release()
    if status == -signal.SIGPROF:
        raise GrammarError(kind, f"takes longer than {COMPILE_SECONDS:g} s to compile", "make it smaller")
    if status:
        raise GrammarError(
            kind,
            f"takes more than {_MEMORY_BYTES // 1024**3} GiB to compile, or ends the process that tries to "
            f"(exit code {status})",
            "make it smaller",
        )
