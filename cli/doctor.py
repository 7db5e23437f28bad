"""``llmc doctor``: report on this machine, and on each target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.cli import output as show
from llmc.cli.options import debug_option, find_bundle, json_option, source_argument

if TYPE_CHECKING:
    from llmc.runtime.diagnose.doctor import Diagnosis
    from llmc.runtime.host.probe import Device, Driver


@click.command("doctor", short_help="Say what this machine has, and what each target would do here.")
@source_argument("bundle", find_bundle, required=False)
@json_option
@debug_option
def doctor_command(bundle: Path | None, as_json: bool) -> None:
    """Say what this machine has, what each target would do on it, and whether BUNDLE, which is loaded, runs here.

    Engines and drivers are tried in processes of their own: one that crashes is a line of the report. Exits with 0
    whatever is found.
    """
    from llmc.runtime.diagnose.doctor import diagnose

    diagnosis = diagnose(bundle)
    if as_json:
        show.print_json(diagnosis)
    else:
        show.print_rows(diagnosis_rows(diagnosis, bundle))


def diagnosis_rows(diagnosis: Diagnosis, bundle: Path | None) -> Iterator[tuple[str, str]]:
    machine = diagnosis.machine
    yield "machine", f"{diagnosis.platform}, {machine.cpu}, {machine.threads} threads"
    yield "memory", f"{show.size(machine.memory.bytes)} available ({machine.memory.source})"
    yield "Python", diagnosis.python
    if diagnosis.jetson:
        yield "Jetson", f"Jetson Linux {diagnosis.jetson}"
    yield "driver", driver_words(diagnosis.driver)
    for device in diagnosis.driver.devices:
        yield f"GPU {device.index}", device_words(device)
    yield "packages", ", ".join(f"{name} {version}" for name, version in diagnosis.packages.items())
    for name, outlook in diagnosis.targets.items():
        yield f"target {name}", outlook.state
        if outlook.run == outlook.build:
            yield "", f"run and build: {outlook.run.message}"
            continue
        yield "", f"run: {outlook.run.message}"
        yield "", f"build: {outlook.build.message}"
    if diagnosis.bundle is not None:
        yield "bundle", f"{bundle} {'runs here' if diagnosis.bundle.works else 'does not run here'}"
        yield "", diagnosis.bundle.message


def driver_words(driver: Driver) -> str:
    if driver.state == "missing":
        return f"none ({driver.problem})"
    served = f"CUDA {driver.version or 'unknown'}"
    return served if driver.state == "ok" else f"{driver.state}: {driver.problem} ({served})"


def device_words(device: Device) -> str:
    free = "" if device.free_memory is None else f", {show.size(device.free_memory)} free"
    shared = ", the machine's own" if device.integrated else ""
    memory = f"{show.size(device.total_memory)} memory{shared}{free}"
    return f"{device.name}, compute capability {device.compute_capability}, {memory}"
