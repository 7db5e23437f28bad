"""ONNX Runtime behind the seam, refused or refusing: what a CPU or an installation lacks, and errors of the engine."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmc.bundle import Graph, read_bundle
from llmc.errors import BundleError, RequestError, ResourceError
from llmc.runtime.runner.prefill import batch
from llmc.runtime.sessions import Phase, open_session
from llmc.runtime.sessions.onnxruntime import cpu as module
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime

PROMPT = np.random.default_rng(0).integers(3, 4096, 37).tolist()

# --------------------------------------------------------------------------------------------------- what a CPU lacks


def test_without_its_cpu_features_prefill_runs_on_the_decode_graph(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    manifest = read_bundle(tiny_bundle)
    wanting = replace(manifest.graphs["prefill"], cpu_features=("vnni",))  # on Arm the builder asks for nothing
    manifest = replace(manifest, graphs=manifest.graphs | {"prefill": wanting})
    monkeypatch.setattr("llmc.runtime.host.machine.cpu_features", frozenset)
    with caplog.at_level(logging.WARNING):
        session = open_session(tiny_bundle, manifest, 1)
    assert "lacks vnni: the prefill graph is not used" in caplog.text
    session.cache.reserve(1, 256)
    ids = np.array([PROMPT])
    found = session.run(batch(Phase.PREFILL, ids, [0], [36])).copy()
    assert np.array_equal(found, session.run(batch(Phase.DECODE, ids, [0], [36])))
    session.close()


def graph(file: str, *features: str) -> Graph:
    return Graph(file, 1, 1, features)


def test_a_bundle_without_a_usable_graph_is_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmc.runtime.host.machine.cpu_features", frozenset)
    graphs = {"prefill": graph("p", "vnni"), "decode": graph("d", "amx")}
    with pytest.raises(BundleError, match="this CPU lacks amx, vnni; build the bundle for it"):
        open_session(tiny_bundle, replace(read_bundle(tiny_bundle), graphs=graphs), 1)


# ----------------------------------------------------------------------------------------------- refusals and the end


@pytest.mark.parametrize("version", ["1.22.2", "0.99.0", "1.9.1"])
def test_an_engine_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(module, "require", lambda *names: SimpleNamespace(__version__=version))
    with pytest.raises(BundleError, match=f"{version} is too old, 1.23 or newer is needed: pip install -U onnxruntime"):
        import_onnxruntime("1.23")


def test_telemetry_is_off_before_the_library_is_imported():
    code = (
        "import os, sys, llmc.runtime.sessions.onnxruntime.cpu\n"
        "assert os.environ['ORT_DISABLE_TELEMETRY'] == '1' and 'onnxruntime' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (MemoryError(), ResourceError),
        (RuntimeError("Error in execution: bad_alloc"), ResourceError),
        (RuntimeError("Error in execution: invalid index"), BundleError),
        (RequestError("ours already"), RequestError),
        (ValueError("a bug of ours"), ValueError),
    ],
)
def test_only_errors_of_the_engine_are_translated(foreign: Exception, ours: type[Exception]):
    with pytest.raises(ours) as caught, module.translate_errors("loading"):
        raise foreign
    assert caught.type is ours
