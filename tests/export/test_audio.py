"""A tower that hears, its decoder and its processor are those of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import asr
from doubles.lowerings import open_session
from doubles.towers import copy_checkpoint, write_json

from llmc.bundle import Geometry, read_export
from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.runtime.audio.tower import AudioTower

# Largest difference by largest value: float32 sums in another order, 3e-7 for rows and 2e-6 for logits here.
TOLERANCE = 2e-5
# Shorter than a chunk of 1 s and than 0.5 s, which is the least; a whole window of 2 s; two windows and a part.
SECONDS = (0.3, 0.73, 2.0, 4.37)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asr.share_hearing(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(folder: Path) -> asr.Reference:
    return asr.Reference(folder / "checkpoint")


@pytest.fixture(scope="module")
def given(reference: asr.Reference) -> list[dict[str, Any]]:
    """transformers' inputs for each clip, in languages that are given or not."""
    return [
        reference.prepare(asr.hum(seconds, number), language="en" if number % 2 else None)
        for number, seconds in enumerate(SECONDS)
    ]


@pytest.fixture(scope="module")
def geometry(folder: Path) -> Geometry:
    return read_export(folder / "export").geometry


@pytest.fixture(scope="module")
def tower(folder: Path, geometry: Geometry) -> Callable[..., AudioTower]:
    """The tower of the export, with what ``spoil`` does to its inputs."""
    session, audio = open_session(folder / "export" / "audio.onnx"), geometry.audio
    assert audio is not None

    def make(spoil: Callable[[dict[str, Any]], object] = lambda feeds: None) -> AudioTower:
        def run(**feeds: Any) -> np.ndarray:
            spoil(feeds)
            return session.run(None, feeds)[0]

        return AudioTower(audio, run)

    return make


