"""What a bundle says of its engine is asked: which GPUs and which versions of the library it is for."""

from dataclasses import replace

import pytest
from doubles.plans import PLAN


@pytest.mark.parametrize(
    ("named", "capability", "fits"),
    [(("8.9",), "8.9", True), (("8.9",), "8.6", False), ((), "12.0", True), ((), "7.5", False)],
)
def test_engines_are_for_the_gpus_that_they_name(named, capability, fits):
    assert replace(PLAN, compute_capabilities=named).fits_gpu(capability) == fits


def test_a_plan_is_sound_for_the_limits_that_it_was_built_with_and_no_others():
    assert PLAN.is_sound(max_context=512, max_batch=1, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=513, max_batch=1, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=512, max_batch=2, prefill_chunk=128)
    assert not PLAN.is_sound(max_context=512, max_batch=1, prefill_chunk=64)
