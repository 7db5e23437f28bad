"""Energy from machines made of files, and from a driver made of Python."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from llmc.runtime.host import energy
from llmc.runtime.host.energy import Counter, EnergyMeter, Joules, SourceError, ina3221, nvml, rapl

RANGE_UJ = 262_143_328_850  # of a desktop's package
EXACT = 1e-9  # joules; differences of whole microjoules


def zone(powercap: Path, folder: str, name: str, energy_uj: int) -> Path:
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(name + "\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    count(path, energy_uj)
    return path


def count(path: Path, energy_uj: int) -> None:
    (path / "energy_uj").write_text(f"{energy_uj}\n")


POWERCAP, HWMON = energy.POWERCAP, energy.HWMON


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of ``tmp_path``, of which a part may be missing; power is sampled all the time."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    monkeypatch.setattr(energy, "HWMON", tmp_path / "hwmon")
    monkeypatch.setattr(energy, "POWER_INTERVAL_S", 0.001)


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two packages, and beside them everything that would be counted twice."""
    folder = tmp_path / "powercap"
    zone(folder, "intel-rapl:0", "package-0", 1_000_000)
    zone(folder, "intel-rapl:1", "package-1", 5_000_000)
    zone(folder, "intel-rapl:0:0", "core", 100)
    zone(folder, "intel-rapl:0:1", "package-of-nothing", 100)
    zone(folder, "intel-rapl:2", "psys", 100)
    zone(folder, "intel-rapl-mmio:0", "package-0", 100)
    (folder / "intel-rapl").mkdir()
    return folder


@pytest.fixture
def hwmon(tmp_path: Path) -> Path:
    """A Jetson's monitor among others: 5 V and 3 A on the module's input, its parts on further channels."""
    folder = tmp_path / "hwmon"
    other, monitor = folder / "hwmon0", folder / "hwmon1"
    for path in (other, monitor, folder / "hwmon2"):
        path.mkdir(parents=True)
    (other / "name").write_text("nct6775\n")
    (other / "in1_label").write_text("VDD_IN\n")
    (monitor / "name").write_text("ina3221\n")
    for channel, label, millivolts, milliamperes in ((1, "VDD_CPU", 5000, 900), (2, "VDD_IN", 5000, 3000)):
        (monitor / f"in{channel}_label").write_text(label + "\n")
        (monitor / f"in{channel}_input").write_text(f"{millivolts}\n")
        (monitor / f"curr{channel}_input").write_text(f"{milliamperes}\n")
    return folder


