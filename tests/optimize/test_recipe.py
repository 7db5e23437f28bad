"""A recipe says what it means, or is refused with the nearest word that would have been understood."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from doubles.geometries import uniform
from doubles.refusals import about

from llmc.bundle import Budget, Recipe
from llmc.bundle.model.names import SENSITIVE
from llmc.errors import UsageError
from llmc.optimize.lower.context import (
    Float16,
    Float32,
    PerToken,
    QuantConfigs,
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


def test_every_key_reaches_the_request(written):
    text = """
description = "all keys"
precision = "int4"
scheme = "gptq"
block_size = 64
symmetric = false
head = "int8"
phases = "split"
activations = "static"
smoothing = 0.5
sparsity = "2:4"
pruning = "wanda"
cache = "int8-channel"
compute = "float32"
max_context = 9
max_batch = 2
prefill_chunk = 5
adapters = 4
rank = 8

[layers]
"*.mlp.down_proj" = "int8"
"model.layers.0.*" = "fp32"

[budget]
max_kl = 0.1
min_agreement = 0.9
max_perplexity_increase = 1

[engine]
compute_capabilities = "8.6"
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
    assert request.engine == EngineRequest("8.6", False, 2_000_000, 3)
    plain = (
        *("all keys", "int4", "gptq", 64, False, "int8", "split", "static", 0.5, "2:4", "wanda", "int8-channel"),
        *("float32", None, 9, 2, 5, 4, 8, None, None, None),
    )
    names = [field.name for field in fields(Request)]
    assert replace(request, layers=None, budget=None, engine=None, expected=None) == Request(
        **dict(zip(names, plain, strict=True))
    )


@pytest.mark.parametrize(
    ("text", "parameter", "advice"),
    [
        ("blocksize = 64", "blocksize", "did you mean 'block_size'?"),
        ('Precision = "int8"', "Precision", "did you mean 'precision'?"),
        ("quality = 3", "quality", "expected some of description, precision, scheme, block_size, "),
        ("[budget]\nmax_lk = 1.0", "budget.max_lk", "did you mean 'max_kl'?"),
        ("[expected]\nprefill_mean_kl = 0.1", "expected.decode_mean_kl", "give it"),
        ("max_context = 4096.0", "max_context", ""),
        ("smoothing = true", "smoothing", ""),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_path_and_the_key(written, text, parameter, advice):
    path = written(text)
    with pytest.raises(UsageError, check=about(parameter)) as refused:
        read_recipe(path)
    assert refused.value.path == path and refused.value.advice.startswith(advice)


@pytest.mark.parametrize("text", ["precision = int8", b'precision = "\xff"'])
def test_a_file_that_is_no_toml_is_refused(written, text):
    with pytest.raises(UsageError, match="no readable TOML", check=about("recipe")):
        read_recipe(written(text))


KEYS = {"": Request, "budget": Budget, "engine": EngineRequest}


@pytest.mark.parametrize(("table", "key"), [(table, it.name) for table, kind in KEYS.items() for it in fields(kind)])
def test_a_value_of_another_type_is_refused_with_what_was_found_and_expected(written, table, key):
    path = written(f"[{table}]\n{key} = [7]" if table else f"{key} = [7]")
    with pytest.raises(UsageError, check=about(f"{table}.{key}".lstrip("."))) as refused:
        read_recipe(path)
    assert refused.value.path == path and refused.value.problem.startswith("is [7], expected ")


def resolved(calibrated: bool = False, **request: Any) -> Recipe:
    return resolve(Request(**request), CPU, 2048, "x", calibrated)[0]


@pytest.mark.parametrize(("calibrated", "rule"), [(False, "magnitude"), (True, "wanda")])
@pytest.mark.parametrize(("text", "pattern"), [('"2:4"', "2:4"), ("0.5", "0.5")])
def test_sparsity_is_a_pattern_or_a_share_by_the_rule_that_the_build_can_follow(
    written, text, pattern, calibrated, rule
):
    request = replace(read_recipe(written(f"sparsity = {text}")), precision="fp32")
    recipe = resolve(request, CPU, 2048, "x", calibrated)[0]
    assert (recipe.sparsity, recipe.pruning) == (pattern, rule)
    assert needs_calibration(recipe) == ("pruning" if calibrated else None)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"sparsity": "4:8"}, "sparsity is '4:8', expected \"2:4\" or a share above 0, 0.9 at most"),
        ({"sparsity": 1.0}, "sparsity is 1.0"),
        ({"sparsity": float("nan")}, "sparsity is nan"),
        ({"sparsity": 0.5, "pruning": "random"}, "pruning is 'random', expected one of magnitude, wanda"),
        ({"pruning": "wanda"}, "sparsity is missing"),
    ],
)
def test_a_sparsity_that_means_nothing_is_refused(request_, sentence):
    with pytest.raises(UsageError) as refused:
        resolved(**request_)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "calibrated", "rotates", "smoothing"),
    [
        ({}, True, False, 0.6),
        ({"precision": "int4"}, True, False, 0.6),
        ({}, True, True, 0.0),
        ({}, False, False, 0.0),  # it takes a text
        ({"smoothing": 0.0}, True, False, 0.0),
        ({"phases": "shared"}, True, False, 0.6),
        ({"phases": "shared", "activations": "none"}, True, False, 0.0),
        ({"precision": "fp32"}, True, False, 0.0),
    ],
)
def test_activations_are_smoothed_where_the_stream_cannot_be_rotated(request_, calibrated, rotates, smoothing):
    found, _ = resolve(Request(**request_), CPU, 2048, "x", calibrated, rotates=rotates)
    assert found.smoothing == smoothing


