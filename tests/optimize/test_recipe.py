"""A recipe says what it means, or is refused with the nearest word that would have been understood."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.bundle import Budget, Limits, Recipe
from llmc.errors import UsageError
from llmc.optimize.lower.context import (
    Float16,
    Float32,
    PerToken,
    QuantConfigs,
    Static,
    WeightOnly,
    check_patterns,
    quant_configs,
)
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import MOST_RECIPE, Expected, Request, needs_calibration, read_recipe, resolve
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import capabilities

CPU = capabilities("cpu")


@pytest.fixture
def written(tmp_path):
    """Writes a recipe file."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# ------------------------------------------------------------------------------------------------------------ the file


def test_every_key_reaches_the_request(written):
    text = """
description = "all keys"
precision = "int4"
scheme = "awq+gptq"
block_size = 64
symmetric = false
head = "int8"
phases = "split"
activations = "static"
smoothing = 0.5
sparsity = "wanda"
cache = "int8-channel"
compute = "float32"
compiled = false
max_context = 9
max_batch = 2
prefill_chunk = 5

[layers]
"*.mlp.down_proj" = "int8"
"model.layers.0.*" = "fp32"

[budget]
max_kl = 0.1
min_agreement = 0.9
max_perplexity_increase = 1

[engine]
compute_capabilities = "8.6"
hardware_compatibility = "ampere"
version_compatible = true
stripped = false
deferred = false
workspace = 2000000
optimization_level = 3

[expected]
prefill_mean_kl = 0.01
decode_mean_kl = 0
decode_top1_agreement = 0.99
"""
    request = read_recipe(written(text))
    assert None not in vars(request).values()
    assert list(request.layers.items()) == [("*.mlp.down_proj", "int8"), ("model.layers.0.*", "fp32")]
    assert request.budget == Budget(0.1, 0.9, 1.0)
    assert request.expected == Expected(0.01, 0.0, 0.99)
    assert request.engine == EngineRequest("8.6", "ampere", True, False, False, 2_000_000, 3)
    assert replace(request, layers=None, budget=None, engine=None, expected=None) == Request(
        "all keys", "int4", "awq+gptq", 64, False, "int8", "split", "static", 0.5, "wanda", "int8-channel", "float32",
        None, False, 9, 2, 5,
    )  # fmt: skip


def test_an_empty_recipe_asks_for_nothing(written):
    assert read_recipe(written("")) == Request()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("blocksize = 64", "unknown key 'blocksize'; did you mean 'block_size'?"),
        ('Precision = "int8"', "unknown key 'Precision'; did you mean 'precision'?"),
        ("quality = 3", "unknown key 'quality'; expected some of description, precision, scheme, block_size, "),
        ("symmetric = 1", "symmetric is 1, expected true or false"),
        ("smoothing = true", "smoothing is True, expected a number"),
        ('layers = "int8"', "layers is 'int8', expected a table"),
        ('[layers]\n"*" = 8', "layers: * is 8, expected text"),
        ("layers = [1]", "layers is [1], expected a table"),
        ("[budget]\nmax_lk = 1.0", "budget: unknown key 'max_lk'; did you mean 'max_kl'?"),
        ('[budget]\nmax_kl = "small"', "budget: max_kl is 'small', expected a number"),
        ("budget = 0.1", "budget is 0.1, expected a table"),
        ("[expected]\nprefill_mean_kl = 0.1", "expected: decode_mean_kl is missing"),
        ("[expected]\nfirst = 0.1", "expected: unknown key 'first'; expected some of prefill_mean_kl, "),
        ("[precision]\nx = 1", "precision is {'x': 1}, expected text"),
        ("precision = 8", "precision is 8, expected text"),
        ('block_size = "64"', "block_size is '64', expected a whole number"),
        ("max_context = 4096.0", "max_context is 4096.0, expected a whole number"),
        ("max_batch = true", "max_batch is True, expected a whole number"),
        ("prefill_chunk = [512]", r"prefill_chunk is [512], expected a whole number"),
        ("precision = int8", "not a readable TOML recipe"),
        (b'precision = "\xff"', "not a readable TOML recipe"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_path(written, text, sentence):
    path = written(text)
    with pytest.raises(UsageError) as refused:
        read_recipe(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert sentence in str(refused.value)


def test_a_recipe_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="not a readable TOML recipe"):
            read_recipe(path)


# ---------------------------------------------------------------------------------------------------------- resolution


def resolved(calibrated: bool = False, **request: Any) -> Recipe:
    return resolve(Request(**request), CPU, 2048, "x", calibrated)[0]


def test_a_recipe_is_a_file_that_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b" " * (MOST_RECIPE + 1))
    for path, reason in ((tmp_path / "pipe", "no regular file"), (Path("/dev/zero"), "no regular file")):
        with pytest.raises(UsageError, match=f"not a readable TOML recipe .*{reason}"):
            read_recipe(path)
    with pytest.raises(UsageError, match=f"it has {MOST_RECIPE + 1} bytes, at most {MOST_RECIPE}"):
        read_recipe(tmp_path / "long")


