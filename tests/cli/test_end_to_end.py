"""The real thing, from the checkpoint to tokens, as a user types it; and the ways in which it is stopped or refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.clocks import until
from doubles.processes import slow_llmc

from llmc.runtime import load

PROMPT = "def read(path):\n    with open("
GREEDY = ("--temperature", 0, "--max-tokens", 12)
ENDLESS = ("--temperature", 0, "--max-tokens", 1900, "--ignore-eos")
COMMAND = (sys.executable, "-m", "llmc.cli")
# A build that waits with its last file for as long as anyone wants to interrupt it.
UNFINISHED = """
import sys, time
from llmc.cli.main import main
from llmc.optimize.judge import finished

finished.write_manifest = lambda *_: time.sleep(600)
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def completion(tiny_bundle: Path) -> str:
    """What the library says to the prompt."""
    with load(tiny_bundle) as model:
        return model.generate(PROMPT, temperature=0, max_tokens=12).text


@pytest.fixture
def copied_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


# ------------------------------------------------------------------------------------------------------ checkpoint on


@pytest.mark.usefixtures("one_trace")
def test_checkpoint_becomes_export_becomes_bundle_becomes_text(llmc, one_layer: Path, tmp_path: Path):
    """And a build from the checkpoint makes the same bundle at once."""
    export, bundle, at_once = (tmp_path / name for name in ("export", "bundle", "once"))
    how = ("--int4", "--max-context", 128)
    assert llmc("export", one_layer, "-o", export).code == 0
    assert llmc("build", export, "-o", bundle, *how).code == 0
    ran = llmc("run", bundle, "-p", PROMPT, *GREEDY, "--ignore-eos", "--stats")
    assert ran.code == 0
    assert "answer 12 tokens" in ran.err
    report = json.loads(llmc("build", one_layer, "-o", at_once, *how, "--json").out)
    built = json.loads((bundle / "llmc.json").read_text())
    assert report["manifest"]["files"]["weights.bin"] == built["files"]["weights.bin"]
    assert report["manifest"]["source"] == built["source"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["bundle", "export", "once"]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_flipped_bit_is_found_by_verify(llmc, copied_bundle: Path):
    weights = bytearray((copied_bundle / "weights.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (copied_bundle / "weights.bin").write_bytes(weights)
    ran = llmc("verify", copied_bundle)
    assert (ran.code, ran.out) == (1, "")
    assert "weights.bin is corrupt" in ran.err


@pytest.mark.parametrize("verb", ["run", "inspect"])
def test_a_truncated_bundle_is_refused_by_verbs_that_load_it_and_that_read_it(llmc, copied_bundle: Path, verb: str):
    with (copied_bundle / "weights.bin").open("r+b") as file:
        file.truncate(1000)
    ran = llmc(verb, copied_bundle, *(["-p", "x"] if verb == "run" else []))
    assert (ran.code, ran.out) == (1, "")
    assert "weights.bin has 1000 bytes" in ran.err


# --------------------------------------------------------------------------------------------------- a quiet process


def test_running_writes_nowhere_and_calls_nobody(tiny_bundle: Path, tmp_path: Path):
    """The engine keeps a database of what it would send home, unless it is told not to before it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [*COMMAND, "run", str(tiny_bundle), "-p", "x", "--max-tokens", "4", "--temperature", "0"]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    assert ran.stderr == b""
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(tiny_bundle: Path):
    command = slow_llmc("run", tiny_bundle, "-p", PROMPT, *ENDLESS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 1


# ------------------------------------------------------------------------------------------------- stopped on the way


@pytest.mark.parametrize("replaced", [False, True])
def test_ctrl_c_in_a_build_leaves_what_was_there(tiny_export: Path, tmp_path: Path, replaced: bool):
    output = tmp_path / "bundle"
    if replaced:
        output.mkdir()
        (output / "llmc.json").write_text("the old one")
    command = [sys.executable, "-c", UNFINISHED, "build", str(tiny_export), "-o", str(output), "--force"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: any(path.name.endswith(".work") for path in tmp_path.iterdir()))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (130, b"interrupted")
    assert [path.name for path in tmp_path.iterdir()] == (["bundle"] if replaced else [])
    assert not replaced or (output / "llmc.json").read_text() == "the old one"


def test_ctrl_c_while_text_streams_ends_it(tiny_bundle: Path):
    command = slow_llmc("run", tiny_bundle, "-p", PROMPT, *ENDLESS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (130, b"interrupted")