def measure(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def hear(tower: AudioTower, number: int, prompt: np.ndarray) -> Any:
    clip = tower.prepare(asr.hum(SECONDS[number], number), "the audio", 1000)
    return tower.compute_rows([clip], prompt.tolist())


def test_rows_are_those_of_transformers(given, reference, tower):
    import torch

    for number, inputs in enumerate(given):
        with torch.no_grad():
            names = ("input_features", "input_features_mask")
            expected = reference.model.get_audio_features(**{name: inputs[name] for name in names}).pooler_output
        assert measure(hear(tower(), number, inputs["input_ids"][0].numpy()).rows, expected.numpy()) < TOLERANCE


def exchange_chunks(feeds: dict[str, Any]) -> None:
    feeds["features"] = feeds["features"][::-1]


def shift_rows(feeds: dict[str, Any]) -> None:
    feeds["rows"] = np.maximum(feeds["rows"] - 1, 0)


def test_the_tolerance_notices_a_planted_error(given, tower):
    for spoil in (exchange_chunks, shift_rows):
        prompt = given[-1]["input_ids"][0].numpy()
        expected, found = (hear(make, len(SECONDS) - 1, prompt).rows for make in (tower(), tower(spoil)))
        assert measure(found, expected) > 100 * TOLERANCE


def test_a_batch_of_clips_of_any_length_has_the_logits_of_transformers(folder, given, geometry, reference, tower):
    import torch

    run = open_session(folder / "export" / "decoder.onnx")
    ids = [each["input_ids"][0].numpy() for each in given]
    shape = len(ids), max(map(len, ids))
    feeds = {
        "input_ids": np.zeros(shape, np.int64),
        "past_lengths": np.zeros(len(ids), np.int64),
        "logit_indices": np.tile(range(shape[1]), (len(ids), 1)),
        "embedding_indices": np.full(shape, -1),
        "embeddings": np.zeros((0, geometry.row_width), np.float32),
    }
    for number, own in enumerate(ids):
        feeds["input_ids"][number, : len(own)] = own
        heard = hear(tower(), number, own)
        feeds["embedding_indices"][number, heard.positions] = len(feeds["embeddings"]) + np.arange(len(heard.rows))
        feeds["embeddings"] = np.concatenate([feeds["embeddings"], heard.rows])
    for cache in geometry.caches:
        feeds |= {name: np.zeros(cache.shape_of(*shape), np.float32) for name in cache.inputs}
    for found, own, inputs in zip(run.run(None, feeds)[0], ids, given, strict=True):
        with torch.no_grad():
            expected = reference.model(**inputs).logits[0].numpy()
        assert measure(found[: len(own)], expected) < TOLERANCE


def test_the_text_part_alone_is_a_qwen3(folder):
    found = read_checkpoint(folder / "checkpoint", text_only=True)
    assert found.geometry.tower is None
    assert found.notes == ("config.json: only the text part was exported, which hears no audio",)


def test_files_of_features_of_both_layouts_are_read(folder, tmp_path):
    """Since transformers 5 one file holds the other, which the published models have as Whisper's."""
    checkpoint = copy_checkpoint(folder / "checkpoint", tmp_path)
    (checkpoint / "processor_config.json").unlink()
    own = ("n_window", "min_length")
    older = {name: value for name, value in asr.FEATURES.items() if name not in own}
    older["feature_extractor_type"] = "WhisperFeatureExtractor"
    write_json(checkpoint / "preprocessor_config.json", older)
    assert read_checkpoint(checkpoint).geometry.audio == read_checkpoint(folder / "checkpoint").geometry.audio


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"n_window": 25}, "n_window=25 is unsupported; expected 50, as it is published"),
    ("config.json", {"n_window_infer": 250}, "n_window_infer=250 is unsupported; expected a multiple of 100"),
    ("config.json", {"scale_embedding": True}, "scale_embedding=True is unsupported; expected false"),
    ("config.json", {"activation_function": "relu"}, "activation_function='relu' is unsupported"),
    ("config.json", {"encoder_attention_heads": 5}, "encoder_attention_heads=5 .* a divisor of d_model=32"),
    ("config.json", {"num_key_value_heads": 2}, "num_key_value_heads=2 is unsupported; expected 4"),
    ("config.json", {"max_position_embeddings": 12}, "max_position_embeddings=12 .* at least 13"),
    ("config.json", {"output_dim": 32}, "output_dim=32 is unsupported; expected 64, the text part's"),
    ("config.json", {"encoder_layers": 1}, "is unused by"),
    ("config.json", {"encoder_layers": 3}, "is missing"),
    ("config.json", {"rope": 1}, "rope=1 is not known to llmc"),
    ("processor_config.json", {"hop_length": 0}, "hop_length=0 is unsupported"),
    ("processor_config.json", {"n_fft": 100}, "n_fft=100 is unsupported; expected at least hop_length"),
    ("processor_config.json", {"min_length": 200}, "n_fft=400 .* below twice min_length"),
    ("processor_config.json", {"sampling_rate": 8000}, "sampling_rate=8000 is unsupported; expected 16000"),
    ("processor_config.json", {"feature_size": 80}, "feature_size=80 is unsupported; expected 20, the audio_config's"),
    ("processor_config.json", {"dither": 0.1}, "dither=0.1 is unsupported"),
    ("processor_config.json", {"feature_extractor_type": "MoonshineFeatureExtractor"}, "expected one of Qwen3ASR"),
]


@pytest.mark.threat("processor-settings")
@pytest.mark.parametrize(("file", "changes", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_is_not_understood_is_refused(folder, tmp_path, file, changes, message):
    checkpoint = copy_checkpoint(folder / "checkpoint", tmp_path)
    values = json.loads((checkpoint / file).read_text())
    inner = values["audio_config" if file == "config.json" else "feature_extractor"]
    inner |= changes
    write_json(checkpoint / file, values)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(checkpoint)


def test_a_token_that_the_tokenizer_has_not_is_refused(folder, tmp_path):
    checkpoint = copy_checkpoint(folder / "checkpoint", tmp_path)
    values = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", {**values, "audio_token_id": 4097})
    with pytest.raises(CheckpointError, match=r"no token <\|audio_pad\|> with the id 4097"):
        read_checkpoint(checkpoint)
