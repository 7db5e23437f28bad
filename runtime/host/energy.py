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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from llmc.errors import UsageError

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
        seconds: the time.
        sources: joules by source; they add up to the total.
    """

    total: float
    seconds: float
    sources: Mapping[str, float]


class Source(Protocol):
    """Something that energy can be read from."""

    name: str
    interval_s: float

    def read(self) -> float:
        """Joules since the source was opened; raises SourceError."""

    def close(self) -> None:
        """Let go of a driver."""


class EnergyMeter:
    """Measures the machine's energy from start to stop; also a context manager, with the result in ``joules``.

    A thread reads the sources now and then, because power must be sampled and counters wrap around; it is a few dozen
    microseconds per second at most, and ends with stop. A meter may be started again.

    Args:
        powercap: folder of the powercap zones.
        hwmon: folder of the hardware monitors.
        nvml: ask for NVIDIA GPUs.
        power_interval_s: seconds between two samples of power.
    """

    def __init__(
        self,
        powercap: Path = POWERCAP,
        hwmon: Path = HWMON,
        nvml: bool = True,
        power_interval_s: float = POWER_INTERVAL_S,
    ) -> None:
        self.joules: Joules | None = None
        self._powercap, self._hwmon, self._nvml = powercap, hwmon, nvml
        self._power_interval_s = power_interval_s
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._failed = False
        self._began: float | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in use; none before start, and none on a machine that exposes nothing."""
        return tuple(source.name for source in self._sources)

    def start(self) -> "EnergyMeter":
        """Open the sources and begin; where there is none, the result will be None.

        Raises:
            UsageError: it has been started already.
        """
        if self._began is not None:
            raise UsageError("the energy meter runs already; stop it before it is started again")
        self._sources = self._open()
        self._failed, self.joules = False, None
        self._began = time.monotonic()
        if self._sources:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._watch, name="llmc-energy", daemon=True)
            self._thread.start()
        return self

    def read(self) -> Joules | None:
        """Energy since start; None where the machine exposes none, a source failed, or no counter has moved yet.

        All sources must have answered: a part of the energy would look like a saving.

        Raises:
            UsageError: the meter has not been started.
        """
        if self._began is None:
            raise UsageError("the energy meter does not run; start it first")
        with self._lock:
            values = self._read()
            seconds = time.monotonic() - self._began
        if not values or min(values.values()) <= 0:
            return None
        return Joules(sum(values.values()), seconds, values)

    def stop(self) -> Joules | None:
        """End the measurement: as :meth:`read`, and the sources are closed.

        Raises:
            UsageError: the meter has not been started.
        """
        self.joules = self.read()
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        for source in self._sources:
            source.close()
        self._sources, self._began = [], None
        return self.joules

    def __enter__(self) -> "EnergyMeter":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self) -> list[Source]:
        board = _opened("ina3221", lambda: Ina3221(self._hwmon, self._power_interval_s))
        if board is not None:
            return [board]
        packages = _opened("rapl", lambda: Rapl(self._powercap))
        gpus = _opened("nvml", Nvml) if self._nvml else None
        return [source for source in (packages, gpus) if source is not None]

    def _read(self) -> dict[str, float]:
        """Joules by source since start; empty for good once one of them has failed."""
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


class Rapl:
    """CPU packages through powercap: top-level zones named ``package-*``, in microjoules.

    Not counted: subzones (core and uncore lie within the package, dram is not on every machine), ``psys``, which holds
    the packages, and the zones of ``intel-rapl-mmio``, which are the same packages read another way.

    Raises:
        SourceError: there is no package, or one cannot be read.
    """

    name = "rapl"
    interval_s = COUNTER_INTERVAL_S

    def __init__(self, powercap: Path) -> None:
        zones = [path for path in sorted(_entries(powercap)) if re.fullmatch(r"intel-rapl:\d+", path.name)]
        packages = [zone for zone in zones if _text(zone / "name").startswith("package")]
        if not packages:
            raise SourceError(f"no CPU package in {powercap}")
        self._counters = [
            Counter(partial(_number, zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in packages
        ]

    def read(self) -> float:
        """Joules of all packages since they were opened."""
        return sum(counter.advance() for counter in self._counters) / 1e6

    def close(self) -> None:
        """Files are opened for each read only."""


class Ina3221:
    """Power of the rail that feeds a Jetson module, integrated by the trapezoidal rule.

    A board without such a rail is not measured: the sum of some of its rails would be less than what it draws.

    Raises:
        SourceError: there is no such rail, or it cannot be read.
    """

    name = "ina3221"

    def __init__(self, hwmon: Path, interval_s: float = POWER_INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._volts, self._amperes = self._rail(hwmon)
        self._joules = 0.0
        self._at, self._watts = time.monotonic(), self._power()

    def read(self) -> float:
        """Joules since it was opened; every call is a sample."""
        at, watts = time.monotonic(), self._power()
        self._joules += (at - self._at) * (watts + self._watts) / 2
        self._at, self._watts = at, watts
        return self._joules

    def close(self) -> None:
        """Files are opened for each read only."""

    def _power(self) -> float:
        """Watts now, from millivolts and milliamperes."""
        return _number(self._volts) * _number(self._amperes) / 1e6

    @staticmethod
    def _rail(hwmon: Path) -> tuple[Path, Path]:
        for monitor in sorted(_entries(hwmon)):
            if not (monitor / "name").exists() or _text(monitor / "name") != "ina3221":
                continue
            for label in sorted(monitor.glob("in*_label")):
                if _text(label) == INPUT_RAIL:
                    channel = label.name[len("in") : -len("_label")]
                    return monitor / f"in{channel}_input", monitor / f"curr{channel}_input"
        raise SourceError(f"no rail {INPUT_RAIL} in {hwmon}")


class Nvml:
    """NVIDIA GPUs of this machine through pynvml, in millijoules since their driver was loaded; Volta and later.

    Raises:
        SourceError: no module, no driver, no GPU, or one that does not count its energy.
    """

    name = "nvml"
    interval_s = COUNTER_INTERVAL_S

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise SourceError(f"pynvml is not installed: {error}") from error
        self._call("nvmlInit")
        try:
            handles = [self._call("nvmlDeviceGetHandleByIndex", i) for i in range(self._call("nvmlDeviceGetCount"))]
            if not handles:
                raise SourceError("no NVIDIA GPU")
            read = "nvmlDeviceGetTotalEnergyConsumption"
            self._counters = [Counter(partial(self._call, read, handle), None) for handle in handles]
        except SourceError:
            self.close()
            raise

    def read(self) -> float:
        """Joules of all GPUs since they were opened."""
        return sum(counter.advance() for counter in self._counters) / 1e3

    def close(self) -> None:
        """Let go of the driver; one that is gone already is no error."""
        try:
            self._call("nvmlShutdown")
        except SourceError as error:
            log.debug("closing NVML: %s", error)

    def _call(self, function: str, *args: object) -> Any:
        try:
            return getattr(self._nvml, function)(*args)
        except (self._nvml.NVMLError, AttributeError) as error:
            raise SourceError(f"{function}: {error}") from error


def _opened(name: str, make: Callable[[], Source]) -> Source | None:
    """The source, or None where the machine has none or does not let it be read; the log tells which."""
    try:
        return make()
    except SourceError as error:
        log.debug("no energy from %s: %s", name, error)
        return None


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
