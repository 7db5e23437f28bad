"""No body within the limits holds up everybody: ``/health`` is asked all the time, from another process.

``python tests/fuzz/attacks.py BUNDLE`` prints a table of the same.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from doubles.modules import load_file
from doubles.services import Process, service_process
from doubles.serving import retold
from doubles.towers import share_seeing

from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime.vision.decode import DECODING_BYTES

ATTACKS = load_file(Path(__file__).with_name("attacks.py"))
# Of /health beside any body: 0.12 s at most on a machine on which twelve processes wanted two processors. Each turn of
# the loop takes longer in proportion to them. What held the loop once held it for 0.2 to 74 s.
MOST_S = 0.2
# Bytes of the whole process; eight texts of 8 MB to be tokenized once took it to twelve billion.
MOST_MEMORY = 1 << 30
# Bytes that a server takes more while images are decoded: what its plan has for one image, and the requests themselves.
MOST_DECODED = DECODING_BYTES + (200 << 20)
HELD_S = 2.0  # a planted pause
pytestmark = pytest.mark.slow


def most_s() -> float:
    return MOST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def watching(process: Process) -> closing[Any]:
    return closing(ATTACKS.Watch(process.address, process.popen.pid))


@pytest.fixture(scope="module")
def watch(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    bundle = retold(tiny_bundle, tmp_path_factory.mktemp("attacked") / "bundle")
    with service_process(models={"tiny": bundle}) as process, watching(process) as found:
        yield found


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    folder = tmp_path_factory.mktemp("seeing")
    models = {
        kind: build(BuildRequest(share_seeing(tmp_path_factory, kind) / "export", folder / kind)).output
        for kind in ("smolvlm", "qwen3_vl")
    }
    with service_process(models=models, warm=tuple(models)) as process, watching(process) as found:
        yield found


# Files are decoded alike for every model: one that cuts tiles sees them all, one of patches of any shape those that it
# may cut otherwise.
SHAPES = ("a line of 20 million pixels", "a column of 20 million pixels", "a header alone", "colours")


@pytest.mark.threat("image-bombs")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("smolvlm", name) for name in ATTACKS.images("")),
        *(("qwen3_vl", f"an image: {name}") for name in SHAPES),
        ("qwen3_vl", "eight requests of two images"),
    ],
)
def test_no_image_holds_up_others_or_takes_more_than_its_share(seeing, model, name):
    before = seeing.resident()
    held = seeing.least_held(ATTACKS.images(model)[name], most_s())
    assert held.health_s < most_s() and held.peak - before < MOST_DECODED and held.said[:3] in ("200", "400"), held
    assert "0x" not in held.said


@pytest.mark.threat("json-cost", "tokenize-cost")
@pytest.mark.parametrize("name", ATTACKS.attacks())
def test_no_body_holds_up_others(watch, name):
    held = watch.least_held(ATTACKS.attacks()[name], most_s())
    assert held.health_s < most_s() and held.peak < MOST_MEMORY, held


@pytest.mark.threat("stored-responses")
def test_reading_what_is_stored_holds_up_nobody(watch):
    for name, attack in ATTACKS.stored(watch).items():
        held = watch.least_held(attack, most_s())
        assert held.health_s < most_s(), (name, held)


def test_a_loop_that_is_held_would_be_noticed(watch, monkeypatch):
    """By one that is stopped for as long as nobody would notice by the answer alone."""

    def send(attack: object, body: bytes) -> str:
        os.kill(watch.pid, signal.SIGSTOP)
        time.sleep(HELD_S)
        os.kill(watch.pid, signal.SIGCONT)
        return ""

    monkeypatch.setattr(watch, "send", send)
    assert watch.held(ATTACKS.Attack("", lambda: b"")).health_s > HELD_S / 2
