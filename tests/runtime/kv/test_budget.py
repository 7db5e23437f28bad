"""Loading and growing: arguments, the bundle and memory are checked first, and what is refused names the numbers."""

from contextlib import nullcontext
from dataclasses import replace
from typing import NoReturn

import pytest
from doubles.plans import PLAN as PLAN_OF_ENGINE
from doubles.plans import plan_of
from hypothesis import given
from hypothesis import strategies as st

from llmc.bundle import Limits, Manifest, read_bundle
from llmc.errors import ResourceError, UsageError
from llmc.runtime import load
from llmc.runtime.kv.budget import (
    CacheBudget,
    MemoryEstimate,
    check_growth,
    check_load,
    plan_load,
    plan_run,
    usable_memory,
)

MB = 1_000_000
LIMITS = Limits(max_context=8192, max_batch=4, prefill_chunk=256)
PLAN = plan_of(
    engine=60 * MB,
    tokenizer=5 * MB,
    weights=100 * MB,
    embedding=30 * MB,
    workspace=20 * MB,
    workspace_per_token=2_000,
    cache_per_token=10_000,
    logits=1 * MB,
)
# engine, tokenizer, weights, embedding, workspace and one row's logits
FIXED = (60 + 5 + 100 + 30 + 20 + 1) * MB


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the bundle is opened in this test."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the engine was opened")

    monkeypatch.setattr("llmc.runtime.loading.open_session", refuse)
    monkeypatch.setattr("llmc.runtime.loading.Tokenizer.from_folder", refuse)


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("llmc.runtime.kv.budget.available_memory", lambda: size)


def run(context: int, batch: int = 1) -> MemoryEstimate:
    return plan_run(PLAN, LIMITS, context, batch)


def test_the_parts_follow_the_formula():
    assert run(300, 2).parts == {
        "engine": 60 * MB,
        "tokenizer": 5 * MB,
        "weights": 100 * MB,
        "embedding": 30 * MB,
        "cache": 10_000 * 300 * 2,
        "workspace": 20 * MB + 2_000 * 300,
        "logits": 2 * MB,
    }
    assert run(300, 2).total == FIXED + 1 * MB + (2 * 10_000 + 2_000) * 300
    assert plan_run(PLAN, LIMITS).context == 8192


def test_a_refusal_names_every_number_and_what_would_fit(tmp_path):
    # Needed: 217 + 22,000 x 1024 = 239.528 MB; in 230 MB there is room for 590 tokens x 2, and 1,024 x 1 (228.288 MB).
    with pytest.raises(ResourceError) as refused:
        run(1024, 2).check(tmp_path, 230 * MB)
    assert str(refused.value) == (
        f"{tmp_path}: to run it needs 240 MB (60 engine, 5 tokenizer, 100 weights, 30 embedding, 20 cache, "
        "22 workspace, 2 logits), 230 MB are available, 10 MB are missing; a context of 590 tokens fits with a batch "
        "of 2, a batch of 1 fits with a context of 1024: lower them, free memory or use a smaller precision"
    )


@given(
    context=st.integers(1, LIMITS.max_context), batch=st.integers(1, LIMITS.max_batch), spare=st.integers(0, 500 * MB)
)
def test_the_largest_context_and_batch_fit_and_the_next_do_not(context, batch, spare):
    available = 200 * MB + spare
    verdict = run(context, batch).verdict(available)
    for n, limit, plan in (
        (verdict.largest_context, LIMITS.max_context, lambda n: run(n, batch)),
        (verdict.largest_batch, LIMITS.max_batch, lambda n: run(context, n)),
    ):
        assert n == 0 or plan(n).total <= available
        assert n == limit or plan(n + 1).total > available
    assert verdict.fits == (run(context, batch).total <= available)


def test_loading_needs_the_first_step_only_unless_memory_is_promised(monkeypatch, tmp_path, manifest):
    big = replace(manifest, memory=PLAN, limits=LIMITS)
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (0, 0))
    available(monkeypatch, run(256).total)
    check_load(tmp_path, big, 8192)
    with pytest.raises(ResourceError, match="cache"):
        check_load(tmp_path, big, 8192, memory=run(256).total)
    available(monkeypatch, run(256).total - 1)
    with pytest.raises(ResourceError, match="1 MB are missing"):
        check_load(tmp_path, big, 8192)
    check_load(tmp_path, big, 8192, memory=run(8192).total)  # what is asked for goes before what is available


@pytest.mark.parametrize(
    ("saturates", "unsigned", "missing"), [(True, False, "10 MB are missing"), (False, False, None), (True, True, None)]
)
def test_weights_that_become_uint8_while_they_are_opened_need_their_room(
    monkeypatch, tmp_path, manifest, saturates, unsigned, missing
):
    manifest = replace(manifest, target=replace(manifest.target, unsigned=unsigned))
    graph = replace(manifest.graphs["prefill"], weight_bytes=100 * MB)
    recipe = replace(manifest.recipe, activations="per-token")
    big = replace(manifest, memory=PLAN, limits=LIMITS, recipe=recipe, graphs={**manifest.graphs, "prefill": graph})
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (0, 0))
    monkeypatch.setattr("llmc.runtime.kv.budget.saturates", lambda: saturates)
    opening = (60 + 5 + 100 + 165) * MB
    check_load(tmp_path, big, 256, memory=opening)
    with pytest.raises(ResourceError, match=missing) if missing else nullcontext():
        check_load(tmp_path, big, 256, memory=opening - 10 * MB)


