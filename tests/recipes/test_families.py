"""The benchmark over families: same sizes for all, and ratios per weight."""

import pytest

from llmc.export.families import FAMILIES

# Half a step of the inner width, in 2 gated MLPs, is 1.2 % of the model.
SIZE_TOLERANCE = 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_about_as_many_weights_as_llama(script, family):
    families = script("families")
    if families.is_text(family):
        goal = families.count(families.geometry("llama", None))
        assert families.count(families.geometry(family, goal)) == pytest.approx(goal, rel=SIZE_TOLERANCE)


def test_ratios_are_medians_of_rounds_per_weight_and_slow_ones_are_marked(script):
    rounds = [
        {"llama": {"prefill": 100.0, "decode": 10.0}, "phi3": {"prefill": 45.0, "decode": 4.4}},
        {"llama": {"prefill": 200.0, "decode": 20.0}, "phi3": {"prefill": 80.0, "decode": 9.0}},
        {"llama": {"prefill": 100.0, "decode": 10.0}, "phi3": {"prefill": 50.0, "decode": 4.0}},
    ]
    assert script("families").rows(rounds, {"llama": 1_000_000, "phi3": 2_000_000}) == [
        ("`llama`", "1.0", "100 (1.00; 1.00 to 1.00)", "10 (1.00; 1.00 to 1.00)"),
        ("`phi3`", "2.0", "50 (0.90; 0.80 to 1.00)", "4 (0.88!; 0.80 to 0.90)"),
    ]
