"""Shares of one plan of memory: what each model may take, and which one makes room."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from llmc.errors import ResourceError
from llmc.runtime.loading import MemoryNeed

MB = 1_000_000


class Used(Protocol):
    """A model that ``users`` requests hold; ``used`` rises with every use."""

    users: int
    used: int


U = TypeVar("U", bound=Used)


@dataclass(frozen=True)
class MemoryShares:
    """One plan of memory for several models, which waits for nothing and loads nothing."""

    memory: int  # bytes that all models may take together
    needed: int  # bytes that all models need at least, together

    def check(self, need: MemoryNeed, folder: Path) -> None:
        """Raises ResourceError: the bundle of a folder does not fit, even alone."""
        least = need.least + need.draft
        if least > self.memory:
            raise ResourceError(
                f"{-(-least // MB)} MB are needed, {self.memory // MB} MB may be taken by all models",
                "give more memory, or lower max_context or the prefix cache",
                path=folder,
            )

    def missing(self, need: MemoryNeed, taken: int) -> int:
        """Bytes to be freed before a model fits beside those that have ``taken`` bytes; 0: it fits."""
        return max(0, need.least + need.draft + taken - self.memory)

    def refuse(self, missing: int, folder: Path) -> ResourceError:
        """The error of a bundle whose bytes did not become free in time."""
        problem = f"{-(-missing // MB)} MB are missing of the {self.memory // MB} MB that all models may take"
        return ResourceError(f"{problem}, for others are in use", "try again later, or give more memory", path=folder)

    def share(self, need: MemoryNeed, taken: int) -> int:
        """Bytes that a model may take: at least what one row of its longest context takes, at most what all rows and
        its prefix cache take, and in between as the memory divides among all models."""
        fair = self.memory * need.least // max(1, self.needed)
        return max(need.least, min(need.most, fair, self.memory - taken - need.draft))


def choose_idle(models: Iterable[U]) -> U | None:
    """The model that makes room: of those that no request uses, the one used longest ago; None: all are in use."""
    return min((model for model in models if model.users == 0), key=lambda model: model.used, default=None)
