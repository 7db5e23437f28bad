"""What other processes do, as the kernel tells it."""

from pathlib import Path


def running(pid: str) -> bool:
    """Whether the process runs; one that ended and that nobody waited for, as in a container, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
