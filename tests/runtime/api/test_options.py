"""How an engine may be set up: ranges, what does not go together, and what a bundle can promise."""

from dataclasses import replace
from typing import Any

import pytest
from doubles.refusals import about

from llmc.bundle import Invariance, Manifest
from llmc.errors import UsageError
from llmc.runtime import load
from llmc.runtime.api.options import Determinism, EngineOptions, check_level, in_pairs, row_limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch is 0, expected an integer from 1 to 1024"),
        ({"max_batch": True}, "max_batch is True"),
        ({"max_batch": 2.0}, r"max_batch is 2\.0"),
        ({"max_queue": 0}, r"max_queue is 0, expected an integer from 1 to 1000000"),
        ({"max_queue": None}, "max_queue is None"),
        ({"decode_steps_per_chunk": -1}, r"decode_steps_per_chunk is -1, expected an integer from 0"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes is -1"),
        ({"prefix_cache_disk_bytes": None}, "prefix_cache_disk_bytes is None"),
        ({"tool_format": "xml"}, "tool_format is 'xml', expected 'hermes' or .*, or null"),
        ({"determinism": "exact"}, "determinism is 'exact', expected 'fast' or 'batch' or 'strict'"),
        ({"draft": 5}, "draft is 5, expected a path, or null"),
        ({"draft": ""}, "draft is '', expected a path, or null"),
        ({"prefix_cache_folder": b"x"}, "prefix_cache_folder is b'x'"),
        ({"prefix_cache_folder": "x", "prefix_cache_bytes": 0}, "prefixes pass through memory"),
        (
            {"draft": "lookup", "determinism": "batch"},
            "draft is set and determinism is 'batch'.*; use 'strict', or 'fast'",
        ),
    ],
)
def test_what_is_out_of_range_or_contradicts_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        EngineOptions(**options)


def test_drafts_may_be_switched_off_by_name_and_auto_suits_every_level():
    assert EngineOptions(draft="none").draft is None
    assert all(EngineOptions(draft="auto", determinism=level).draft == "auto" for level in Determinism)


def test_an_unknown_option_is_refused_with_the_nearest_one(tiny_bundle):
    with pytest.raises(UsageError, check=about("max_batches")):
        load(tiny_bundle, max_batches=4)


def seen(manifest: Manifest, **found: Any) -> Manifest:
    """The manifest of a bundle whose build measured this."""
    graphs = dict.fromkeys(("prefill", "decode"), replace(manifest.graphs["decode"], invariance=Invariance(**found)))
    return replace(manifest, graphs=graphs, limits=replace(manifest.limits, max_batch=7))


@pytest.mark.parametrize(
    ("level", "found", "missing"),
    [
        ("batch", {}, "chunks of prompts, rows of a batch"),
        ("batch", {"tokens": 2}, "rows of a batch"),
        ("batch", {"rows": 1, "outputs": 1}, "chunks of prompts"),
        ("strict", {"rows": 1}, "chunks of prompts, tokens of a call, outputs of a call"),
        ("strict", {"tokens": 1}, "outputs of a call"),
    ],
)
def test_a_level_that_the_build_did_not_see_kept_is_refused(manifest, level, found, missing):
    with pytest.raises(
        UsageError, match=f"'{level}', but in the build results depended on the number of {missing}; build"
    ):
        check_level(seen(manifest, **found), Determinism(level))


def test_a_level_that_the_build_saw_kept_is_accepted(manifest):
    check_level(manifest, Determinism.FAST)
    check_level(seen(manifest, rows=2, tokens=2), Determinism.BATCH)
    check_level(seen(manifest, tokens=2, outputs=1), Determinism.STRICT)


def test_rows_are_those_of_the_bundle_or_fewer_and_even_where_they_go_in_pairs(manifest):
    pairs, free = seen(manifest, rows=2, tokens=2), seen(manifest, rows=1, tokens=1)
    assert row_limit(pairs, EngineOptions()) == 7
    assert row_limit(pairs, EngineOptions(determinism="batch")) == 6
    assert row_limit(pairs, EngineOptions(determinism="batch", max_batch=5)) == 4
    assert row_limit(pairs, EngineOptions(determinism="batch", max_batch=1)) == 1
    assert row_limit(free, EngineOptions(determinism="batch")) == 7
    assert (in_pairs(pairs, Determinism.BATCH), in_pairs(pairs, Determinism.STRICT)) == (True, False)
    with pytest.raises(
        UsageError, match=r"max_batch is 8, the bundle was built for 7; build with a larger --max-batch"
    ):
        row_limit(pairs, EngineOptions(max_batch=8))