def test_what_this_process_holds_already_is_not_asked_for_twice(monkeypatch):
    available(monkeypatch, 100 * MB)
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (40 * MB, 50 * MB))
    assert usable_memory(60 * MB) == 140 * MB
    assert usable_memory(30 * MB) == 130 * MB
    assert usable_memory(60 * MB, memory=1 * MB) == 1 * MB


def test_growth_counts_only_what_is_new(monkeypatch, manifest):
    planned = replace(manifest, memory=PLAN)
    available(monkeypatch, 12 * MB)
    check_growth(planned, (1, 1000), (1, 2000))
    available(monkeypatch, 12 * MB - 1)
    with pytest.raises(ResourceError, match="cache for 2000 tokens needs 12 MB more, 11 MB are available; free memory"):
        check_growth(planned, (1, 1000), (1, 2000))
    available(monkeypatch, 33 * MB)
    check_growth(planned, (1, 1000), (4, 1000))
    available(monkeypatch, 33 * MB - 1)
    with pytest.raises(ResourceError, match="cache for 1000 tokens needs 33 MB more"):
        check_growth(planned, (4, 1000), (7, 1000))


# A GPU's bundle: the cache takes nothing of the process, and has 4,096 positions whatever it is asked for.
ON_GPU = plan_of(context=500 * MB, weights=100 * MB, workspace=50 * MB, cache_per_token=10_000, logits=1 * MB)
ENGINE = replace(PLAN_OF_ENGINE, buckets=(256, 1024, 4096))


@pytest.fixture
def on_gpu(manifest: Manifest) -> Manifest:
    memory = PLAN.without("weights", "embedding", "workspace", "cache")
    return replace(manifest, memory=memory, engine=ENGINE, device=ON_GPU)


def test_a_cache_on_a_gpu_is_held_against_the_gpus_memory(monkeypatch, on_gpu):
    available(monkeypatch, 3 * MB)  # of the process: logits
    needed = ON_GPU.total(4096, 2)
    check_growth(on_gpu, (1, 4096), (2, 4096), needed)
    with pytest.raises(ResourceError) as refused:
        check_growth(on_gpu, (1, 4096), (2, 4096), needed - 1)
    assert "cache for 4096 tokens in 2 row(s) the model takes 733 MB of the GPU's memory, 733 MB may" in str(
        refused.value
    )
    check_growth(on_gpu, (1, 4096), (2, 4096), None)
    check_growth(replace(on_gpu, device=None), (1, 256), (2, 256), 0)  # run on the CPU, to check it


@pytest.mark.parametrize(
    ("process", "gpu", "lacking"), [(0, 0, ""), (-1, 0, "MB are"), (0, -1, "MB of the GPU's memory")]
)
def test_a_budget_holds_both_memories_and_names_the_one_that_lacks(on_gpu, process, gpu, lacking):
    others = 7 * MB
    memory, device = on_gpu.memory.total(256, 2) + others + process, ON_GPU.total(4096, 2) + gpu
    budget = CacheBudget(on_gpu, memory, others, device)
    assert budget.fits(256, 2) == (not lacking)
    assert budget.fits(256, 1)
    if lacking:
        assert f"{(device if gpu else memory) // MB} MB may be taken" in str(budget.refusal(256, 2))
        assert lacking in str(budget.refusal(256, 2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"threads": 0}, "threads is 0, expected an integer from 1 to 1024"),
        ({"threads": True}, "threads is True, expected an integer from 1 to 1024"),
        ({"max_context": 2049}, "max_context is 2049, expected an integer from 1 to 2048"),
        (
            {"prefill_chunk": 257},
            "prefill_chunk is 257, expected an integer from 1 to 256",
        ),  # the plan has no room for its scores
    ],
)
@pytest.mark.usefixtures("unopened")
def test_an_argument_out_of_range_is_refused(tiny_bundle, arguments, expected):
    with pytest.raises(UsageError) as refused:
        load(tiny_bundle, **arguments)
    assert expected in str(refused.value)


@pytest.mark.usefixtures("unopened")
def test_not_enough_memory_is_refused_before_the_engine_opens_anything(tiny_bundle, monkeypatch):
    available(monkeypatch, 1 * MB)
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (0, 0))
    with pytest.raises(ResourceError, match=r"to run it needs .* 1 MB are available, .* MB are missing; no context"):
        load(tiny_bundle)
    available(monkeypatch, 1000 * MB)
    with pytest.raises(ResourceError, match=r" 2 MB are available"):
        load(tiny_bundle, max_context=100, memory=2 * MB)


def test_a_given_memory_lowers_a_context_that_nobody_asked_for_and_says_so(tiny_bundle, caplog):
    memory = plan_load(read_bundle(tiny_bundle), 256).total
    with load(tiny_bundle, memory=memory, threads=1) as model:
        assert model.engine.max_context == 256
    assert "hold a context of 256 tokens, not of 2048" in caplog.text
    with pytest.raises(ResourceError, match="a context of 256 tokens fits"):
        load(tiny_bundle, memory=memory, max_context=2048)
