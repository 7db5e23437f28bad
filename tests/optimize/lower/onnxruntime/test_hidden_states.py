"""The output ``hidden_states`` of lowered graphs is what the head multiplies, in every precision."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmc.optimize.build import build
from llmc.runtime import load
from llmc.runtime.sessions import Batch, Phase

# Root mean square of the difference from transformers over that of its hidden states on the small model: rounding of
# float32, of weights to 8 bits, and of weights to 4 bits. The states of the token before differ by more than 0.5.
TOLERANCE = {"fp32": 1e-4, "int8": 0.05, "int4": 0.25}
# Logits of the float graph from its hidden states and the checkpoint's head, in standard deviations of the logits.
HEAD_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Callable[[list[int]], np.ndarray]:
    """The last hidden states [S, H] by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()

    def hidden(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()

    return hidden


@pytest.fixture(scope="module")
def head(tiny_checkpoint: Path) -> np.ndarray:
    """The checkpoint's output embedding [V, H]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    return model.get_output_embeddings().weight.detach().numpy()


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


@pytest.mark.parametrize("precision", TOLERANCE)
def test_they_are_transformers_last_ones(precision, tiny_export, tiny_checkpoint, tmp_path, reference, head):
    bundle = build(tiny_export, tmp_path / "bundle", precision=precision).output
    with load(bundle, threads=1, self_test=False) as model:
        session = model.runner.session
        ids = model.tokenizer.encode((tiny_checkpoint.parent / "validation.txt").read_text()[:400])[:40]
        session.cache.reserve(1, 64)
        indices = np.arange(len(ids))[None]
        logits = session.run(Batch(Phase.PREFILL, np.array([ids]), np.zeros(1, np.int64), indices))[0].copy()
        prefill = session.hidden[0].copy()
        session.run(Batch(Phase.DECODE, np.array([ids[-1:]]), np.array([len(ids) - 1]), np.zeros((1, 1), np.int64)))
        decode = session.hidden[0].copy()
    wanted = reference(ids)
    assert off(prefill, wanted) <= TOLERANCE[precision]
    assert off(decode, wanted[-1:]) <= TOLERANCE[precision]
    assert off(prefill[1:], wanted[:-1]) > 2 * max(TOLERANCE.values())  # the tolerance notices the wrong position
    if precision == "fp32":
        assert np.abs(prefill @ head.T - logits).max() / logits.std() <= HEAD_TOLERANCE
        assert np.abs(prefill[1:] @ head.T - logits[:-1]).max() / logits.std() > HEAD_TOLERANCE
