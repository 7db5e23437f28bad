"""Joules, where the machine exposes them; nothing where it does not.

Sources, each absent without its hardware, driver or permission:

- ``rapl``: the CPU packages, as Linux's powercap counts them (https://docs.kernel.org/power/powercap/powercap.html).
  Since Linux 5.10 only root may read the counters; an administrator may grant it by ``chmod a+r``.
- ``ina3221``: the rail VDD_IN that feeds a Jetson module, whose power is sampled
  (https://docs.kernel.org/hwmon/ina3221.html). It holds everything, so nothing else is counted beside it.
- ``nvml``: the NVIDIA GPUs, as their driver counts them, through the module ``pynvml`` (package nvidia-ml-py).

They measure the machine, not the process: other load counts too. Memory, disks and losses of the power supply are not
in ``rapl`` and ``nvml``.
"""

import importlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from llmc.runtime.host import threads

log = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
HWMON = Path("/sys/class/hwmon")
POWER_INTERVAL_S = 0.1  # the INA3221 averages over about this time
# Between reads of a counter: it must not wrap around twice, and the smallest hold minutes at full power.
COUNTER_INTERVAL_S = 20.0
INPUT_RAIL = "VDD_IN"


class SourceError(Exception):
    """A source cannot be read; the meter turns this into an absent result."""


@dataclass(frozen=True)
class Joules:
    """Energy over a time.

    Attributes:
        total: joules, above 0.
        sources: joules by source; they add up to the total.
    """

    total: float
    sources: Mapping[str, float]


