"""A few seconds of hostile files: what once went wrong (``corpus.json``), and then what chance makes of sound ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.ggufs import write_gguf
from doubles.images import write_images
from doubles.towers import write_seeing

SECONDS = dict.fromkeys(("bundle", "checkpoint", "gguf", "processor", "images"), 1)
# A case that hangs ends the test after this much more: the corpus, the start, and the longest case that is allowed.
PATIENCE = 120
HOSTILE = Path(__file__).with_name("hostile.py")


def fuzzed(subject: str, folder: Path, scratch: Path, seconds: float, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(HOSTILE), subject, str(folder), "--seconds", str(seconds), "--scratch", str(scratch)]
    return subprocess.run(
        [*command, *more],
        capture_output=True,
        text=True,
        timeout=seconds + PATIENCE,
        env={**os.environ, "LLMC_CACHE": str(scratch / "cache")},
    )


@pytest.mark.threat("processor-settings")
@pytest.mark.parametrize("subject", SECONDS)
def test_hostile_files_are_used_as_if_sound_or_refused_in_one_sentence(subject, tiny_bundle, tiny_checkpoint, tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    folder = {"bundle": tiny_bundle, "checkpoint": tiny_checkpoint}.get(subject, made)
    if subject == "gguf":
        write_gguf(tiny_checkpoint, folder / "model.gguf", "Q4_0")
    if subject == "processor":
        write_seeing(made)
    if subject == "images":
        write_images(made)
    tried = fuzzed(subject, folder, tmp_path, SECONDS[subject])
    assert tried.returncode == 0, "\n".join([*tried.stdout.splitlines()[-2:], tried.stderr[-2000:]])


def test_a_case_that_ends_the_process_is_named(tiny_bundle, tmp_path):
    dying = tmp_path / "dying.py"
    dying.write_text(HOSTILE.read_text().replace("        use(folder)", "        os.abort()"))
    (tmp_path / "corpus.json").write_text("[]")
    tried = subprocess.run(
        [sys.executable, str(dying), "bundle", str(tiny_bundle), "--seconds", "1", "--scratch", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert tried.returncode < 0
    assert tried.stdout.splitlines()[-1].startswith('{"file": "')
