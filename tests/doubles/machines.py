"""Machines by their drivers and GPUs, after NVIDIA's documentation."""

from dataclasses import dataclass

from llmc.runtime.host.probe import Device, Driver

GB = 10**9


@dataclass(frozen=True)
class Probe:
    """A machine as far as its driver tells."""

    driver: Driver


def with_gpu(name: str, capability: str, memory: int, free: int, integrated: bool = False, cuda: str = "13.0") -> Probe:
    return Probe(Driver("ok", "", cuda, (Device(0, name, capability, memory, free, integrated),)))


NO_GPU = Probe(Driver("missing", "libcuda.so.1: cannot open shared object file: No such file or directory"))
H200 = with_gpu("NVIDIA H200", "9.0", 150 * GB, 149 * GB)
RTX_4090 = with_gpu("NVIDIA GeForce RTX 4090", "8.9", 25 * GB, 24 * GB)
ORIN = with_gpu("Orin", "8.7", 8 * GB, 6 * GB, True, "12.6")
THOR = with_gpu("NVIDIA Thor", "11.0", 128 * GB, 120 * GB, True, "13.2")