@pytest.mark.parametrize(
    ("request_", "rotated"),
    [
        ({}, ("prefill", "decode")),
        ({"phases": "shared"}, ("prefill", "decode")),
        ({"precision": "int4"}, ("prefill",)),  # its weights are chosen on a text, in the model's own basis
        ({"precision": "int4", "scheme": "gptq"}, ("prefill",)),
        ({"scheme": "gptq", "layers": {"*.mlp.*": "int4"}}, ("prefill",)),
        ({"precision": "fp32"}, ()),
    ],
)
def test_graphs_whose_integers_are_chosen_without_a_text_are_rotated(request_, rotated):
    assert resolved(True, **request_).rotated == rotated
    assert resolve(Request(**request_), CPU, 2048, "x", rotates=False)[0].rotated == ()


def test_eight_bits_are_rotated_in_both_phases_where_a_text_decides_for_prompts():
    assert resolved(True, scheme="gptq").rotated == ("prefill", "decode")
    with pytest.raises(UsageError, check=about("scheme")):
        resolve(Request(scheme="gptq"), CPU, 2048, "x", rotates=False)


@pytest.mark.threat("wrong-paths")
def test_a_recipe_is_a_file_that_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b" " * (MOST_RECIPE + 1))
    for path, reason in ((tmp_path / "pipe", "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(UsageError, match=f"no readable TOML .*{reason}"):
            read_recipe(path)
    with pytest.raises(UsageError, match=f"it has {MOST_RECIPE + 1} bytes, expected at most {MOST_RECIPE}"):
        read_recipe(tmp_path / "long")


def test_defaults_are_int8_in_blocks_of_64_with_one_graph_for_both_phases():
    recipe, limits = resolve(Request(), CPU, 2048, "default", calibrated=True)
    assert recipe == Recipe(
        name="default",
        precision="int8",
        scheme="gptq",
        block_size=64,
        symmetric=True,
        head="int8",
        phases="shared",
        activations="per-token",
        smoothing=0.0,
        cache="float32",
        layers={},
        budget=Budget(),
        calibration=None,
        rotated=("prefill", "decode"),
    )
    assert (limits.max_context, limits.max_batch) == (2048, 8)
    assert limits.prefill_chunk <= 512
    plain = replace(recipe, scheme="rtn")
    assert resolve(Request(), CPU, 2048, "default")[0] == plain
    exact = Request(phases="shared", activations="none")
    assert resolve(exact, CPU, 2048, "default", calibrated=True)[0].scheme == "rtn"
    smoothed, _ = resolve(Request(), CPU, 2048, "default", calibrated=True, rotates=False)
    assert (smoothed.phases, smoothed.scheme, smoothed.smoothing) == ("shared", "rtn", 0.6)


def test_outliers_that_nothing_spreads_leave_decode_a_graph_of_its_own():
    for request in (Request(), Request(precision="int4"), Request(layers={"*.down_proj": "int4"})):
        assert resolve(request, CPU, 2048, "default", rotates=False)[0].phases == "split"


@pytest.mark.parametrize(
    ("request_", "one_graph", "activations"),
    [
        ({}, False, "per-token"),
        ({"activations": "none"}, False, "none"),
        ({"precision": "int4"}, False, "none"),
        ({"layers": {"*.mlp.*": "int4"}}, False, "none"),
        ({"precision": "fp16"}, False, "none"),
        ({}, True, "none"),
    ],
)
def test_one_graph_of_8_bits_that_is_asked_for_rounds_activations(request_, one_graph, activations):
    recipe, _ = resolve(Request(**request_, phases="shared"), CPU, 2048, "x", one_graph=one_graph)
    assert (recipe.phases, recipe.activations) == ("shared", activations)


def test_what_is_asked_for_goes_over_what_the_recipe_says():
    both = Request(precision="fp32", max_batch=4).over(Request(precision="int4", max_context=7))
    assert both == Request(precision="fp32", max_context=7, max_batch=4)


def test_a_budget_is_taken_limit_by_limit():
    asked, written = Budget(max_kl=0.1), Budget(max_kl=0.5, min_agreement=0.9)
    assert Request(budget=asked).over(Request(budget=written)).budget == Budget(max_kl=0.1, min_agreement=0.9)
    assert Request(budget=asked).over(Request()).budget == asked
    assert Request().over(Request(budget=written)).budget == written


@pytest.mark.parametrize(
    ("target", "calibrated", "expected"),
    [
        ("cpu", True, ("gptq", 64, False, {})),
        ("cpu", False, ("rtn", 32, False, {SENSITIVE: "int8"})),
        ("cuda", True, ("gptq", 32, True, {})),
        ("cuda", False, ("rtn", 32, True, {})),
        ("tensorrt", True, ("gptq", 128, True, {})),
        ("tensorrt-rtx", False, ("rtn", 128, True, {})),
    ],
)
def test_four_bits_take_what_the_target_and_calibration_allow(target, calibrated, expected):
    found, _ = resolve(Request(precision="int4"), capabilities(target), 2048, "x", calibrated)
    assert (found.scheme, found.block_size, found.symmetric, found.layers) == expected
    assert found.head == ("fp16" if target == "tensorrt" else "int8")


@pytest.mark.parametrize(
    ("target", "precision", "source_head"),
    [
        ("cpu", "int8", "int8"),
        ("cuda", "int8", "int8"),
        # TensorRT documents weights alone in integers for int4 only, TensorRT-RTX for int8 as well.
        ("tensorrt", "int4", "fp16"),
        ("tensorrt-rtx", "int8", "int8"),
    ],
)
def test_the_default_precision_is_one_that_the_target_documents(target, precision, source_head):
    found, _ = resolve(Request(), capabilities(target), 2048, "x")
    assert found.precision == precision
    coded, _ = resolve(Request(), capabilities(target), 2048, "x", coded=True)
    assert (coded.precision, coded.head) == ("source", source_head)


def test_what_is_asked_for_beats_the_defaults_of_four_bits():
    found = resolved(True, precision="int4", scheme="rtn", layers={}, head="int4", symmetric=True, block_size=128)
    assert (found.scheme, found.layers, found.head, found.symmetric, found.block_size) == ("rtn", {}, "int4", True, 128)
    assert resolved(calibrated=True, precision="fp32").scheme == "rtn"
    found, _ = resolve(Request(precision="int4", symmetric=False, block_size=64), capabilities("cuda"), 2048, "x")
    assert (found.symmetric, found.block_size) == (False, 64)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"precision": "int3"}, "precision is 'int3', expected one of fp32, fp16, int8, int4"),
        ({"scheme": "gguf"}, "scheme is 'gguf', expected one of rtn, gptq"),
        ({"precision": "fp32", "phases": "split"}, "phases is 'split', expected one of shared"),
        ({"cache": "int4"}, "cache is 'int4', expected one of float32, float16, int8, int8-channel"),
        ({"layers": {"*.q_proj": "int3"}}, "layers.*.q_proj is 'int3', expected one of fp32, fp16, int8, int4"),
        ({"phases": "split", "activations": "none"}, "activations is 'none', expected one of per-token"),
        ({"phases": "split", "activations": "static"}, "activations is 'static', expected one of per-token"),
        ({"activations": "per-token", "phases": "shared", "precision": "int4"}, "activations is 'per-token', but one"),
        ({"precision": "fp32", "activations": "per-token"}, "activations is for int8 and int4, the precision is fp32"),
        ({"precision": "fp16", "block_size": 32}, "block_size is for int8 and int4, the precision is fp16"),
        ({"symmetric": True}, "symmetric is for int4, the precision is int8"),
        (
            {"scheme": "gptq", "phases": "shared", "activations": "none"},
            "scheme is 'gptq', which is for int4 and for prompts of a rotated",
        ),
        ({"smoothing": 1.01}, "smoothing is 1.01, expected 0.0 ... 1.0"),
        ({"smoothing": float("nan")}, "smoothing is nan, expected 0.0 ... 1.0"),
        ({"budget": Budget(min_agreement=98.0)}, "budget.min_agreement is 98.0, expected 0.0 ... 1.0"),
        ({"budget": Budget(max_perplexity_increase=float("nan"))}, "budget.max_perplexity_increase is nan, expected"),
        ({"block_size": 100}, "block_size is 100, expected one of 32, 64, 128, 256"),
        ({"max_context": 2049}, "max_context is 2049, expected "),
        ({"max_batch": 0}, "max_batch is 0, expected 1 ... 1024"),
        ({"prefill_chunk": 65_537}, "prefill_chunk is 65537, expected 1 ... 65536"),
    ],
    ids=str,
)
def test_what_the_target_or_the_model_cannot_do_is_refused(request_, sentence):
    with pytest.raises(UsageError) as refused:
        resolved(**request_)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "wish"),
    [
        ({}, None),
        ({"precision": "fp32"}, None),
        ({"precision": "int4", "scheme": "gptq"}, "scheme"),
        ({"smoothing": 0.5}, "smoothing"),
        ({"cache": "int8-channel"}, "cache"),
    ],
    ids=str,
)
def test_a_recipe_tells_what_in_it_needs_calibration(request_, wish):
    assert needs_calibration(resolved(**request_)) == wish


