"""Whether attention has a fused kernel: the library is asked, and what it says is recorded."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.engines import spec_of
from doubles.geometries import uniform
from doubles.recorded import RecordedLibrary

from llmc.bundle import EngineConfig, Geometry
from llmc.optimize.progress import silent
from llmc.optimize.tensorrt.attention import decomposed
from llmc.optimize.tensorrt.engine import profiles_of
from llmc.optimize.tensorrt.network import Layer

GEOMETRY: Geometry = uniform("llama", 2, 64, 64, 4, 2, 16, 97, 64, False, (0, 0))
WHOLE = (Layer("a", "ATTENTION_INPUT", "HALF", ()),) * 2


def asked(library: Any, config: EngineConfig, folder: Path, layers: tuple[Layer, ...] = WHOLE) -> Any:
    found = decomposed(spec_of(library, config), folder, GEOMETRY, layers, profiles_of(config), silent)
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_the_library_itself_says_that_it_fuses_attention(rtx: Any, config: EngineConfig, tmp_path: Path, compute: str):
    assert asked(rtx, replace(config, compute=compute), tmp_path) == ()


def test_attention_without_a_kernel_is_named_by_profile_and_warned_of(
    config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert asked(RecordedLibrary("11.4", fuses=False), config, tmp_path) == ("decode", "prefill")
    assert "attention has no fused kernel in decode and prefill: " in caplog.text


@pytest.mark.parametrize("why", ["float32", "written out"])
def test_attention_that_is_written_out_needs_no_asking(config: EngineConfig, tmp_path: Path, why: str):
    layers = WHOLE[:1] if why == "written out" else WHOLE
    library = RecordedLibrary("11.4")
    found = asked(library, replace(config, compute="float32" if why == "float32" else "float16"), tmp_path, layers)
    assert found == ("decode", "prefill")
    assert library.calls == []


@pytest.mark.parametrize("said", ["something else", "out of memory", "CUDA initialization failure with error: 35"])
def test_another_failure_is_no_answer(
    config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
):
    library = RecordedLibrary("11.4", builds=False, log=(("ERROR", said),))
    assert asked(library, config, tmp_path) is None
    assert re.search(rf"it is not known whether attention is fused: building \.attention\.plan .*: {said}", caplog.text)
