"""Golden values of draft heads, whose guesses are no text: hidden states and logits from made-up hidden states."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import BundleError
from llmc.runtime.selftest.values import VerifyReport, compare, sample_rows
from llmc.runtime.sessions import Batch, Phase, Session

TOKENS = 8  # of the made-up prompt


def run_head(session: Session, manifest: Manifest) -> list[NDArray[np.float32]]:
    """Values [n] of the hidden states and of the logits that a draft head makes of made-up ones, in a prompt and a
    step."""
    geometry, found = manifest.geometry, list[tuple[NDArray[np.float32], ...]]()
    rows = np.random.default_rng(0).standard_normal((TOKENS + 1, geometry.row_width), np.float32)
    ids = np.arange(len(rows))[None] % geometry.vocab_size
    session.cache.reserve(1, len(rows))
    if geometry.borrows:
        (count,), dtype = session.cache.form(len(rows))
        session.cache.write(0, 0, len(rows), np.random.default_rng(1).standard_normal(count).astype(dtype))
    for phase, part in ((Phase.PREFILL, slice(TOKENS)), (Phase.DECODE, slice(TOKENS, None))):
        places = np.arange(len(rows[part]))[None]
        past = np.full(1, part.start or 0)
        call = Batch.of(phase, ids[:, part], past, places, embedding_indices=places, embeddings=rows[part])
        logits = session.run(call)[0]
        assert session.hidden is not None, "a head gives its hidden states"
        found.append((session.hidden[0].copy(), logits[np.isfinite(logits)]))
    return [sample_rows(np.concatenate([it.ravel() for it in parts])) for parts in zip(*found, strict=True)]


def replay_head(model: Any) -> VerifyReport:
    """Compare a draft head, whose guesses are no text, with what it computed where it was built."""
    found, cases = run_head(model.runner.session, model.manifest), model.manifest.vectors
    if len(cases) != len(found):
        raise BundleError(
            "the manifest has no golden values of a draft head", "build the bundle again", path=model.folder
        )
    named = zip(("hidden states", "logits"), cases, found, strict=True)
    apart = max(compare(model.folder, what, case, values) for what, case, values in named)
    return VerifyReport(len(model.manifest.files), 0, 0, 0, apart)