NAMES = [f"model.layers.{layer}.{name}_proj" for layer in (0, 1) for name in ("self_attn.q", "mlp.up", "mlp.down")]
NAMES.append("lm_head")
GEOMETRY = uniform("llama", 16, 64, 128, 4, 2, 16, 320, 512, True, (0,) * 16)
FOUR, EIGHT = WeightOnly(Grid(4, 32, symmetric=False)), WeightOnly(Grid(8, 32))
BLOCKS = {"int8": EIGHT, "int4": FOUR, "fp32": Float32(), "fp16": Float16()}


def precisions(layers: dict[str, str], phase: str = "decode", **request: Any) -> dict[str, str]:
    """The precision of each linear, by the last words of its name."""
    stored = quant_configs(resolved(precision="int4", layers=layers, **request), GEOMETRY)[phase]
    names = {form: name for name, form in BLOCKS.items()} | {PerToken(): "w8a8"}
    return {name: names[stored.of(name)] for name in NAMES}


@pytest.mark.parametrize(("precision", "body"), [("int8", WeightOnly(Grid(8, 64))), ("int4", FOUR)])
def test_a_split_recipe_makes_w8a8_prefill_and_weight_only_decode(precision, body):
    made = quant_configs(resolved(precision=precision, phases="split", layers={}), GEOMETRY)
    assert made["decode"] == QuantConfigs(body, EIGHT)
    # The phases share the head, and with it a tied embedding.
    assert made["prefill"] == replace(made["decode"], w8a8=PerToken())
    assert made["prefill"].of(NAMES[0]) == PerToken()
    assert made["prefill"].of("lm_head") == made["decode"].of("lm_head") == EIGHT


