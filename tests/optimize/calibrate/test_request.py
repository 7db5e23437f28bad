"""Whether a build calibrates, on what, and that results of another request are never taken for its own."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.refusals import about

from llmc.bundle import Budget, read_export
from llmc.errors import MissingExtraError, UsageError
from llmc.optimize.calibrate import layers
from llmc.optimize.calibrate.request import calibrate_weights
from llmc.optimize.progress import silent
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.store import Store

A_MINUTE_NS = 60_000_000_000  # a step that every file system's time stamps show


class Calls:
    """A calibration that only takes notes."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.ids: list[np.ndarray] = []
        self.forms: list[Any] = []

    def calibrate(
        self, source: Any, ids: np.ndarray, recipe: Any, forms: Any, folder: Path, progress: Any, prompts: Any
    ) -> Store:
        assert source == "decoder"
        self.folders.append(folder)
        self.ids.append(ids)
        self.forms.append(forms)
        folder.mkdir(parents=True, exist_ok=True)
        store = Store(folder)
        store.write("state", {"hidden": np.zeros(0), "experts": np.zeros(2, np.int64)})
        return store


@pytest.fixture
def calls(monkeypatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(layers, "calibrate", found.calibrate)
    return found


@pytest.fixture
def text(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint.parent / "validation.txt"


def decoder(folder: Path, device: str) -> str:
    assert (folder / "export.json").exists()
    assert device in ("cpu", "cuda")
    return "decoder"


def recipe_of(**request: Any) -> Any:
    return resolve(Request(**request), capabilities("cpu"), 2048, "x")[0]


@pytest.fixture
def start(tiny_export):
    """Asks for the weights of a recipe."""

    def run(given: dict[str, Any], **recipe: Any) -> Any:
        request = BuildRequest(tiny_export, **given)
        return calibrate_weights(request, read_export(tiny_export), recipe_of(**recipe), silent)

    return run


def test_a_text_that_nothing_looks_at_is_refused(start, calls, text):
    with pytest.raises(UsageError, check=about("calibration")):
        start({"decoder": decoder, "calibration": text}, precision="int4")
    assert calls.folders == []


@pytest.mark.parametrize(
    ("recipe", "wish"), [({"precision": "int4", "scheme": "gptq"}, "scheme"), ({"cache": "int8"}, "cache")], ids=str
)
def test_without_a_decoder_the_wish_is_named(start, recipe, wish):
    with pytest.raises(UsageError, check=about(wish)):
        start({}, **recipe)


def test_without_torch_the_extra_is_named(start, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*cpu 'onnx>="):
        start({"decoder": decoder}, **BASE)
    assert calls.folders == []


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"samples": 1}, "samples is 1, expected 2 ... 100000"),
        ({"samples": 100_001}, "samples is 100001, expected 2 ... 100000"),
        ({"length": 1}, "length is 1, expected 2 ... 2048"),
        ({"length": 2049}, "length is 2049, expected 2 ... 2048"),
        ({"length": -5}, "length is -5, expected 2 ... 2048"),
    ],
    ids=str,
)
def test_windows_out_of_range_are_refused(start, calls, request_, sentence):
    with pytest.raises(UsageError) as refused:
        start({"decoder": decoder, **request_}, **BASE)
    assert sentence in str(refused.value)
    assert calls.folders == []


def test_a_text_too_short_to_calibrate_on_names_the_options_that_help(start, calls, tmp_path):
    (tmp_path / "short.txt").write_text("x = 1\n")
    with pytest.raises(UsageError, match=r"is too short: .*--samples, --length.*--no-calibration"):
        start({"decoder": decoder, "calibration": tmp_path / "short.txt"}, **BASE)
    assert calls.folders == []


WINDOWS: dict[str, Any] = {"decoder": decoder, "samples": 2, "length": 16}
BASE: dict[str, Any] = {"precision": "int4", "scheme": "gptq"}
OTHERS = {
    "scheme": {"scheme": "rtn", "smoothing": 0.5},
    "precision": {"precision": "int8", "layers": {"*.mlp.*": "int4"}},
    "block size": {"block_size": 32},
    "zero points": {"symmetric": True},
    "head": {"head": "int4"},
    "layers": {"layers": {"*.mlp.down_proj": "int8"}},
    "order of layers": {"layers": {"*.mlp.*": "int8", "*.mlp.down_proj": "int4"}},
    "the other order": {"layers": {"*.mlp.down_proj": "int4", "*.mlp.*": "int8"}},
    "smoothing": {"smoothing": 0.5},
    "cache": {"cache": "int8"},
}


def test_every_choice_that_decides_weights_has_a_folder_of_its_own(start, calls, text, tiny_export):
    asked = {**WINDOWS, "calibration": text}
    for other in ({}, *OTHERS.values()):
        start(asked, **{**BASE, **other})
    for request in ({**asked, "samples": 3}, WINDOWS):
        start(request, **BASE)
    export = read_export(tiny_export)
    other = replace(export, source=replace(export.source, fingerprint="0" * 64))
    calibrate_weights(BuildRequest(tiny_export, **asked), other, recipe_of(**BASE), silent)
    assert len(set(calls.folders)) == len(calls.folders) == len(OTHERS) + 4


def test_choices_that_decide_no_weight_share_a_folder(start, calls, text):
    for other in ({}, {"budget": Budget(max_kl=1.0)}, {"phases": "shared"}):
        start({**WINDOWS, "calibration": text}, scheme="rtn", smoothing=0.5, **other)
    assert len(set(calls.folders)) == 1
    for phases in ("split", "shared"):  # only the first has integers for prompts
        start({**WINDOWS, "calibration": text}, **{**BASE, "phases": phases})
    assert len(set(calls.folders)) == 3


def test_new_weights_under_the_same_names_have_a_folder_of_their_own(start, calls, text, tiny_export):
    request = {**WINDOWS, "calibration": text}
    start(request, precision="int4", scheme="gptq")
    [weights] = tiny_export.glob("*.safetensors")
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + A_MINUTE_NS))
    start(request, precision="int4", scheme="gptq")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(set(calls.folders)) == 2