def test_defaults_are_int8_in_blocks_of_128_with_a_graph_for_each_phase():
    recipe, limits = resolve(Request(), CPU, 2048, "default")
    assert recipe == Recipe(
        name="default",
        precision="int8",
        scheme="rtn",
        block_size=128,
        symmetric=True,
        head="int8",
        phases="split",
        activations="per-token",
        smoothing=0.0,
        sparsity="none",
        cache="float32",
        layers={},
        threads=None,
        budget=Budget(),
        calibration=None,
    )
    assert (limits.max_context, limits.max_batch) == (2048, 8)
    assert limits.prefill_chunk <= 512


def test_the_context_is_the_checkpoints_up_to_a_bound_unless_asked_for():
    assert resolve(Request(), CPU, 131_072, "x")[1].max_context == 32_768
    assert resolve(Request(max_context=131_072), CPU, 131_072, "x")[1].max_context == 131_072


def test_a_chunk_is_no_longer_than_the_context():
    assert resolve(Request(max_context=100), CPU, 2048, "x")[1] == Limits(100, 8, 100)


@pytest.mark.parametrize(("precision", "form"), [("fp32", Float32()), ("fp16", Float16())])
def test_floats_have_no_blocks_and_one_graph(precision, form):
    recipe = resolved(precision=precision)
    assert (recipe.block_size, recipe.phases, recipe.activations, recipe.scheme) == (0, "shared", "none", "rtn")
    assert quant_configs(recipe) == {"shared": QuantConfigs(form, form)}


def test_what_is_asked_for_goes_over_what_the_recipe_says():
    both = Request(precision="fp32", max_batch=4).over(Request(precision="int4", max_context=7))
    assert both == Request(precision="fp32", max_context=7, max_batch=4)


def test_a_budget_is_taken_limit_by_limit():
    asked, written = Budget(max_kl=0.1), Budget(max_kl=0.5, min_agreement=0.9)
    assert Request(budget=asked).over(Request(budget=written)).budget == Budget(max_kl=0.1, min_agreement=0.9)
    assert Request(budget=asked).over(Request()).budget == asked
    assert Request().over(Request(budget=written)).budget == written


def test_a_text_to_calibrate_with_chooses_gptq_for_integers_only():
    assert resolved(calibrated=True, precision="int4").scheme == "gptq"
    assert resolved(calibrated=True, precision="int4", scheme="rtn").scheme == "rtn"
    assert resolved(calibrated=True, precision="fp32").scheme == "rtn"


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"precision": "int3"}, "precision is 'int3', expected one of fp32, fp16, int8, int4"),
        ({"scheme": "gguf"}, "scheme is 'gguf', expected one of rtn, gptq, awq, awq+gptq"),
        ({"phases": "both"}, "phases is 'both', expected one of split, shared"),
        ({"precision": "fp32", "phases": "split"}, "phases is 'split', expected one of shared"),
        ({"head": "int2"}, "head is 'int2', expected one of fp32, fp16, int8, int4"),
        ({"sparsity": "2:4"}, "sparsity is '2:4', expected one of none, magnitude, wanda"),
        ({"cache": "int4"}, "cache is 'int4', expected one of float32, int8, int8-channel"),
        ({"layers": {"*.q_proj": "int3"}}, "layers: *.q_proj is 'int3', expected one of fp32, fp16, int8, int4"),
        ({"activations": "none"}, "activations is 'none', expected one of per-token, static"),
        ({"activations": "static", "phases": "shared"}, "activations is 'static', but only the prefill graph of split"),
        ({"precision": "fp32", "activations": "per-token"}, "activations is for int8 and int4, the precision is fp32"),
        ({"precision": "fp32", "block_size": 128}, "block_size is for int8 and int4, the precision is fp32"),
        ({"precision": "fp16", "scheme": "rtn"}, "scheme is for int8 and int4, the precision is fp16; leave it out"),
        ({"precision": "fp16", "symmetric": True}, "symmetric is for int8 and int4, the precision is fp16"),
        ({"precision": "fp32", "smoothing": 0.5}, "smoothing is for int8 and int4, the precision is fp32"),
        ({"smoothing": 1.01}, "smoothing is 1.01, expected 0.0 ... 1.0"),
        ({"smoothing": -0.1}, "smoothing is -0.1, expected 0.0 ... 1.0"),
        ({"smoothing": float("nan")}, "smoothing is nan, expected 0.0 ... 1.0"),
        ({"budget": Budget(max_kl=-0.1)}, "budget: max_kl is -0.1, expected 0.0 ... 1000.0"),
        ({"budget": Budget(min_agreement=98.0)}, "budget: min_agreement is 98.0, expected 0.0 ... 1.0"),
        ({"budget": Budget(max_perplexity_increase=float("nan"))}, "budget: max_perplexity_increase is nan, expected"),
        ({"block_size": 100}, "block_size is 100, expected one of 32, 64, 128, 256"),
        ({"block_size": -32}, "block_size is -32, expected one of 32, 64, 128, 256"),
        ({"max_context": 2049}, "max_context is 2049, expected "),
        ({"max_context": -1}, "max_context is -1, expected "),
        ({"max_batch": 0}, "max_batch is 0, expected 1 ... 1024"),
        ({"max_batch": 1025}, "max_batch is 1025, expected 1 ... 1024"),
        ({"prefill_chunk": 65_537}, "prefill_chunk is 65537, expected 1 ... 65536"),
    ],
    ids=str,
)
def test_what_the_target_or_the_model_cannot_do_is_refused(request_, sentence):
    with pytest.raises(UsageError) as refused:
        resolved(**request_)
    assert sentence in str(refused.value)


