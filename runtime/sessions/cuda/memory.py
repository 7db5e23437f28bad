"""The check of a GPU's memory before anything is loaded into it."""

from pathlib import Path

from llmc.bundle import DeviceMemory
from llmc.errors import ResourceError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.host.machine import available_memory
from llmc.runtime.kv.budget import MB, largest


def check_memory(folder: Path, driver: Driver, memory: DeviceMemory | None, positions: int) -> int | None:
    """Bytes that a session may take in all; refuses to load what cannot fit with one row of the cache.

    Args:
        folder: the bundle, for the message.
        driver: of the GPU.
        memory: what the bundle takes there; None where its manifest does not say, and then the answer is None.
        positions: that the cache has at least.

    Raises:
        ResourceError: with what is needed, what is free, and what would fit.
    """
    if memory is None:
        return None
    free = free_memory(driver) + memory.context  # which is taken by now
    needed = memory.total(positions)
    if needed <= free:
        return free
    fits = largest(positions, memory.total, free)
    advice = f"build with --max-context {fits}" if fits else "use a smaller precision or model"
    raise ResourceError(
        f"{folder}: to run one row of {positions} positions it needs {-(-needed // MB)} MB of GPU memory, {free // MB} "
        f"MB are free on {driver.device.name}; free some, or {advice}"
    )


def free_memory(driver: Driver) -> int:
    """Bytes that can be taken; an integrated GPU's driver does not count what the system would give up for it."""
    free, _ = driver.memory_info()
    return max(free, available_memory()) if driver.device.integrated else free
