"""Values that a bundle computes here, compared with those recorded when it was built."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import GoldenVector
from llmc.errors import BundleError

# What a build records as its bundle's tolerance. Logits of the same graph on another CPU: float32 kernels add in
# another order (about 1e-4), and a different rounding of one activation to int8 moves a logit by about 1e-2. A wrong
# weight or a saturated product moves it by far more.
LOGIT_TOLERANCE = 0.25
# The same for graphs on GPUs, by what they compute in: recorded on a CPU, whose kernels for 16 bits round where they
# hand values on, and not within sums. Not tried on a GPU yet.
LOGIT_TOLERANCES = {"float32": 0.25, "float16": 0.5, "bfloat16": 1.0}
# Of vectors and scores, as :func:`difference` has it. A wrong weight moves vectors by some tenths of their length; the
# rounding of activations inside kernels for integer weights, on another CPU, by less than a hundredth.
VECTOR_TOLERANCE = 0.05
# Values of a vector, or of a tile's rows, that are recorded: what is wrong in one of them is so in most.
KEPT_VALUES = 256


@dataclass(frozen=True)
class VerifyReport:
    """Counts of what was checked. ``largest_difference`` is between logits here and when the bundle was built;
    ``unlisted`` are the first 16 names in the folder that the manifest does not list."""

    files: int
    prompts: int
    tokens: int
    equal_tokens: int
    largest_difference: float
    unlisted: tuple[str, ...] = ()


def difference(found: NDArray[np.float32], recorded: NDArray[np.float32]) -> float:
    """Distance of two vectors [n], as a share of the second one's length where that is above one."""
    return float(np.linalg.norm(found - recorded) / max(1.0, float(np.linalg.norm(recorded))))


def sample_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values [n] of an image's rows that are recorded, some of each row."""
    return rows.ravel()[:: max(1, rows.size // KEPT_VALUES)][:KEPT_VALUES]


def compare(folder: Path, what: str, case: GoldenVector, found: NDArray[np.float32]) -> float:
    """The distance of values [n] from recorded ones; BundleError beyond the tolerance, or where no build wrote them."""
    recorded = np.array(case.values, np.float32)
    if case.prompt or recorded.shape != found.shape or not np.isfinite(recorded).all():
        raise corrupt(folder, f"vector ({what})")
    apart = difference(found, recorded)
    if not apart <= VECTOR_TOLERANCE:
        raise BundleError(
            f"{what} differ by {apart:.3g} from those recorded when it was built, at most "
            f"{VECTOR_TOLERANCE} is expected",
            "this machine computes something else: build the bundle on it",
            path=folder,
        )
    return apart


def corrupt(folder: Path, what: str) -> BundleError:
    return BundleError(f"golden {what} of the manifest is corrupt", "build the bundle again", path=folder)


def differs(model: Any, what: str) -> BundleError:
    return BundleError(
        f"{what} recorded when it was built, at most {model.manifest.golden_tolerance} is expected",
        "this machine computes something else: build the bundle on it",
        path=model.folder,
    )
