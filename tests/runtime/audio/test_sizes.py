"""Numbers of rows of audio, and settings that no export writes."""

from dataclasses import replace

import numpy as np
import pytest
from doubles.geometries import AUDIO

from llmc.runtime.audio.tower import make_feeds


def test_rows_are_counted_as_transformers_counts_them():
    qwen = pytest.importorskip("transformers.models.qwen3_asr.modeling_qwen3_asr")
    for frames in (*range(1, 130), 799, 800, 801, 6000):
        assert AUDIO.count_rows(frames) == qwen._get_feat_extract_output_lengths(frames), frames
    assert AUDIO.count_rows(0) == 0


@pytest.mark.parametrize("frames", [1, 99, 100, 101, 800, 801, 1650])
def test_calls_have_a_window_each_and_together_all_frames_and_rows(frames):
    features = np.arange(128 * frames, dtype=np.float32).reshape(128, frames) + 1
    calls = list(make_feeds(features, AUDIO))
    assert [len(call["features"]) for call in calls[:-1]] == [8] * ((frames - 1) // 800)
    joined = np.concatenate([call["features"] for call in calls]).transpose(1, 0, 2).reshape(128, -1)
    assert (joined[:, :frames] == features).all() and not joined[:, frames:].any()
    assert sum(len(call["rows"]) for call in calls) == AUDIO.count_rows(frames)
    assert all(len(call["rows"]) <= AUDIO.most_rows for call in calls)


@pytest.mark.threat("bundle-numbers")
@pytest.mark.parametrize(
    "changes",
    [
        {"token_id": 151_936},
        {"token": ""},
        {"opening": "language {language}"},
        {"linears": ()},
        {"channels": 481},
        {"spectrum": replace(AUDIO.spectrum, hop=401)},
        {"spectrum": replace(AUDIO.spectrum, least=200)},
    ],
)
def test_settings_that_no_export_writes_are_unsound(changes):
    assert AUDIO.is_sound(151_936) and not replace(AUDIO, **changes).is_sound(151_936)
