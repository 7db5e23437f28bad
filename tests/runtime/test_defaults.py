"""What a request gets where the caller leaves something open, and a stop token that cannot come."""

from pathlib import Path

import numpy as np
import pytest

from llmc.errors import UsageError
from llmc.runtime import load

LONG = np.random.default_rng(0).integers(3, 4096, 300).tolist()


# B10: the caller asked for no number of tokens, yet is refused for the default one.
def test_the_default_for_new_tokens_fits_the_context(tiny_bundle: Path):
    with load(tiny_bundle, threads=1, max_context=64) as model:
        assert len(model.generate(LONG[:10], temperature=0, ignore_eos=True).token_ids) == 54


# B12: a stop token that the vocabulary does not have
def test_a_stop_token_outside_the_vocabulary_is_refused(tiny_bundle: Path):
    with load(tiny_bundle, threads=1) as model, pytest.raises(UsageError, match="stop_token_ids"):
        model.generate("x", max_tokens=1, stop_token_ids=[10**9])
