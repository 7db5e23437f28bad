"""What is built in turn where a builder finds no kernels for integer weights."""

from dataclasses import replace

import pytest

from llmc.bundle import Recipe
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.tensorrt.ladder import Step, ladder


def recipe(**asked: object) -> Recipe:
    return resolve(Request(**asked), capabilities("tensorrt"), 512, "test", calibrated=True)[0]


def short(steps: tuple[Step, ...]) -> list[tuple[str, str, str, int, bool]]:
    return [(s.name, s.recipe.precision, s.recipe.head, s.recipe.block_size, s.wide_scales) for s in steps]


def test_int8_goes_by_wide_scales_and_4_bits_to_floats():
    assert short(ladder(recipe(precision="int8", scheme="rtn"))) == [
        ("", "int8", "int8", 0, False),
        ("scales in float32", "int8", "int8", 0, True),
        ("int4 in blocks of 128", "int4", "int4", 128, False),
        ("fp16", "fp16", "fp16", 0, False),
    ]


def test_what_a_gpu_lacks_is_not_tried():
    names = [step.name for step in ladder(recipe(precision="int8", scheme="rtn"), {"bf16", "int4", "fp8"})]
    assert names == ["", "scales in float32", "fp16"]


def test_int4_in_the_documented_blocks_has_no_others_to_try():
    names = [step.name for step in ladder(recipe(precision="int4", block_size=128, scheme="rtn"))]
    assert names == ["", "scales in float32", "fp16"]
    names = [step.name for step in ladder(recipe(precision="int4", block_size=64, scheme="rtn"))]
    assert names == ["", "scales in float32", "int4 in blocks of 128", "fp16"]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "fp8"])
def test_what_has_no_integers_is_built_or_not(precision: str):
    assert [step.name for step in ladder(recipe(precision=precision))] == [""]


def test_integers_in_other_places_are_replaced_and_floats_are_not():
    mixed = recipe(precision="int4", head="int8", layers={"*.down_proj": "int8", "*.o_proj": "fp16"}, scheme="gptq")
    *_, small, floats = ladder(replace(mixed, activations="static"))
    assert (small.recipe.head, small.recipe.layers) == ("int4", {"*.down_proj": "int4", "*.o_proj": "fp16"})
    assert (small.recipe.scheme, small.recipe.activations) == ("rtn", "none")
    assert (floats.recipe.precisions(), floats.recipe.block_size) == ({"fp16"}, 0)


def test_float32_has_no_wider_scales_and_ends_in_float32():
    names = [step.name for step in ladder(recipe(precision="int8", compute="float32", scheme="rtn"))]
    assert names == ["", "int4 in blocks of 128", "fp32"]
