"""Grammars that may take long to compile, tried in a process first, which can be ended, as a thread cannot."""

import atexit
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

from llmc.errors import DeadlineError, GrammarError, ResourceError

COMPILE_SECONDS = 5.0
"""A grammar that takes more of a processor's time to compile is refused."""
WAIT_SECONDS = 60.0
"""A request waits so long for its turn, and for a processor that others take, before it is told to come again."""
_MEMORY_BYTES = 2 * 1024**3
# So that requests with such grammars at the same time cannot take all processors.
_MOST_AT_ONCE = threading.BoundedSemaphore(2)
# Of one trial after the other, until one ends it; what a grammar needs is what its own compilation takes, for starting
# an interpreter may take seconds on a machine that does much else. SIGPROF comes by the processor's time, and ends it.
_CODE = """
import json, signal, sys, threading
sys.path[:] = json.loads(sys.argv[1])
try:
    import resource
except ImportError:  # another system, which has the limit of time only
    resource = None
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
timed = getattr(signal, "setitimer", lambda which, seconds: None)
clock = getattr(signal, "ITIMER_PROF", None)
def compile(grammar, limits):
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).compute_bitmask()
for line in sys.stdin.buffer:
    grammar, seconds, memory, stack, states, fuel = json.loads(line)
    if resource:
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    limits = LLParserLimits(max_lexer_states=states, step_lexer_fuel=fuel)
    threading.stack_size(stack)
    thread = threading.Thread(target=compile, args=(grammar, limits))
    timed(clock, seconds)
    thread.start()
    thread.join()
    timed(clock, 0)
    print("tried", flush=True)
"""
_OVERTIME = -getattr(signal, "SIGPROF", 0)  # the status of a process that used up its time


class Clock:
    """The time that is left to a request while its grammar is compiled.

    Args:
        deadline_s: seconds until the request's deadline; None without one.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        most = WAIT_SECONDS if self._deadline_s is None else min(WAIT_SECONDS, self._deadline_s)
        return max(0.0, self._start + most - time.monotonic())

    def over(self, kind: str) -> DeadlineError | ResourceError:
        """The error of a request that waited too long, for which its grammar is not to blame."""
        if self._deadline_s is not None and self._deadline_s < WAIT_SECONDS:
            return DeadlineError(f"the deadline of {self._deadline_s:g} s passed while {kind} was compiled")
        return ResourceError(
            f"{kind} could not be compiled within {WAIT_SECONDS:g} s, for other requests take the processors; try "
            "again later"
        )


def too_slow(kind: str) -> GrammarError:
    """The error of a grammar that takes too much of a processor's time."""
    return GrammarError(f"{kind} takes longer than {COMPILE_SECONDS:g} s to compile; make it smaller")


class _Worker:
    """A process that tries grammars, one after the other."""

    def __init__(self) -> None:
        path = json.dumps([entry for entry in sys.path if entry])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C ends requests in their own way
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes: tuple[IO[bytes], IO[bytes]] = self._process.stdin, self._process.stdout

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def passes(self, trial: bytes, seconds: float) -> bool:
        """True once it has tried a grammar, False if that ended it.

        Raises:
            TimeoutError: neither within ``seconds``.
        """
        told: list[bytes] = []
        thread = threading.Thread(target=lambda: told.append(self._answer(trial)), daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError
        return told[0] != b""

    def _answer(self, trial: bytes) -> bytes:
        given, told = self._pipes
        try:
            given.write(trial)
            given.flush()
            return told.readline()
        except OSError:  # it has ended
            return b""

    def status(self) -> int:
        """The exit status of a process that ends."""
        status = self._process.wait()
        for pipe in self._pipes:
            with suppress(OSError):  # what was not written any more
                pipe.close()
        return status

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self.status()


_IDLE: list[_Worker] = []


@atexit.register
def _end_idle() -> None:
    while _IDLE:
        _IDLE.pop().kill()


def _worker() -> _Worker:
    """A process that waits for a grammar, started if there is none."""
    with suppress(IndexError):  # there is none, or another thread took the last one just now
        while not (worker := _IDLE.pop()).lives:
            worker.status()
        return worker
    return _Worker()


def try_out(kind: str, grammar: str, clock: Clock, stack_bytes: int, lexer_states: int, lexer_fuel: int) -> None:
    """Compile a grammar, in the library's own format, in a process that is ended when its time is over.

    What is wrong with a grammar is left to be found when it is compiled here.

    Raises:
        GrammarError: it takes too long or too much memory.
        DeadlineError: the request's deadline passed.
        ResourceError: others' grammars, or whatever else this machine does, left no time for it.
    """
    if not _MOST_AT_ONCE.acquire(timeout=clock.seconds_left()):
        raise clock.over(kind)
    try:
        limits = [COMPILE_SECONDS, _MEMORY_BYTES, stack_bytes, lexer_states, lexer_fuel]
        _try(kind, json.dumps([grammar, *limits]).encode() + b"\n", clock)
    except OSError as error:
        raise GrammarError(
            f"{kind} is large, and no process can be started to try it: {error}; make it smaller"
        ) from error
    finally:
        _MOST_AT_ONCE.release()


def _try(kind: str, trial: bytes, clock: Clock) -> None:
    worker = _worker()
    try:
        passed = worker.passes(trial, clock.seconds_left())
    except TimeoutError as error:
        worker.kill()
        raise clock.over(kind) from error
    if passed:
        _IDLE.append(worker)
        return
    status = worker.status()
    if status == _OVERTIME:
        raise too_slow(kind)
    raise GrammarError(
        f"{kind} takes more than {_MEMORY_BYTES // 1024**3} GiB to compile, or ends the process that tries to "
        f"(exit code {status}); make it smaller"
    )
