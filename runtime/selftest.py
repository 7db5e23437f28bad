"""Is this bundle whole, and does it compute here what it computed when it was built?"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.bundle import GoldenPrompt, read_bundle, verify_files
from llmc.errors import BundleError
from llmc.runtime.model import Model, load

# Logits of the same graph on another CPU: float32 kernels add in another order (about 1e-4), and a different rounding
# of one activation to int8 moves a logit by about 1e-2. A wrong weight or a saturated product moves it by far more.
LOGIT_TOLERANCE = 0.25


@dataclass(frozen=True)
class VerifyReport:
    """What was checked. ``largest_difference`` is between logits here and when the bundle was built."""

    files: int
    prompts: int
    tokens: int
    equal_tokens: int
    largest_difference: float


def verify(
    bundle: str | Path, *, threads: int | None = None, progress: Callable[[str], None] = lambda step: None
) -> VerifyReport:
    """Hash every file, load the bundle and replay its golden prompts.

    Raises:
        BundleError: a file is corrupt, or results differ beyond :data:`LOGIT_TOLERANCE`.
    """
    folder = Path(bundle)
    manifest = read_bundle(folder)
    for name in verify_files(folder, manifest):
        progress(f"hashed {name}")
    with load(folder, threads=threads) as model:
        return replay(model, progress)


def replay(model: Model, progress: Callable[[str], None] = lambda step: None) -> VerifyReport:
    """Run the golden prompts on a loaded bundle.

    Raises:
        BundleError: the results differ beyond :data:`LOGIT_TOLERANCE`, or there are none to compare with.
    """
    cases = model.manifest.golden
    if not cases:
        raise BundleError(f"{model.folder}: the manifest has no golden prompts; build the bundle again")
    same_graphs = not model.engine.session.substitutes
    largest, equal, compared = 0.0, 0, 0
    for number, case in enumerate(cases, 1):
        progress(f"golden prompt {number} of {len(cases)}")
        _check(model, case, number)
        largest = max(largest, _first_logits(model, case, case.top_logits if same_graphs else case.decode_logits))
        # The recorded tokens follow from both graphs; where one stands in for the other, only its logits compare.
        compared += len(case.tokens) if same_graphs else 0
        equal += _same_tokens(model, case) if same_graphs else 0
    return VerifyReport(len(model.manifest.files), len(cases), compared, equal, largest)


def _check(model: Model, case: GoldenPrompt, number: int) -> None:
    """The manifest is not hashed, so look before computing: NaN, for one, would compare as a near tie.

    Raises:
        BundleError: the case could not have been written by ``llmc build``.
    """
    ids = (*case.prompt, *case.tokens, *case.top_ids)
    numbers = (*case.margins, *case.top_logits, *case.decode_logits)
    sound = (
        len(case.prompt) > 0
        and len(case.tokens) == len(case.margins) > 0
        and len(case.top_ids) == len(case.top_logits) == len(case.decode_logits) > 0
        and all(0 <= token < model.manifest.geometry.vocab_size for token in ids)
        and all(map(math.isfinite, numbers))
        and len(case.prompt) + len(case.tokens) <= model.engine.max_context
    )
    if not sound:
        raise BundleError(f"{model.folder}: golden prompt {number} of the manifest is corrupt; build the bundle again")


def _first_logits(model: Model, case: GoldenPrompt, recorded: tuple[float, ...]) -> float:
    """Largest difference of the recorded top logits after the prompt."""
    logits = model.engine.prefill(case.prompt)[0, -1]
    difference = float(np.abs(logits[list(case.top_ids)] - np.array(recorded, np.float32)).max())
    # NaN compares false with everything, so ask for what must hold.
    if not difference <= LOGIT_TOLERANCE:
        raise BundleError(
            f"{model.folder}: logits differ by {difference:.3g} from those recorded when it was built, at most "
            f"{LOGIT_TOLERANCE} is expected; this machine computes something else: build the bundle on it"
        )
    return difference


def _same_tokens(model: Model, case: GoldenPrompt) -> int:
    """Greedy tokens equal to the recorded ones, up to the first near tie that fell the other way."""
    answer = model.generate(case.prompt, max_tokens=len(case.tokens), temperature=0, ignore_eos=True).token_ids
    for i, (here, there, margin) in enumerate(zip(answer, case.tokens, case.margins, strict=True)):
        if here != there and margin > 2 * LOGIT_TOLERANCE:
            raise BundleError(
                f"{model.folder}: greedy token {i} of a golden prompt is {here}, {there} was recorded with a lead of "
                f"{margin:.3g}; this machine computes something else: build the bundle on it"
            )
        if here != there:
            return i
    return len(case.tokens)
