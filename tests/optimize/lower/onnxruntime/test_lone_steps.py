"""A token alone after many is computed with folded heads: the same numbers, the same cache, nothing else touched."""

from dataclasses import replace

import pytest
from doubles.lowerings import difference

from llmc.optimize.lower.onnxruntime import lone_steps

pytest.importorskip("onnxruntime", "1.31", reason="older engines attend to no queries without new keys")

# As in test_lowering.py.
FLOAT_TOLERANCE = 1e-4
# So few that the tiny decoders have as many behind them, and as many as a group has heads.
FROM_POSITIONS = 8


@pytest.fixture
def folding(monkeypatch, lowering):
    """A lowering of decode for an engine that folds."""
    monkeypatch.setattr(lone_steps, "FROM_POSITIONS", FROM_POSITIONS)

    def start(export):
        lowered = lowering(export)
        lowered.context = replace(lowered.context, phase="decode", folds_lone_steps=True)
        return lowered

    return start


def groups(lowered) -> int:
    """Attentions whose heads share keys and values, and that see all positions."""
    return sum(item.heads > item.kv_heads and not item.window for item in lowered.geometry.attentions)


def test_token_by_token_equals_the_portable_graph_in_every_family(case, folding, decoder, portable_logits, ids):
    lowered = folding(case.export)
    folder = lowered.save()
    assert len(lowered.nodes("If")) == groups(lowered)
    logits = decoder(folder, lowered.geometry)(ids, [7, *[1] * (len(ids) - 7)])
    assert difference(logits, portable_logits(case)) <= FLOAT_TOLERANCE
