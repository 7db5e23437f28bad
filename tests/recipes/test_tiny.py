"""The texts beside the small model: one it was trained on, to calibrate, and one it never saw, to judge."""

import hashlib
import json
from pathlib import Path

import pytest

END = "<|endoftext|>"
HELD_OUT = 20  # as in train.py, which cannot be imported without torch and transformers
# Code of one library shares such lines as imports and licences; whole files in both texts would share far more.
MOST_SHARED_LINES = 0.02


@pytest.fixture
def folder(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint.parent


def documents(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.txt").read_bytes().decode().split(END)


def held_out(names: list[str]) -> list[bool]:
    """For each file of the corpus whether it belongs to the validation split."""
    digests = [hashlib.sha256(name.encode()).digest() for name in names]
    return [int.from_bytes(digest[:4], "big") % HELD_OUT == 0 for digest in digests]


def shared_lines(first: list[str], second: list[str]) -> float:
    """Share of the first text's long lines that the second holds too."""
    lines = [[line.strip() for text in texts for line in text.split("\n")] for texts in (first, second)]
    long = [line for line in lines[0] if len(line) > 40]
    return sum(line in set(lines[1]) for line in long) / len(long)


def test_calibration_takes_training_files_and_validation_takes_others(folder):
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert held_out(training["calibration_text_files"]) == [False] * len(documents(folder, "calibration"))
    assert held_out(training["validation_text_files"]) == [True] * len(documents(folder, "validation"))


def test_the_texts_do_not_overlap(folder):
    calibration, validation = documents(folder, "calibration"), documents(folder, "validation")
    assert not set(calibration) & set(validation)
    assert shared_lines(validation, calibration) < MOST_SHARED_LINES
    planted = [*calibration, max(validation, key=len)]
    assert shared_lines(validation, planted) > MOST_SHARED_LINES