class FakeNvml(ModuleType):
    """As much of pynvml as is used; ``millijoules`` holds a counter, or an error, for each GPU."""

    class NVMLError(Exception):
        """What every function raises."""

    def __init__(self, *millijoules: int | None) -> None:
        super().__init__("pynvml")
        self.millijoules = list(millijoules)
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        value = self.millijoules[handle]
        if value is None:
            raise self.NVMLError("Not Supported")
        return value


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Puts a driver in place of pynvml."""

    def put(*millijoules: int | None) -> FakeNvml:
        module = FakeNvml(*millijoules)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that does not install one has no driver, whatever the machine has."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def sources(measured: EnergyMeter) -> tuple[str, ...]:
    """Names of the sources in use."""
    return tuple(source.name for source in measured._sources)


# ------------------------------------------------------------------------------------------------------------- counters


def test_a_counter_wraps_around_as_often_as_it_is_read_in_time():
    values = iter([90, 95, 5, 60, 10, 10])
    counter = Counter(lambda: next(values), 100)
    assert [counter.advance() for _ in range(5)] == [5, 15, 70, 120, 120]


def test_a_counter_without_a_limit_must_not_go_back():
    values = iter([90, 5])
    counter = Counter(lambda: next(values), None)
    with pytest.raises(SourceError, match="went back from 90 to 5"):
        counter.advance()


# ----------------------------------------------------------------------------------------------------------------- RAPL


def test_packages_are_counted_once(powercap: Path, tmp_path: Path):
    with EnergyMeter() as measured:
        assert sources(measured) == ("rapl",)
        count(powercap / "intel-rapl:0", 3_500_000)
        count(powercap / "intel-rapl:1", 5_000_250)
        for other in ("intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:2", "intel-rapl-mmio:0"):
            count(powercap / other, 999_000_000)
    joules = measured.joules
    assert joules.sources == {"rapl": pytest.approx(2.50025, abs=EXACT)}
    assert joules.total == pytest.approx(2.50025, abs=EXACT)


def test_a_package_that_is_counted_twice_is_noticed(powercap: Path, tmp_path: Path):
    (powercap / "intel-rapl:2" / "name").write_text("package-0-again\n")
    with EnergyMeter() as measured:
        count(powercap / "intel-rapl:0", 2_000_000)
        count(powercap / "intel-rapl:2", 1_000_100)
    assert measured.joules.total != pytest.approx(1.0, abs=EXACT)


def test_a_package_that_wraps_around_goes_on(powercap: Path, tmp_path: Path):
    count(powercap / "intel-rapl:0", RANGE_UJ - 400_000)
    with EnergyMeter() as measured:
        count(powercap / "intel-rapl:0", 600_000)
    assert measured.joules.total == pytest.approx(1.0, abs=EXACT)


def test_a_package_that_wraps_around_twice_is_followed_by_the_thread(
    powercap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(energy, "COUNTER_INTERVAL_S", 0.001)
    package = powercap / "intel-rapl:0"
    with EnergyMeter() as measured:
        for energy_uj in (RANGE_UJ - 1_000_000, 1_000_000, RANGE_UJ - 1_000_000, 1_000_000):
            staged, before = tmp_path / "staged", _reads(measured)
            staged.write_text(f"{energy_uj}\n")
            staged.replace(package / "energy_uj")  # whole, for the thread reads meanwhile
            while _reads(measured) == before:
                time.sleep(0.001)
    assert measured.joules.total == pytest.approx(2 * RANGE_UJ / 1e6, abs=1e-3)


def _reads(measured: EnergyMeter) -> float:
    """What the thread has counted so far, without counting."""
    (source,) = measured._sources
    return sum(counter._sum for counter in source.parts)


def test_a_counter_that_root_alone_may_read_is_absent(
    powercap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    read_text = Path.read_text

    def guarded(self: Path, *args: str, **kwargs: str) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)  # a mode of 0400 does not stop root, who may run the tests
    with caplog.at_level(logging.DEBUG), EnergyMeter() as measured:
        assert sources(measured) == ()
    assert measured.joules is None
    assert "Permission denied" in caplog.text


@pytest.mark.parametrize("file", ["name", "energy_uj", "max_energy_range_uj"])
@pytest.mark.parametrize("content", [b"", b"-5\n", b"1.5\n", b"0x10\n", b"\xff\xfe", None])
def test_a_broken_package_makes_all_packages_absent(powercap: Path, file: str, content: bytes | None):
    path = powercap / "intel-rapl:0" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    if file == "name" and content is not None and content.isascii():  # then it is no package, as psys is none
        assert len(rapl().parts) == 1
        return
    with pytest.raises(SourceError, match=file):
        rapl()


def test_a_source_that_breaks_while_it_is_measured_leaves_no_result(
    powercap: Path, tmp_path: Path, install: Callable[..., FakeNvml], caplog: pytest.LogCaptureFixture
):
    driver = install(0)
    with EnergyMeter() as measured:
        count(powercap / "intel-rapl:0", 9_000_000)
        driver.millijoules = [None]
        assert measured._read() == {}
        driver.millijoules = [50]  # what it counted meanwhile is unknown
    assert measured.joules is None
    assert caplog.text.count("energy is not measured any more") == 1
    assert "Not Supported" in caplog.text


def test_a_counter_that_stands_still_is_no_zero(powercap: Path, tmp_path: Path):
    with EnergyMeter() as measured:
        assert sources(measured) == ("rapl",)
    assert measured.joules is None


# --------------------------------------------------------------------------------------------------------------- Jetson


def test_the_input_rail_is_integrated_over_time(hwmon: Path, monkeypatch: pytest.MonkeyPatch):
    now = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    rail = ina3221()
    (hwmon / "hwmon1" / "curr2_input").write_text("1000\n")
    assert rail.read() == pytest.approx((15 + 5) / 2, abs=EXACT)  # from 5 V * 3 A to 5 V * 1 A in a second
    assert rail.read() == pytest.approx(10 + 5 * 2, abs=EXACT)


def test_a_jetson_is_measured_by_its_input_rail_alone(
    hwmon: Path, powercap: Path, tmp_path: Path, install: Callable[..., FakeNvml]
):
    install(7)
    with EnergyMeter() as measured:
        assert sources(measured) == ("ina3221",)
        time.sleep(0.02)
    assert measured.joules.total >= 15.0 * 0.02  # watts for the time slept, at the least


def test_power_is_sampled_between_start_and_stop(hwmon: Path, tmp_path: Path):
    rail, staged = hwmon / "hwmon1" / "curr2_input", tmp_path / "staged"
    rail.write_text("0\n")
    with EnergyMeter() as measured:
        ((part,),) = (source.parts for source in measured._sources)
        for milliamperes, seen in ((300_000, 1500.0), (0, 0.0)):
            staged.write_text(f"{milliamperes}\n")
            staged.replace(rail)  # whole, for the thread reads meanwhile
            while part._watts != seen:
                time.sleep(0.001)
    assert measured.joules.total > 1  # 1,500 W for two intervals of a millisecond; the ends alone would say nothing


def test_a_board_without_an_input_rail_is_absent(hwmon: Path):
    (hwmon / "hwmon1" / "in2_label").write_text("VDD_GPU\n")
    with pytest.raises(SourceError, match="no rail VDD_IN"):
        ina3221()


@pytest.mark.parametrize("content", ["", "broken\n", None])
def test_a_broken_rail_is_absent(hwmon: Path, tmp_path: Path, content: str | None):
    path = hwmon / "hwmon1" / "curr2_input"
    path.unlink() if content is None else path.write_text(content)
    with EnergyMeter() as measured:
        assert sources(measured) == ()
    assert measured.joules is None


# ----------------------------------------------------------------------------------------------------------------- NVML


def test_all_gpus_count_and_the_driver_is_let_go(tmp_path: Path, install: Callable[..., FakeNvml]):
    driver = install(1_000, 70_000)
    with EnergyMeter() as measured:
        assert (sources(measured), driver.open) == (("nvml",), 1)
        driver.millijoules = [3_500, 70_500]
    assert measured.joules.sources == {"nvml": pytest.approx(3.0, abs=EXACT)}
    assert driver.open == 0


def test_packages_and_gpus_add_up(powercap: Path, tmp_path: Path, install: Callable[..., FakeNvml]):
    driver = install(0)
    with EnergyMeter() as measured:
        driver.millijoules = [2_000]
        count(powercap / "intel-rapl:1", 6_000_000)
    assert measured.joules.sources == {"rapl": pytest.approx(1.0), "nvml": pytest.approx(2.0)}
    assert measured.joules.total == pytest.approx(3.0)


@pytest.mark.parametrize("millijoules", [(), (None,), (5, None)])
def test_gpus_that_do_not_count_are_absent(install: Callable[..., FakeNvml], millijoules: tuple[int | None, ...]):
    driver = install(*millijoules)
    with pytest.raises(SourceError):
        nvml()
    assert driver.open == 0


def test_a_driver_that_cannot_be_loaded_is_absent(install: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch):
    driver = install(1)

    def fail() -> None:
        raise driver.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(driver, "nvmlInit", fail)
    with pytest.raises(SourceError, match="Driver Not Loaded"):
        nvml()


def test_a_driver_that_fails_to_close_does_not_cost_the_result(
    tmp_path: Path, install: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch
):
    driver = install(0)

    def fail() -> None:
        raise driver.NVMLError("Uninitialized")

    monkeypatch.setattr(driver, "nvmlShutdown", fail)
    with EnergyMeter() as measured:
        driver.millijoules = [1_000]
    assert measured.joules.total == 1.0


# ---------------------------------------------------------------------------------------------------------------- meter


def test_a_machine_that_exposes_nothing_has_no_result_and_no_thread(tmp_path: Path):
    with EnergyMeter() as measured:
        assert (sources(measured), watching()) == ((), [])
    assert measured.joules is None


def test_the_thread_ends_with_the_measurement(powercap: Path, tmp_path: Path):
    with EnergyMeter():
        assert len(watching()) == 1
    assert watching() == []


def watching() -> list[threading.Thread]:
    """Threads of meters; those of other tests have ended, or else they would fail."""
    return [thread for thread in threading.enumerate() if thread.name == "llmc-energy"]


def test_the_next_measurement_begins_anew(powercap: Path):
    measured = EnergyMeter()
    with measured:
        count(powercap / "intel-rapl:0", 4_000_000)
    assert measured.joules.total == pytest.approx(3.0, abs=EXACT)
    with measured:
        assert measured.joules is None
        count(powercap / "intel-rapl:0", 4_500_000)
    assert measured.joules.total == pytest.approx(0.5, abs=EXACT)


def test_an_error_in_the_measured_block_passes_and_the_meter_stops(powercap: Path, tmp_path: Path):
    measured = EnergyMeter()
    with pytest.raises(ZeroDivisionError), measured:
        _ = 1 / 0
    assert sources(measured) == ()


def test_the_default_machine_is_this_one():
    assert str(POWERCAP) == "/sys/class/powercap"
    assert str(HWMON) == "/sys/class/hwmon"
    with EnergyMeter() as measured:
        pass
    assert measured.joules is None or isinstance(measured.joules, Joules)
