"""Audio from files, bytes and arrays: samples of one channel at the model's rate, within bounds."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ContextError, RequestError, UsageError, format_value, require, text_of
from llmc.strict import read_bytes

# By libsndfile's names; WAVEX is WAV with a longer header.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
LARGEST_FILE = 64 << 20  # bytes
MOST_CHANNELS = 32
RATES = 4_000, 384_000  # samples per second
LOUDEST = 1e6  # magnitude of a sample; full scale is 1, and some files of floats count as integers do
BLOCK = 1 << 16  # values that are decoded at a time
_SEND = f"send WAV, FLAC, Ogg or MP3 of at most {LARGEST_FILE >> 20} MiB"


def read_samples(source: Any, rate: int, most: int, name: str = "the audio") -> NDArray[np.float32]:
    """Samples float32 [N] at ``rate``, the mean of all channels.

    Args:
        source: the path of a WAV, FLAC, Ogg or MP3 file; its bytes; or floats [N] at ``rate``, between -1 and 1.
        rate: samples per second.
        most: samples; longer audio is refused before it is decoded.
        name: the name of the audio in errors.

    Raises:
        ContextError: it is too long.
        MissingExtraError: soundfile or soxr is not installed.
        RequestError: it cannot be decoded, has no samples, or exceeds a bound.
        UsageError: it is no audio.
    """
    if isinstance(source, np.ndarray):
        if source.dtype.kind != "f" or source.ndim != 1:
            description = f"an array of {source.dtype} {list(source.shape)}"
            raise UsageError("messages", f"holds {name} as {description:.200}, expected floats [samples]")
        _check_length(len(source), most, rate, name)
        samples = source.astype(np.float32)
    elif isinstance(source, bytes):
        samples = _decode(source, rate, most, name)
    elif isinstance(source, str | os.PathLike):
        try:
            content = read_bytes(Path(source), LARGEST_FILE)
        except (OSError, ValueError) as error:
            raise RequestError(f"{name} cannot be read ({error!s:.200}); {_SEND}") from error
        samples = _decode(content, rate, most, name)
    else:
        expected = "the path of a file, its bytes or an array of samples"
        raise UsageError("messages", f"holds {name} as {format_value(source)}, expected {expected}")
    if not len(samples):
        raise RequestError(f"{name} holds no samples; {_SEND}")
    if not (np.abs(samples) <= LOUDEST).all():
        raise RequestError(f"{name} holds samples beyond {LOUDEST:g} or NaN, expected -1 to 1; scale it")
    return samples


def _check_length(samples: int, most: int, rate: int, name: str) -> None:
    if samples > most:
        raise ContextError(
            f"{name} has {samples / rate:.1f} s or more, and at most {most / rate:.1f} s fit into the context",
            "send less",
            parameter="prompt",
        )


def _decode(content: bytes, rate: int, most: int, name: str) -> NDArray[np.float32]:
    soundfile = require("soundfile", "audio")
    if len(content) > LARGEST_FILE:
        raise RequestError(f"{name} has {len(content)} bytes; {_SEND}")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise RequestError(f"{name} is {file.format}; {_SEND}")
            _check_header(file, rate, most, name)
            return np.concatenate([*_read_blocks(file, rate, most, name)] or [np.empty(0, np.float32)])
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise anything on damaged files
        raise RequestError(f"{name} cannot be decoded ({text_of(error):.200}); {_SEND}") from error


def _check_header(file: Any, rate: int, most: int, name: str) -> None:
    if not RATES[0] <= file.samplerate <= RATES[1]:
        expected = f"{RATES[0]} to {RATES[1]}"
        raise RequestError(f"{name} has {file.samplerate} samples per second, expected {expected}; resample it")
    if not 1 <= file.channels <= MOST_CHANNELS:
        raise RequestError(f"{name} has {file.channels} channels, expected at most {MOST_CHANNELS}; mix them")
    _check_length(int(file.frames * rate / file.samplerate), most, rate, name)


def _read_blocks(file: Any, rate: int, most: int, name: str) -> Iterator[NDArray[np.float32]]:
    """Mixed and resampled blocks; a header may have told less than there is."""
    resampler = None
    if file.samplerate != rate:
        resampler = require("soxr", "audio").ResampleStream(file.samplerate, rate, 1, dtype="float32")
    size, total, last = max(1, BLOCK // file.channels), 0, False
    while not last:
        block = file.read(size, dtype="float32", always_2d=True)
        last, samples = len(block) < size, block.mean(1, dtype=np.float32)
        if resampler is not None:
            samples = resampler.resample_chunk(samples, last=last)
        _check_length(total := total + len(samples), most, rate, name)
        yield samples
