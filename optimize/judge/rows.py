"""Compares rows of a batch with each row alone: an engine may be right for one request and wrong for several.

Golden prompts run one by one, so they do not see it (TensorRT issue 4853).
"""

import numpy as np

from llmc.bundle import Manifest
from llmc.errors import BuildError
from llmc.runtime.sessions import Batch, Phase, Session

MOST_ROWS = 8
# Cached positions of the first row, and how many more each following row has.
PREFIX, LONGER = 5, 3


def check_rows(session: Session, manifest: Manifest) -> None:
    """Raise BuildError if a row's logits depend on other rows; overwrites the session's cache."""
    rows, limits = min(manifest.limits.max_batch, MOST_ROWS), manifest.limits
    longest = PREFIX + LONGER * rows + 1
    if rows < 2 or limits.max_context < longest:
        return
    generator = np.random.default_rng(0)
    session.cache.reserve(rows, longest)
    past = [PREFIX + LONGER * row for row in range(rows)]
    tokens = generator.integers(0, manifest.geometry.vocab_size, (rows, longest))
    for row, length in enumerate(past):
        feed = tokens[row : row + 1, :length]
        session.run(Batch.of(Phase.PREFILL, feed, np.zeros(1, np.int64), np.zeros((1, 0), np.int64), row))
    last, zeros = tokens[:, -1:], np.zeros((rows, 1), np.int64)
    together = session.run(Batch.of(Phase.DECODE, last, np.array(past, np.int64), zeros))[:, 0].copy()
    for row, length in enumerate(past):
        alone = session.run(Batch.of(Phase.DECODE, last[row : row + 1], np.array([length]), zeros[:1], row))[0, 0]
        difference = float(np.abs(together[row] - alone).max())
        if not difference <= manifest.golden_tolerance:  # NaN is none
            raise BuildError(
                f"row {row} of {rows} that decode together has logits {difference:.3g} away from those that it has "
                f"alone, at most {manifest.golden_tolerance:.3g} expected: {manifest.target.engine} "
                f"{manifest.target.engine_version} computes batches wrongly on {session.processor}; build with "
                "--max-batch 1, or with another version"
            )
