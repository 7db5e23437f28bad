"""What a bundle says of its engine is asked: which GPUs and which versions of the library it is for."""

from dataclasses import replace

import pytest
from doubles.plans import PLAN


@pytest.mark.parametrize(
    ("built", "installed", "compatible", "fits"),
    [
        ("10.16.1.11", "10.16.1.11", False, True),
        ("10.16.1.11", "11.4.0.106", False, False),
        ("10.16.1.11", "11.4.0.106", True, True),
        ("11.4.0.106", "10.16.1.11", True, False),
    ],
)
def test_engines_are_for_one_version_unless_built_otherwise(built: str, installed: str, compatible: bool, fits: bool):
    assert replace(PLAN, version_compatible=compatible).fits_version(installed, built) == fits


@pytest.mark.parametrize(
    ("named", "compatibility", "capability", "fits"),
    [
        (("8.9",), "none", "8.9", True),
        (("8.9",), "none", "8.6", False),
        (("8.9",), "ampere", "8.6", True),
        (("8.9",), "ampere", "7.5", False),
        (("8.9",), "same", "8.9", True),
        ((), "none", "12.0", True),
        ((), "none", "7.5", False),
    ],
)
def test_engines_are_for_the_gpus_that_they_name(
    named: tuple[str, ...], compatibility: str, capability: str, fits: bool
):
    plan = replace(PLAN, compute_capabilities=named, hardware_compatibility=compatibility)
    assert plan.fits_gpu(capability) == fits


def test_a_plan_is_sound_for_the_limits_that_it_was_built_with_and_no_others():
    assert PLAN.is_sound(max_context=512, max_batch=1, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=513, max_batch=1, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=512, max_batch=2, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=512, max_batch=1, prefill_chunk=64)
