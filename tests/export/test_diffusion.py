"""LLaDA and Dream: tokens see all others, and their exports compute what transformers does under such a mask."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import diffusing

from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.streaming import StreamedDecoder

# Largest absolute difference of logits, up to 20, that sums in another order make: 3e-5 were measured. Of a causal mask
# it is 10.
LOGIT_TOLERANCE = 4e-4
IDS = np.random.default_rng(0).integers(4, diffusing.VOCAB, 20).tolist()


@pytest.fixture(params=diffusing.SHIFTS)
def checkpoint(request: pytest.FixtureRequest, diffusion_models: Path) -> Path:
    return diffusion_models / str(request.param)


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max())


def test_logits_equal_transformers_whole_and_over_what_is_cached(checkpoint, onnxruntime_run):
    config = read_checkpoint(checkpoint).config
    run, wanted = onnxruntime_run(Path(f"{checkpoint}-export")), diffusing.Transformers(checkpoint)(IDS)
    pasts = {name: np.zeros((1, 2, 24, 16), np.float32) for it in config.geometry.caches for name in it.inputs}

    def call(start: int, end: int, seen: int) -> np.ndarray:
        ids, places = np.array([IDS[start:end]]), np.arange(end - start)[None]
        feeds = {"input_ids": ids, "past_lengths": np.array([start]), "logit_indices": places, **pasts}
        logits, *presents = run({**feeds, "seen_lengths": np.array([seen])})
        pasts.update(zip(pasts, presents, strict=True))
        return np.asarray(logits[0])

    assert apart(call(0, 20, 20), wanted) <= LOGIT_TOLERANCE
    assert apart(call(5, 9, 20), wanted[5:9]) <= LOGIT_TOLERANCE  # sees those cached behind it, too
    assert apart(call(5, 9, 9), wanted[5:9]) > 100 * LOGIT_TOLERANCE  # and tells whether it does


def test_streamed_layers_and_plain_torch_equal_transformers(checkpoint):
    decoder = StreamedDecoder(Path(f"{checkpoint}-export"))
    with torch.no_grad():
        x = decoder.embed(torch.tensor([IDS]))
        for index in range(decoder.geometry.layers):
            x, _ = decoder.run(decoder.layer(index), x)
        logits = decoder.norm()(x)[0] @ decoder.rows(decoder.head).T
    plain = diffusing.Plain(checkpoint)
    plain.begin(len(IDS))
    for found in (logits.numpy(), plain(IDS)):
        assert apart(found, diffusing.Transformers(checkpoint)(IDS)) <= LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llada", {"alibi": True}, ["alibi=True", "expected false"]),
        ("llada", {"block_type": "sequential"}, ["block_type='sequential'", 'expected "llama"']),
        ("llada", {"embedding_size": 4224}, ["embedding_size=4224", "vocab_size=4096"]),
        ("llada", {"mask_token_id": None}, ["mask_token_id=None", "expected one token id"]),
        ("Dream", {"mask_token_id": 4096}, ["mask_token_id=4096", "expected one token id"]),
        ("Dream", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, ["use_sliding_window"]),
    ],
)
def test_what_would_compute_something_else_is_refused(family, changes, words, diffusion_models, tmp_path):
    folder = shutil.copytree(diffusion_models / family, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder)
    assert all(word in str(error.value) for word in words), error.value
