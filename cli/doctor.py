"""``llmc doctor``: this machine, and each target on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.cli import output as show
from llmc.cli.options import EXISTING_BUNDLE, debug_option, json_option

if TYPE_CHECKING:
    from llmc.runtime.diagnose.doctor import Diagnosis
    from llmc.runtime.host.probe_steps import Device, Driver, Library

Rows = Iterator[tuple[str, str]]


@click.command("doctor")
@click.argument("bundle", type=EXISTING_BUNDLE, required=False)
@json_option
@debug_option
def doctor_command(bundle: Path | None, as_json: bool) -> None:
    """Say what this machine has, what each target would do on it, and whether BUNDLE runs here.

    Engines and drivers are examined in processes of their own: one that crashes is a line of the report. Exits with 0
    whatever is found.
    """
    from llmc.runtime.diagnose.doctor import diagnose, this_machine
    from llmc.runtime.host.probe import probe

    diagnosis = diagnose(probe(), this_machine(), bundle)
    if as_json:
        show.print_json(diagnosis)
    else:
        show.print_rows([*machine_rows(diagnosis), *verdict_rows(diagnosis)])


def machine_rows(diagnosis: Diagnosis) -> Rows:
    machine, probe = diagnosis.machine, diagnosis.probe
    features = "".join(f", {feature}" for feature in machine.features)
    yield "machine", f"{probe.platform}, {machine.cpu}, {machine.threads} threads{features}"
    yield "memory", f"{show.size(machine.memory.bytes)} available ({machine.memory.source})"
    yield "Python", probe.python
    if probe.jetson:
        yield "Jetson", f"Jetson Linux {probe.jetson}"
    yield "driver", driver_words(probe.driver, probe.kernel_module)
    for device in probe.driver.devices:
        yield f"GPU {device.index}", device_words(device)
    for name, library in probe.libraries.items():
        told = name == "cuda-bindings" and library.state == "ok" and probe.driver.state != "ok"
        yield name, library_words(replace(library, problem="") if told else library)


def driver_words(driver: Driver, kernel_module: str | None) -> str:
    module = f"kernel module {kernel_module}" if kernel_module else "no kernel module"
    if driver.state == "missing":
        return f"none ({driver.problem}; {module})"
    served = f"CUDA {driver.version or 'unknown'}, {module}"
    return served if driver.state == "ok" else f"{driver.state}: {driver.problem} ({served})"


def device_words(device: Device) -> str:
    free = "" if device.free_memory is None else f", {show.size(device.free_memory)} free"
    shared = ", the machine's own" if device.integrated else ""
    memory = f"{show.size(device.total_memory)} memory{shared}{free}"
    return f"{device.name}, compute capability {device.compute_capability}, {memory}"


def library_words(library: Library) -> str:
    if library.state != "ok":
        return "not installed" if library.state == "missing" else f"{library.state}: {library.problem}"
    cuda = f" for CUDA {library.cuda}" if library.cuda else ""
    abilities = f": {', '.join(library.abilities)}" if library.abilities else ""
    problem = f" ({library.problem})" if library.problem else ""
    return f"{library.version}{cuda}{abilities}{problem}"


def verdict_rows(diagnosis: Diagnosis) -> Rows:
    for name, outlook in diagnosis.targets.items():
        yield f"target {name}", outlook.state
        yield from (("", f"{issue.found}: {issue.remedy}") for issue in outlook.obstacles)
        yield from (("", note) for note in outlook.notes)
    if (bundle := diagnosis.bundle) is not None:
        yield "bundle", f"{bundle.path} {'runs here' if bundle.runs else 'does not run here'}"
        yield from (("", reason) for reason in bundle.reasons)
        yield from ((name, text) for name, text in (("to do", bundle.remedy), ("or", bundle.instead)) if text)
