"""ONNX Runtime behind the seam, refused or refusing: what a CPU or an installation lacks, and errors of the engine."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from llmc.errors import BundleError, RequestError, ResourceError
from llmc.runtime.sessions.onnxruntime import cpu as module
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime

PROMPT = np.random.default_rng(0).integers(3, 4096, 37).tolist()


@pytest.mark.parametrize("version", ["1.22.2", "0.99.0", "1.9.1"])
def test_an_engine_that_is_too_old_is_refused(monkeypatch, version):
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
def test_only_errors_of_the_engine_are_translated(foreign, ours):
    with pytest.raises(ours) as caught, module.translate_errors("loading"):
        raise foreign
    assert caught.type is ours
