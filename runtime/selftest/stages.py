"""Golden values of a stage before the last, which answers nothing: hidden states from made-up ones."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.runtime.selftest.values import VerifyReport, compare, sample_rows
from llmc.runtime.sessions import Batch, Phase, Session

TOKENS = 8  # of the made-up prompt


def run_stage(session: Session, manifest: Manifest) -> NDArray[np.float32]:
    """Values [n] of the hidden states that a stage before the last makes of made-up ones, in a prompt and a step."""
    hidden = np.random.default_rng(0).standard_normal((1, TOKENS, manifest.geometry.hidden_size), np.float32)
    ids, past, nothing = np.arange(TOKENS)[None], np.zeros(1, np.int64), np.zeros((1, 0), np.int64)
    session.cache.reserve(1, TOKENS + 1)
    prompt = session.run(Batch.of(Phase.PREFILL, ids, past, nothing, hidden=hidden))
    step = session.run(Batch.of(Phase.DECODE, ids[:, -1:], past + TOKENS, nothing, hidden=hidden[:, -1:]))
    return sample_rows(np.concatenate([prompt[0], step[0]]))


def replay_stage(folder: Path, manifest: Manifest, session: Session) -> VerifyReport:
    """Compare a stage before the last, which answers nothing, with what it computed where it was built."""
    apart = compare(folder, "hidden states", manifest.vectors[0], run_stage(session, manifest))
    return VerifyReport(len(manifest.files), 0, 0, 0, apart)
