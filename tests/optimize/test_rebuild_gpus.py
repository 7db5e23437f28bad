"""Which GPUs an engine is made anew for: those that were named, where that can be and suits the machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from doubles.machines import H200
from doubles.plans import FULL

from llmc.bundle import Profile
from llmc.optimize.rebuild import _for_same_gpus
from llmc.optimize.tensorrt.spec import EngineSpec

OLD = replace(
    FULL,
    buckets=(64,),
    decode=Profile(2, 1, 1),
    prefill=Profile(1, 64, 32),
    platform="linux-x86_64",
    compute_capabilities=(),
)


@pytest.mark.parametrize(
    ("named", "possible", "gpu", "expected"),
    [
        (("8.6", "8.9"), ("8.0", "8.6", "8.9"), "8.9", ("8.6", "8.9")),
        (("8.6", "8.9"), ("8.0", "8.6", "8.9"), None, ("8.6", "8.9")),
        (("8.6",), ("8.0", "8.6", "8.9"), "8.9", ()),
        (("8.6",), ("8.0", "8.6", "8.9"), "8.7", ("8.6",)),
        (("7.0",), ("8.0", "8.6", "8.9"), None, ()),
        ((), ("8.0", "8.6", "8.9"), "8.9", ()),
        (("9.0",), (), "8.7", ("8.7",)),
    ],
    ids=[
        "kept",
        "kept without a GPU",
        "another GPU here",
        "one that is not listed",
        "unknown by now",
        "none were named",
        "cannot be named",
    ],
)
def test_an_engine_is_made_anew_for_the_gpus_that_were_named(named, possible, gpu, expected):
    names = SimpleNamespace(**{f"SM{gpu.replace('.', '')}": 0 for gpu in possible})
    library = SimpleNamespace(ComputeCapability=names)
    device = H200.driver.devices[0]
    found = None if gpu is None else replace(device, compute_capability=gpu)
    spec = EngineSpec(library, "1.7", found, OLD if possible else replace(OLD, compute_capabilities=expected))
    made = _for_same_gpus(spec, replace(OLD, compute_capabilities=named))
    assert made.config.compute_capabilities == expected
