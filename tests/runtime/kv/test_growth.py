"""The steps in which the cache grows."""

import pytest

from llmc.runtime.kv.budget import next_capacity


@pytest.mark.parametrize(
    ("needed", "maximum", "capacity"),
    [
        (1, 32768, 256),
        (256, 32768, 256),
        (257, 32768, 512),
        (1024, 32768, 1024),
        (1025, 32768, 2048),
        (2049, 32768, 3072),
        (32768, 32768, 32768),
        (1, 100, 100),
        (100, 100, 100),
        (1000, 1000, 1000),
        (1025, 1030, 1030),
    ],
)
def test_capacity_is_the_next_step_or_the_maximum(needed, maximum, capacity):
    assert next_capacity(needed, maximum) == capacity
