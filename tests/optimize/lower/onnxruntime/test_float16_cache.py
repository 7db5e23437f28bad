"""A float16 cache: attention in float16 amid float32 agrees with the portable graph, in both phases."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import relative_difference

from llmc.bundle import read_export
from llmc.optimize import recipe
from llmc.optimize.lower.onnxruntime import folded_heads
from llmc.optimize.recipe import BuildRequest, settle
from llmc.optimize.targets import capabilities

pytest.importorskip("onnxruntime", "1.32", reason="older engines' attention in float16 is slow")

# Root mean square of the difference over that of the logits: queries, keys and values with 11 bits, through random
# weights whose attention is nearly a choice of one position, cost 0.02 to 0.29 %. Rotary tables of 8 bits cost 0.45 %.
HALF_TOLERANCE = 4e-3

BIASES, SINKS = "llama-biases", "gpt_oss-sinks-clamped-experts-bf16"
FAMILIES = (  # whose attentions differ
    BIASES,
    "phi3-packed-window-fp16",
    "smollm3-every-second-layer-rotated",
    "gemma2-softcaps",
    "gemma3-two-ropes",
    "hunyuan-norm-after-rope",
    "ministral3-growing-queries",
    "ernie4_5-interleaved-rope-biases",
    "gpt2-scale-by-layer",
    SINKS,
    "deepseek_v2-latent-keys-grouped-experts",
    "qwen3_5-delta-and-gates",
)
PIECES = {"prefill": [7, 2, 11], "decode": [7, *[1] * 13]}


@pytest.fixture
def halved(lowering):
    """A lowering of a phase with a float16 cache, as a build of two graphs asks for it."""

    def start(export, phase: str):
        lowered = lowering(export, cache="float16")
        spare = folded_heads.count_overwritten(lowered.geometry.attentions)
        lowered.context = replace(lowered.context, phase=phase, ragged_rows=True, overwritten=spare)
        return lowered

    return start


@pytest.mark.parametrize("phase", PIECES)
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_logits_are_close_to_the_portable_graph_in_every_family(case, halved, decoder, portable_logits, ids, phase):
    lowered = halved(case.export, phase)
    logits = decoder(lowered.save(), lowered.geometry, "float16")(ids, PIECES[phase])
    assert relative_difference(logits, portable_logits(case)) <= HALF_TOLERANCE


def coarse_tables(lowered) -> None:
    for name, value in lowered.graph.initializers.items():
        if name.endswith(".float16"):
            coarse = value.const_value.numpy().astype(ml_dtypes.bfloat16).astype(np.float16)
            value.const_value = ir.tensor(coarse, name=name)


def later_keys_seen(lowered) -> None:
    for node in lowered.nodes("If"):
        branch = node.attributes["then_branch"].as_graph()
        next(node for node in branch if node.op_type == "GroupQueryAttention").replace_input_with(10, None)


@pytest.mark.parametrize("plant", [coarse_tables, later_keys_seen])
def test_a_planted_error_exceeds_the_tolerance(exported, halved, decoder, portable_logits, ids, plant):
    case = exported(BIASES)
    lowered = halved(case.export, "decode").finish()
    plant(lowered)
    logits = decoder(lowered.write(), lowered.geometry, "float16")(ids, PIECES["decode"])
    assert relative_difference(logits, portable_logits(case)) > HALF_TOLERANCE


def cache_of(export, **request) -> str:
    chosen, _ = settle(BuildRequest(export, **request), read_export(export).geometry, capabilities("cpu"))
    return chosen.cache


@pytest.mark.parametrize(
    ("request_", "cache"),
    [
        ({}, "float16"),
        ({"precision": "int4"}, "float16"),
        ({"cache": "float32"}, "float32"),
        ({"phases": "split"}, "float16"),
        ({"precision": "fp16"}, "float32"),  # who rounds no activations asks for no rounding
        ({"precision": "fp32"}, "float32"),
    ],
)
def test_integers_get_a_float16_cache(exported, request_, cache):
    assert cache_of(exported(BIASES).export, **request_) == cache


@pytest.mark.parametrize("name", ["mistral-window-wide-heads", "gpt2-scale-by-layer", SINKS])
def test_windows_sinks_and_heads_without_groups_keep_float32(exported, name):
    """A lone query of a head takes longer in float16."""
    assert cache_of(exported(name).export, phases="split") == "float32"


def test_an_older_engine_gets_what_it_knows(exported, monkeypatch):
    monkeypatch.setattr(recipe, "import_onnxruntime", lambda _: SimpleNamespace(__version__="1.31.1"))
    assert cache_of(exported(BIASES).export) == "float32"
