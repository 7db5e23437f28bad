"""Golden texts of models that embed or rank."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.errors import BundleError
from llmc.runtime.selftest.values import KEPT_VALUES, VerifyReport, corrupt, difference, differs


def replay_texts(model: Any, progress: Callable[[str], None], prompts: int | None) -> VerifyReport:
    """:func:`replay` of a model that embeds or ranks."""
    cases, tolerance = model.manifest.vectors, model.manifest.golden_tolerance
    if not cases:
        raise BundleError("the manifest has no golden texts", "build the bundle again", path=model.folder)
    largest, vocab = 0.0, model.manifest.geometry.vocab_size
    cases = tuple(sorted(cases, key=lambda case: len(case.prompt))[:prompts]) if prompts else cases
    for number, case in enumerate(cases, 1):
        progress(f"golden text {number} of {len(cases)}")
        values = np.array(case.values, np.float32)
        sound = (
            0 < len(case.prompt) <= model.max_context
            and 0 < len(values) == min(KEPT_VALUES, model.width)
            and all(0 <= token < vocab for token in case.prompt)
            and np.isfinite(values).all()
        )
        if not sound:
            raise corrupt(model.folder, f"text {number}")
        apart = difference(model.encode([case.prompt])[0, : len(values)], values)
        if not apart <= tolerance:
            raise differs(model, f"a vector differs by {apart:.3g} from that")
        largest = max(largest, apart)
    return VerifyReport(len(model.manifest.files), len(cases), 0, 0, largest)