def test_an_unknown_target_is_refused():
    with pytest.raises(UsageError, match="target 'tpu' is unknown; expected one of cpu"):
        capabilities("tpu")


@pytest.mark.parametrize(
    ("request_", "wish"),
    [
        ({}, None),
        ({"precision": "fp32"}, None),
        ({"sparsity": "magnitude"}, "sparsity = 'magnitude'"),
        ({"scheme": "gptq"}, "scheme = 'gptq'"),
        ({"smoothing": 0.5}, "smoothing = 0.5"),
        ({"sparsity": "wanda"}, "sparsity = 'wanda'"),
        ({"cache": "int8-channel"}, "cache = 'int8-channel'"),
        ({"activations": "static"}, "activations = 'static'"),
    ],
    ids=str,
)
def test_a_recipe_tells_what_in_it_needs_calibration(request_, wish):
    assert needs_calibration(resolved(**request_)) == wish


# --------------------------------------------------------------------------------------------------------------- forms

NAMES = [f"model.layers.{layer}.{name}_proj" for layer in (0, 1) for name in ("self_attn.q", "mlp.up", "mlp.down")]
NAMES.append("lm_head")
BLOCKS = {"int8": WeightOnly(Grid(8, 128)), "int4": WeightOnly(Grid(4, 128)), "fp32": Float32(), "fp16": Float16()}


def precisions(layers: dict[str, str], phase: str = "decode", **request: Any) -> dict[str, str]:
    """The precision of each linear, by the last words of its name."""
    stored = quant_configs(resolved(precision="int4", layers=layers, **request))[phase]
    names = {form: name for name, form in BLOCKS.items()} | {PerToken(): "w8a8", Static(): "static"}
    return {name: names[stored.of(name)] for name in NAMES}


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_a_split_recipe_makes_w8a8_prefill_and_weight_only_decode(precision, bits):
    made = quant_configs(resolved(precision=precision, block_size=64))
    assert made["decode"] == QuantConfigs(WeightOnly(Grid(bits, 64)), WeightOnly(Grid(bits, 64)))
    # The phases share the head, and with it a tied embedding.
    assert made["prefill"] == replace(made["decode"], w8a8=PerToken())
    assert made["prefill"].of(NAMES[0]) == PerToken()
    assert made["prefill"].of("lm_head") == made["decode"].of("lm_head") == WeightOnly(Grid(bits, 64))


def test_static_activations_are_of_the_prefill_graph_only():
    made = quant_configs(resolved(activations="static"))
    assert (made["prefill"].w8a8, made["decode"].w8a8) == (Static(), None)


def test_a_shared_recipe_makes_one_weight_only_graph():
    assert quant_configs(resolved(precision="int4", phases="shared")) == {
        "shared": QuantConfigs(BLOCKS["int4"], BLOCKS["int4"])
    }


