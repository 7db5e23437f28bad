"""The streamed decoder is the whole one, a part at a time, and broken files are refused by name."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.decoders import load_decoder

from llmc.errors import CheckpointError
from llmc.export.blocks.part import Call
from llmc.export.blocks.scale import Softcap
from llmc.export.streaming import StreamedDecoder

# Largest absolute difference of logits (up to 20) from transformers, as for the exported graph: sums in another order.
LOGIT_TOLERANCE = 2e-4
TOKENS = 20


def ids() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 96, (2, TOKENS)))


@torch.inference_mode()
def test_parts_equal_the_whole_decoder(case):
    """The same modules with the same weights, read another way: bit for bit.

    Layers that read more than the one before put out are covered by the logits below.
    """
    streamed, whole = StreamedDecoder(case.export), load_decoder(case.checkpoint)
    assert streamed.geometry == whole.config.geometry
    if streamed.geometry.shares:
        return
    x = streamed.embed(ids())
    start = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(x, whole.embed(ids(), start), rtol=0, atol=0)
    long = [bool(rope.long_factors) for rope in whole.config.ropes]  # the text is longer than 12
    ropes = [rope.long_inv_freq if it else rope.inv_freq for it, rope in zip(long, whole.rotary_emb, strict=True)]
    for index, layer in enumerate(whole.model.layers):
        held = streamed.geometry.caches_of(index)
        cache = tuple(torch.zeros(item.shape_of(2, TOKENS)) for item in held for _ in item.inputs)
        wanted, presents = layer(x, cache, Call(start, ropes, start + TOKENS))
        part = streamed.layer(index)
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
        found, left = streamed.run(part, x)
        assert list(left) == [name for item in held for name in item.outputs]
        for one, other in zip((found, *left.values()), (wanted, *presents), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        x = wanted
    norm = streamed.norm()(x)
    torch.testing.assert_close(norm, whole.model.norm(x), rtol=0, atol=0)


@torch.inference_mode()
def test_the_head_completes_the_logits(case):
    streamed = StreamedDecoder(case.export)
    assert streamed.head == ("model.embed_tokens.weight" if streamed.geometry.tied_head else "lm_head.weight")
    x = streamed.embed(ids())
    for index in range(streamed.geometry.layers):
        x, _ = streamed.run(streamed.layer(index), x)
    bias = streamed.rows("lm_head.bias") if streamed.config.head_bias else 0
    logits = (
        streamed.norm()(x[..., : streamed.geometry.hidden_size]) @ streamed.rows(streamed.head).T + bias
    ) * streamed.config.logit_scale
    logits = Softcap(streamed.config.logit_softcap)(logits)
    np.testing.assert_allclose(logits.numpy(), case.reference(ids().numpy()), atol=LOGIT_TOLERANCE)


def test_a_planted_error_exceeds_the_tolerance(window_case):
    streamed = StreamedDecoder(window_case.export)
    with torch.inference_mode():
        x = streamed.embed(ids())
        for index in (0, 0):  # the first layer twice
            x, _ = streamed.run(streamed.layer(index), x)
        logits = streamed.norm()(x) @ streamed.rows(streamed.head).T
    assert np.abs(logits.numpy() - window_case.reference(ids().numpy())).max() > LOGIT_TOLERANCE


@pytest.fixture
def export(window_case, tmp_path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(window_case.export, tmp_path / "export"))


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"], ids=["missing", "empty", "half", "list"])
def test_an_export_without_a_sound_config_is_refused(export, content):
    (export / "config.json").unlink()
    if content is not None:
        (export / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        StreamedDecoder(export)