def test_half_of_the_layers_have_sensitive_linears_first_last_and_every_third_between():
    stored = quant_configs(resolved(precision="int4"), GEOMETRY)["decode"]
    chosen = {
        linear.name for linear in GEOMETRY.linears if linear.layer is not None and stored.of(linear.name) == EIGHT
    }
    ends, layers = ("self_attn.v_proj", "mlp.down_proj"), (0, 1, 4, 7, 10, 13, 14, 15)
    assert chosen == {f"model.layers.{layer}.{end}" for layer in layers for end in ends}


def test_the_last_pattern_that_matches_wins():
    first, last = {"*.mlp.*": "int8", "*.mlp.down_proj": "fp16"}, {"*.mlp.down_proj": "fp16", "*.mlp.*": "int8"}
    assert precisions(first)["model.layers.0.mlp.down_proj"] == "fp16"
    assert precisions(first)["model.layers.0.mlp.up_proj"] == "int8"
    assert precisions(last)["model.layers.0.mlp.down_proj"] == "int8"
    assert precisions(last)["model.layers.0.self_attn.q_proj"] == "int4"


def test_prefill_multiplies_integers_except_where_the_layer_is_float():
    layers = {"*.mlp.down_proj": "fp16", "*.mlp.up_proj": "int8"}
    found = precisions(layers, "prefill")
    assert found["model.layers.1.mlp.down_proj"] == "fp16"
    assert found["model.layers.1.mlp.up_proj"] == found["model.layers.1.self_attn.q_proj"] == "w8a8"
    assert found["lm_head"] == "int8"


def test_a_pattern_that_matches_nothing_is_refused_with_some_names():
    recipe = resolved(layers={SENSITIVE: "int8", "*.mlp.down_proj": "int8", "*.mlp.donw_proj": "int8"})
    with pytest.raises(UsageError) as refused:
        check_patterns(recipe, NAMES)
    assert "layers.*.mlp.donw_proj matches no linear of this model, expected a pattern of names like " in str(
        refused.value
    )
    for name in (NAMES[0], NAMES[-2], "lm_head"):
        assert name in str(refused.value)


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
    with pytest.raises(UsageError, match=r"no readable TOML|expected"):
        resolve(read_recipe(written(text)), CPU, 2048, "mine")