class EnergyMeter:
    """A context manager that measures the machine's energy; afterwards ``joules`` has it.

    ``joules`` is None where the machine exposes none, a source failed, or no counter has moved. All sources must have
    answered: a part of the energy would look like a saving.

    A thread reads the sources now and then, because power must be sampled and counters wrap around; it is a few dozen
    microseconds per second at most, and ends with the block. A meter may be used again.
    """

    def __init__(self) -> None:
        self.joules: Joules | None = None
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._failed = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> "EnergyMeter":
        self._sources = _present()
        self._failed, self.joules = False, None
        if self._sources:
            self._stopping.clear()
            self._thread = threads.start(self._watch, "llmc-energy", self._stopping.set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            values = self._read()
        if values and min(values.values()) > 0:
            self.joules = Joules(sum(values.values()), values)
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        for source in self._sources:
            source.close()
        self._sources = []

    def _read(self) -> dict[str, float]:
        """Joules by source since the start; empty for good once one of them has failed."""
        if self._failed:
            return {}
        try:
            return {source.name: source.read() for source in self._sources}
        except SourceError as error:
            self._failed = True
            log.warning("energy is not measured any more: %s", error)
            return {}

    def _watch(self) -> None:
        interval = min(source.interval_s for source in self._sources)
        while not self._stopping.wait(interval):
            with self._lock:
                self._read()


# -------------------------------------------------------------------------------------------------------------- sources


class Counter:
    """Unwraps a counter of energy that restarts from zero after ``limit``.

    Args:
        read: the counter, in any unit.
        limit: its largest value, in the same unit; None for one that never wraps around.
    """

    def __init__(self, read: Callable[[], int], limit: int | None) -> None:
        self._read = read
        self._limit = limit
        self._last = read()
        self._sum = 0

    def advance(self) -> int:
        """Units since it was made; correct if it is called at least once per turn of the counter.

        Raises:
            SourceError: a counter that never wraps around went back.
        """
        now = self._read()
        delta = now - self._last
        if delta < 0:
            if self._limit is None:
                raise SourceError(f"a counter of energy went back from {self._last} to {now}")
            delta += self._limit
        self._last = now
        self._sum += delta
        return self._sum


class Rail:
    """Joules of a rail, from millivolts and milliamperes, integrated by the trapezoidal rule."""

    def __init__(self, volts: Path, amperes: Path) -> None:
        self._volts, self._amperes = volts, amperes
        self._joules = 0.0
        self._at, self._watts = time.monotonic(), self._power()

    def advance(self) -> float:
        """Joules since it was made; every call is a sample."""
        at, watts = time.monotonic(), self._power()
        self._joules += (at - self._at) * (watts + self._watts) / 2
        self._at, self._watts = at, watts
        return self._joules

    def _power(self) -> float:
        return _number(self._volts) * _number(self._amperes) / 1e6


@dataclass(frozen=True)
class Source:
    """Something that energy can be read from.

    Attributes:
        interval_s: between two reads at most.
        parts: what it adds up, ``per_joule`` units to a joule.
        close: lets go of a driver.
    """

    name: str
    interval_s: float
    parts: Sequence[Counter | Rail]
    per_joule: float
    close: Callable[[], None] = lambda: None

    def read(self) -> float:
        """Joules since the source was opened; raises SourceError."""
        return sum(part.advance() for part in self.parts) / self.per_joule


def rapl() -> Source:
    """CPU packages through powercap: top-level zones named ``package-*``, in microjoules.

    Not counted: subzones (core and uncore lie within the package, dram is not on every machine), ``psys``, which holds
    the packages, and the zones of ``intel-rapl-mmio``, which are the same packages read another way.

    Raises:
        SourceError: there is no package, or one cannot be read.
    """
    zones = [path for path in sorted(_entries(POWERCAP)) if re.fullmatch(r"intel-rapl:\d+", path.name)]
    packages = [zone for zone in zones if _text(zone / "name").startswith("package")]
    if not packages:
        raise SourceError(f"no CPU package in {POWERCAP}")
    counters = [
        Counter(partial(_number, zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in packages
    ]
    return Source("rapl", COUNTER_INTERVAL_S, counters, 1e6)


def ina3221() -> Source:
    """The rail that feeds a Jetson module.

    A board without such a rail is not measured: the sum of some of its rails would be less than what it draws.

    Raises:
        SourceError: there is no such rail, or it cannot be read.
    """
    for monitor in sorted(_entries(HWMON)):
        if not (monitor / "name").exists() or _text(monitor / "name") != "ina3221":
            continue
        for label in sorted(monitor.glob("in*_label")):
            if _text(label) == INPUT_RAIL:
                channel = label.name[len("in") : -len("_label")]
                rail = Rail(monitor / f"in{channel}_input", monitor / f"curr{channel}_input")
                return Source("ina3221", POWER_INTERVAL_S, [rail], 1)
    raise SourceError(f"no rail {INPUT_RAIL} in {HWMON}")


def nvml() -> Source:
    """NVIDIA GPUs of this machine through pynvml, in millijoules since their driver was loaded; Volta and later.

    Raises:
        SourceError: no module, no driver, no GPU, or one that does not count its energy.
    """
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise SourceError(f"pynvml is not installed: {error}") from error

    def call(function: str, *args: object) -> Any:
        try:
            return getattr(library, function)(*args)
        except (library.NVMLError, AttributeError) as error:
            raise SourceError(f"{function}: {error}") from error

    def close() -> None:
        with suppress(SourceError):  # a driver that is gone already is no error
            call("nvmlShutdown")

    call("nvmlInit")
    try:
        handles = [call("nvmlDeviceGetHandleByIndex", i) for i in range(call("nvmlDeviceGetCount"))]
        if not handles:
            raise SourceError("no NVIDIA GPU")
        counters = [Counter(partial(call, "nvmlDeviceGetTotalEnergyConsumption", handle), None) for handle in handles]
    except SourceError:
        close()
        raise
    return Source("nvml", COUNTER_INTERVAL_S, counters, 1e3, close)


def _present() -> list[Source]:
    """The sources that the machine lets us read; a Jetson's rail holds all others. The log tells why one is absent."""
    found: list[Source] = []
    for make in (ina3221, rapl, nvml):
        if not found or found[0].name != "ina3221":
            try:
                found.append(make())
            except SourceError as error:
                log.debug("no energy from %s: %s", make.__name__, error)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise SourceError(f"{folder}: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {error}") from error


def _number(path: Path) -> int:
    text = _text(path)
    if not text.isdigit():
        raise SourceError(f"{path} holds {text[:40]!r}; expected a whole number")
    return int(text)
