"""Audio files become samples of one channel at the model's rate, or are refused."""

import numpy as np
import pytest
from doubles import asr

from llmc.errors import ContextError, RequestError, UsageError
from llmc.runtime.audio import decode
from llmc.runtime.audio.decode import read_samples

pytest.importorskip("soundfile")
MOST = 16_000 * 60
HUM = asr.hum(0.8)
# Rounding to the file's integers; of MP3, whose samples are other ones, a bound on their mean square.
STEPS = {"PCM_U8": 2**-7, "PCM_16": 2**-15, "PCM_24": 2**-23, "PCM_32": 2**-24, "FLOAT": 0.0, "DOUBLE": 0.0}


@pytest.mark.parametrize("subtype", STEPS)
def test_wav_of_every_depth_is_read(subtype):
    found = read_samples(asr.write_wav(HUM, subtype=subtype), asr.RATE, MOST)
    assert found.dtype == np.float32 and np.abs(found - HUM).max() <= STEPS[subtype]


def test_flac_is_read_exactly_and_compressed_formats_about():
    assert np.abs(read_samples(asr.write_wav(HUM, subtype="PCM_16", format="FLAC"), asr.RATE, MOST) - HUM).max() < 1e-4
    for format_, subtype in (("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")):
        found = read_samples(asr.write_wav(HUM, subtype=subtype, format=format_), asr.RATE, MOST)
        assert abs(len(found) - len(HUM)) < 3000
        assert np.mean(found**2) == pytest.approx(np.mean(HUM**2), rel=0.2)


def test_files_arrays_and_bytes_are_the_same(tmp_path):
    (path := tmp_path / "hum.wav").write_bytes(content := asr.write_wav(HUM))
    for source in (path, str(path), content, HUM, HUM.astype(np.float64)):
        assert (read_samples(source, asr.RATE, MOST) == HUM).all()


def test_channels_are_mixed_to_their_mean():
    both = np.stack([HUM, np.zeros_like(HUM)], 1)
    assert np.allclose(read_samples(asr.write_wav(both), asr.RATE, MOST), HUM / 2, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(rate, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 1000)
    times = np.arange(2 * rate) / rate
    found = read_samples(asr.write_wav(np.sin(2 * np.pi * 440 * times), rate), asr.RATE, MOST)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / asr.RATE)
    assert len(found) == 2 * asr.RATE
    assert np.abs(found - expected)[1000:-1000].max() < 1e-3


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (b"", RequestError, "the audio cannot be decoded"),
        (b"no audio", RequestError, "the audio cannot be decoded"),
        (asr.write_wav(HUM)[:30], RequestError, "the audio (cannot be decoded|holds no samples)"),
        (asr.write_wav(HUM, subtype="PCM_16", format="AIFF"), RequestError, "the audio is AIFF; send WAV, FLAC"),
        (asr.write_wav(HUM, 3_999), RequestError, "has 3999 samples per second, expected 4000 to 384000"),
        (asr.write_wav(np.zeros((9, 33))), RequestError, "has 33 channels, expected at most 32"),
        (asr.write_wav(HUM[:0]), RequestError, "holds no samples"),
        (asr.write_wav(np.array([0, np.nan], np.float32)), RequestError, "beyond 1e\\+06 or NaN"),
        (np.full(9, 2e6), RequestError, "beyond 1e\\+06 or NaN"),
        (asr.write_wav(np.zeros(2 * MOST)), ContextError, "has 120.0 s or more, and at most 60.0 s fit"),
        (np.zeros(MOST + 1, np.float32), ContextError, "at most 60.0 s fit"),
        ("/nowhere.wav", RequestError, "cannot be read"),
        (np.zeros((9, 2), np.float32), UsageError, r"an array of float32 \[9, 2\], expected floats \[samples\]"),
        (np.zeros(9, np.int16), UsageError, "an array of int16"),
        (3, UsageError, "holds the audio as 3, expected the path"),
    ],
)
def test_what_is_no_audio_or_beyond_a_bound_is_refused(source, error, said):
    with pytest.raises(error, match=said):
        read_samples(source, asr.RATE, MOST)


@pytest.mark.threat("image-bombs")
def test_a_file_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(decode, "LARGEST_FILE", 1000)
    with pytest.raises(RequestError, match="bytes; send WAV"):
        read_samples(asr.write_wav(HUM), asr.RATE, MOST)


@pytest.mark.threat("image-bombs")
def test_audio_is_counted_while_it_is_decoded(monkeypatch):
    """A header may tell of less, and compressed silence is short."""
    monkeypatch.setattr(decode, "BLOCK", 1000)
    monkeypatch.setattr(decode, "_check_header", lambda *given: None)
    silence = asr.write_wav(np.zeros(2 * MOST), subtype="PCM_16", format="FLAC")
    with pytest.raises(ContextError, match=r"has 60\.\d s or more"):
        read_samples(silence, asr.RATE, MOST)
