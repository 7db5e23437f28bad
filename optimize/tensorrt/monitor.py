"""Objects that the library calls while it builds: to tell how far it is, to be stopped, to write the engine."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from llmc.optimize.progress import Progress

T = TypeVar("T")
STEP = "building the engine"
# Smaller advances are not worth a redrawn progress bar.
RESOLUTION = 0.005


class Monitor:
    """Phases of a build, which contain each other, as one share of the whole; ``stop`` ends the build at its next step.

    The library calls this from threads of its own, and an error must not pass through it: the first one is kept in
    ``error`` and stops the build.
    """

    def __init__(self, progress: Progress) -> None:
        self.error: BaseException | None = None
        self.stopped = False
        self._progress = progress
        self._spans: dict[str, tuple[float, float]] = {}  # where a phase's next step begins, and how long a step is
        self._shown = 0.0

    def stop(self) -> None:
        self.stopped = True

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins, within the current step of its parent."""
        start, length = self._spans.get(parent or "", (0.0, 1.0 if not self._spans else 0.0))
        self._spans[name] = (start, length / max(1, steps))

    def step_complete(self, name: str, step: int) -> bool:
        """A step of a phase is done; whether to go on."""
        start, length = self._spans.get(name, (self._shown, 0.0))
        self._spans[name] = (start + length, length)
        self._show(start + length)
        return not self.stopped

    def _show(self, share: float) -> None:
        if share < self._shown + RESOLUTION:
            return
        self._shown = min(share, 1.0)
        try:
            self._progress(STEP, self._shown)
        except BaseException as error:  # noqa: BLE001 - raised again once the library has returned
            self.error = self.error or error
            self.stop()

    def native(self, library: Any) -> Any:
        methods: dict[str, Callable[..., Any]] = {
            "phase_start": lambda _, phase_name, parent_phase, num_steps: self.phase_start(
                phase_name, parent_phase, num_steps
            ),
            "step_complete": lambda _, phase_name, step: self.step_complete(phase_name, step),
            "phase_finish": lambda _, phase_name: None,  # its parent counts the step by itself
        }
        return type("Monitor", (library.IProgressMonitor,), methods)()

    def watch(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done by another thread: Ctrl-C does not interrupt the library, but this one."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            try:
                result = future.result()
            except BaseException:
                self.stop()
                raise
        if self.error is not None:
            raise self.error
        return result


class Writer:
    """Writes what the library hands over piece by piece, so that the engine is never whole in memory twice."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self.size = 0
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        """Write a piece; fewer bytes than it has tell the library to stop."""
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            return 0
        self.size += written
        return written

    def close(self) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def native(self, library: Any) -> Any:
        return type("Writer", (library.IStreamWriter,), {"write": lambda _, data, size=None: self.write(data)})()
