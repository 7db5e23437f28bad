"""A recipe says what it means, or is refused with the nearest word that would have been understood."""

from pathlib import Path

import pytest

from llmc.bundle import Limits, Recipe
from llmc.errors import UsageError
from llmc.optimize.lower.plan import Float32, PerToken, WeightOnly
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import Request, forms, read_recipe, resolve
from llmc.optimize.targets import capabilities

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_that_comes_with_llmc_is_understood(path):
    recipe, _ = resolve(read_recipe(path), CPU, 2048, path.stem)
    assert recipe.name == path.stem
    assert recipe.precision == path.stem.partition("-")[0]


def test_recipes_come_with_llmc():
    assert len(RECIPES) >= 3


def test_every_key_reaches_the_request(written):
    text = 'precision = "int4"\nblock_size = 64\nhead = "int8"\nphases = "shared"\nmax_context = 9\nmax_batch = 2\n'
    assert read_recipe(written(text + "prefill_chunk = 5\n")) == Request("int4", 64, "int8", "shared", 9, 2, 5)


def test_an_empty_recipe_asks_for_nothing(written):
    assert read_recipe(written("")) == Request()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("blocksize = 64", "unknown key 'blocksize'; did you mean 'block_size'?"),
        ('Precision = "int8"', "unknown key 'Precision'; did you mean 'precision'?"),
        ("quality = 3", "unknown key 'quality'; expected some of precision, block_size, head, phases, max_context"),
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


def test_defaults_are_int8_in_blocks_of_128_with_a_graph_for_each_phase():
    recipe, limits = resolve(Request(), CPU, 2048, "default")
    assert recipe == Recipe("default", "int8", block_size=128, head="int8", phases="split")
    assert (limits.max_context, limits.max_batch) == (2048, 1)
    assert limits.prefill_chunk <= 512


def test_the_context_is_the_checkpoints_up_to_a_bound_unless_asked_for():
    assert resolve(Request(), CPU, 131_072, "x")[1].max_context == 32_768
    assert resolve(Request(max_context=131_072), CPU, 131_072, "x")[1].max_context == 131_072


def test_a_chunk_is_no_longer_than_the_context():
    assert resolve(Request(max_context=100), CPU, 2048, "x")[1] == Limits(100, 1, 100)


def test_float32_has_no_blocks_and_one_graph():
    recipe, _ = resolve(Request(precision="fp32"), CPU, 64, "x")
    assert (recipe.block_size, recipe.phases) == (0, "shared")
    assert forms(recipe) == {"shared": (Float32(), Float32())}


def test_what_is_asked_for_goes_over_what_the_recipe_says():
    both = Request(precision="fp32", max_batch=4).over(Request(precision="int4", max_context=7))
    assert both == Request(precision="fp32", max_context=7, max_batch=4)


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_a_split_recipe_makes_per_token_prefill_and_weight_only_decode(precision, bits):
    recipe, _ = resolve(Request(precision=precision, block_size=64), CPU, 64, "x")
    made = forms(recipe)
    assert made["prefill"][0] == PerToken()
    assert made["decode"][0] == WeightOnly(Grid(bits, 64))
    # The phases share the head, and with it a tied embedding.
    assert made["prefill"][1] == made["decode"][1]


def test_a_shared_recipe_makes_one_weight_only_graph():
    recipe, _ = resolve(Request(precision="int4", phases="shared"), CPU, 64, "x")
    made = forms(recipe)
    assert list(made) == ["shared"]
    assert made["shared"][0] == WeightOnly(Grid(4, 128))


@pytest.mark.parametrize("phases", ["split", "shared"])
def test_a_head_may_keep_8_bits(phases):
    recipe, _ = resolve(Request(precision="int4", head="int8", phases=phases), CPU, 64, "x")
    assert recipe.head == "int8"
    assert {head for _, head in forms(recipe).values()} == {WeightOnly(Grid(8, 128))}


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(precision="int3"), "precision is 'int3', expected one of fp32, int8, int4"),
        (Request(phases="both"), "phases is 'both', expected one of split, shared"),
        (Request(precision="fp32", phases="split"), "phases is 'split', expected one of shared"),
        (Request(head="fp32"), "head is 'fp32', expected one of int8, int4"),
        (Request(precision="fp32", head="int8"), "head is 'int8', expected one of fp32"),
        (Request(precision="fp32", block_size=128), "block_size is for int8 and int4, the precision is fp32"),
        (Request(block_size=100), "block_size is 100, expected one of 32, 64, 128, 256"),
        (Request(block_size=-32), "block_size is -32, expected one of 32, 64, 128, 256"),
        (Request(max_context=2049), "max_context is 2049, expected "),
        (Request(max_context=-1), "max_context is -1, expected "),
        (Request(max_batch=0), "max_batch is 0, expected 1 ... 1024"),
        (Request(max_batch=1025), "max_batch is 1025, expected 1 ... 1024"),
        (Request(prefill_chunk=65_537), "prefill_chunk is 65537, expected 1 ... 65536"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[8:40],
)
def test_what_the_target_or_the_model_cannot_do_is_refused(request_, sentence):
    with pytest.raises(UsageError) as refused:
        resolve(request_, CPU, 2048, "x")
    assert sentence in str(refused.value)


def test_an_unknown_target_is_refused():
    with pytest.raises(UsageError, match="target 'tpu' is unknown; expected one of cpu"):
        capabilities("tpu")
