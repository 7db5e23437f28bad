"""What no bundle for a GPU can be is refused before any work, and leaves what was there."""

import pytest

from llmc.errors import UsageError
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.recipe.engine import EngineRequest

UNTIED, TIED = "llama-biases", "qwen2-tied-bf16"
DEFERRED = EngineRequest(deferred=True)


@pytest.mark.parametrize(
    ("target", "order", "message"),
    [
        ("cuda", {"engine": EngineRequest(optimization_level=1)}, "engine is for TensorRT, the target is cuda"),
        ("cpu", {"engine": DEFERRED}, "engine is for TensorRT, the target is cpu"),
        ("cuda", {"precision": "bf16"}, "precision is 'bf16', expected one of fp16, int8, int4, fp32"),
        ("tensorrt", {"precision": "fp8"}, "precision is 'fp8', expected one of fp16, bf16, int8, int4, fp32"),
        (
            "tensorrt",
            {"recipe": Request(phases="split")},
            "phases is 'split', the target tensorrt has 'single' only; leave it out",
        ),
        ("tensorrt", {"recipe": Request(cache="int8")}, "cache is 'int8', expected one of float16"),
        ("tensorrt", {"recipe": Request(precision="fp16", compute="float32")}, "but fp16 computes in float16"),
        ("tensorrt", {"recipe": Request(precision="int4", symmetric=False)}, "tensorrt has no zero points"),
        ("jetson", {}, "target is 'jetson', expected one of cpu, cuda, tensorrt, tensorrt-rtx"),
    ],
)
def test_contradictions_are_refused(exported, untouched, target, order, message):
    with pytest.raises(UsageError) as refused:
        build(BuildRequest(exported(TIED).export, untouched, target=target, force=True, **order))
    assert message in str(refused.value)