@pytest.mark.parametrize("phases", ["split", "shared"])
def test_a_head_may_keep_8_bits(phases):
    recipe = resolved(precision="int4", head="int8", phases=phases)
    assert recipe.head == "int8"
    assert {stored.of("lm_head") for stored in quant_configs(recipe).values()} == {BLOCKS["int8"]}


def test_a_layer_of_integers_under_a_float_body_takes_the_keys_of_integers():
    request = {"precision": "fp32", "layers": {"*.mlp.*": "int4"}, "block_size": 32, "scheme": "gptq"}
    stored = quant_configs(resolved(**request))["shared"]
    assert (stored.of(NAMES[0]), stored.of("model.layers.0.mlp.up_proj")) == (Float32(), WeightOnly(Grid(4, 32)))


@pytest.mark.parametrize("head", ["fp16", "int8"])
def test_a_head_may_have_any_precision_whatever_the_body_has(head):
    """A head of integers under a float body is in blocks too, and they need a size."""
    stored = quant_configs(resolved(precision="fp32", head=head))["shared"]
    assert stored.body == Float32()
    assert stored.head == BLOCKS[head]


def test_an_asymmetric_recipe_has_zero_points_in_blocks_and_none_in_w8a8():
    made = quant_configs(resolved(precision="int4", symmetric=False))
    assert made["decode"].body == WeightOnly(Grid(4, 128, symmetric=False))
    assert made["prefill"].of(NAMES[0]) == PerToken(Grid(8, 0, symmetric=True))


def test_the_last_pattern_that_matches_wins():
    first, last = {"*.mlp.*": "int8", "*.mlp.down_proj": "fp16"}, {"*.mlp.down_proj": "fp16", "*.mlp.*": "int8"}
    assert precisions(first)["model.layers.0.mlp.down_proj"] == "fp16"
    assert precisions(first)["model.layers.0.mlp.up_proj"] == "int8"
    assert precisions(last)["model.layers.0.mlp.down_proj"] == "int8"
    assert precisions(last)["model.layers.0.self_attn.q_proj"] == "int4"


def test_a_pattern_names_whole_modules_and_letters_count():
    assert set(precisions({"mlp.down_proj": "int8", "*.MLP.*": "fp32", "model.layers": "fp16"}).values()) == {"int4"}
    found = precisions({"model.layers.0.*": "int8"})
    assert {name for name, precision in found.items() if precision == "int8"} == set(NAMES[:3])


def test_a_pattern_of_everything_takes_the_head_too():
    assert set(precisions({"*": "int8"}).values()) == {"int8"}


def test_a_pattern_of_the_head_goes_over_its_key():
    assert precisions({"lm_head": "fp16"}, head="int8")["lm_head"] == "fp16"
    assert precisions({"*_proj": "fp16"}, head="int8")["lm_head"] == "int8"


@pytest.mark.parametrize(("activations", "form"), [("per-token", "w8a8"), ("static", "static")])
def test_prefill_multiplies_integers_except_where_the_layer_is_float(activations, form):
    layers = {"*.mlp.down_proj": "fp16", "*.mlp.up_proj": "int8"}
    found = precisions(layers, "prefill", activations=activations)
    assert found["model.layers.1.mlp.down_proj"] == "fp16"
    assert found["model.layers.1.mlp.up_proj"] == found["model.layers.1.self_attn.q_proj"] == form
    assert found["lm_head"] == "int4"


def test_a_pattern_that_matches_nothing_is_refused_with_some_names():
    recipe = resolved(layers={"*.mlp.down_proj": "int8", "*.mlp.donw_proj": "int8"})
    with pytest.raises(UsageError) as refused:
        check_patterns(recipe, NAMES)
    assert "layers: '*.mlp.donw_proj' matches no linear of this model; expected a pattern of names like " in str(
        refused.value
    )
    for name in (NAMES[0], NAMES[-2], "lm_head"):
        assert name in str(refused.value)


def test_patterns_that_match_something_pass():
    check_patterns(resolved(layers={"*": "int8", "lm_head": "int4", "model.layers.1.mlp.up_proj": "fp16"}), NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "smoothing = " + "9" * 5000,
        "a = " + "[" * 5000,
        "max_context = 0x" + "f" * 5000,
        "[budget]\nmax_kl = " + "9" * 400,
    ],
    ids=["digits", "depth", "hex", "beyond floats"],
)
def test_absurd_numbers_and_depths_are_refused(written, text):
    with pytest.raises(UsageError, match=r"not a readable TOML recipe|expected"):
        resolve(read_recipe(written(text)), CPU, 2048, "mine")
