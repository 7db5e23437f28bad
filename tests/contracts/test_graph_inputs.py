"""The table of contract 1: its page, and what a call feeds by it."""

import re
from pathlib import Path

import numpy as np
import pytest

from llmc.bundle.contract import BROUGHT, INPUTS
from llmc.runtime.sessions import Batch, Phase

PAST, TOKENS = np.array([6, 0]), 3
PLAIN = {
    "lengths": [3, 3],
    "new_lengths": [3, 3],
    "embedding_indices": [[-1] * 3] * 2,
    "embeddings": [[0] * 4],
    "positions": [[[6, 7, 8], [0, 1, 2]]] * 3,
    "seen_lengths": [9, 3],
    "token_types": [[0] * 3] * 2,
    "text_lengths": [9, 3],
    "hidden": [[[0] * 4] * 3] * 2,
    "cache_slots": [0, 1, 2, 3, 4],
}
OWN = {"coordinates": 3, "width": 4}


@pytest.fixture
def call() -> Batch:
    return Batch.of(Phase.PREFILL, np.arange(6).reshape(2, TOKENS), PAST, np.array([[0, 2], [1, 2]]))


def test_the_page_lists_every_input_of_a_decoder(root: Path):
    _, table, _ = (root / "export/README.md").read_text().split("<!-- contract -->\n")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| \[([\w, ]+)\]", table, re.MULTILINE)
    listed = {name: (kind, tuple(shape.split(", "))) for name, kind, shape in rows if name != "logits"}
    assert listed == {it.name: (it.type, it.shape) for it in INPUTS.values() if it.name != "lengths"}


@pytest.mark.parametrize("name", sorted(INPUTS.keys() - {it.name for it in BROUGHT}))
def test_a_call_that_brings_nothing_feeds_what_is_plain(call: Batch, name: str):
    asked = INPUTS[name]
    array = np.empty(asked.size([OWN.get(axis, axis) for axis in asked.shape], call.feeds, 5), asked.type)
    asked.fill(array, call.feeds)
    assert array.tolist() == PLAIN[name]


def test_tokens_that_do_not_count_end_no_text(call: Batch):
    array = np.empty(2, np.int64)
    INPUTS["text_lengths"].fill(array, call.feed(new_lengths=np.array([2, 0])).feeds)
    assert array.tolist() == [8, 0]


def test_what_a_call_brings_is_fed_in_its_own_size(call: Batch):
    rows = np.ones((7, 4), np.float32)
    own = call.feed(embeddings=rows)
    assert INPUTS["embeddings"].size(["rows", 4], own.feeds) == (7, 4)
    assert call.feed_rows([{}, {"text_lengths": np.array([30])}]).feeds["text_lengths"].tolist() == [9, 30]


def test_a_part_of_a_call_has_its_rows_and_tokens(call: Batch):
    own = call.feed(positions=np.arange(18).reshape(3, 2, 3), seen_lengths=PAST + 5)
    part = own.cut(slice(1, 2), slice(1, 3))
    assert (part.first_row, part.input_ids.tolist(), part.past_lengths.tolist()) == (1, [[4, 5]], [1])
    assert part.logit_indices.tolist() == [[0, 1]]
    assert part.feeds["positions"].tolist() == own.feeds["positions"][:, 1:, 1:].tolist()
    assert part.feeds["seen_lengths"].tolist() == [5]
