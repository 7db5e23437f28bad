"""The report of an export."""

from dataclasses import dataclass
from pathlib import Path

from llmc.bundle import Geometry, Source


@dataclass(frozen=True)
class ExportReport:
    """The folder that an export wrote: bytes by file name, of which ``new_bytes`` are new on disk (the rest is linked).

    ``seconds`` include loading torch; ``notes`` are sentences about what was left out on purpose.
    """

    output: Path
    files: dict[str, int]
    new_bytes: int
    seconds: float
    geometry: Geometry
    source: Source
    notes: tuple[str, ...]
