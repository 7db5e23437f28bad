"""What is tried after an engine is wrong on its GPU, and in which order."""

from dataclasses import replace

import pytest
from doubles.plans import PLAN

from llmc.errors import BuildError, BundleError
from llmc.optimize.tensorrt.ladder import BORDERS, try_borders


@pytest.mark.parametrize(
    ("changes", "tried"),
    [
        ({}, ["", "float32"]),
        ({"border": "float32"}, ["float32"]),
        ({"compute": "float32"}, [""]),
        ({"attention": "basic"}, [""]),
        ({"attention": "decomposed", "compute": "bfloat16"}, ["", "float32"]),
    ],
)
def test_borders_are_tried_in_order_and_the_last_error_is_raised(changes, tried):
    seen: list[str] = []

    def attempt(border: str) -> str:
        seen.append(border)
        raise BundleError(f"wrong with {border!r}")

    with pytest.raises(BundleError, match=f"wrong with {tried[-1]!r}"):
        try_borders(replace(PLAN, **changes), attempt, (BundleError,))
    assert seen == tried


def test_another_error_ends_the_trials():
    def attempt(border: str) -> str:
        raise BuildError("no kernel")

    with pytest.raises(BuildError, match="no kernel"):
        try_borders(PLAN, attempt, (BundleError,))


def test_every_border_can_be_read_back():
    assert all(replace(PLAN, border=border).is_sound(512, 1, 128) for border in BORDERS)
