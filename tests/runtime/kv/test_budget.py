"""Loading and growing: arguments, the bundle and memory are checked first, and what is refused names the numbers."""

import errno
import mmap
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.bundle import (
    DeviceMemory,
    EngineConfig,
    Limits,
    Manifest,
    MemoryPlan,
    Profile,
    read_bundle,
    write_manifest,
)
from llmc.errors import BundleError, ResourceError, UsageError
from llmc.runtime import load
from llmc.runtime.kv import host_cache
from llmc.runtime.kv.budget import (
    CacheBudget,
    MemoryEstimate,
    check_growth,
    check_load,
    device_bytes,
    plan_load,
    plan_run,
    usable_memory,
)

MB = 1_000_000
LIMITS = Limits(max_context=8192, max_batch=4, prefill_chunk=256)
PLAN = MemoryPlan(
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

    monkeypatch.setattr("llmc.runtime.model.open_session", refuse)
    monkeypatch.setattr("llmc.runtime.model.Tokenizer.from_folder", refuse)


@pytest.fixture
def copied_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("llmc.runtime.kv.budget.available_memory", lambda: size)


# ------------------------------------------------------------------------------------------------------------ the plan


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


def test_what_fits_exactly_fits_and_a_byte_less_does_not(tmp_path: Path):
    plan = run(1024, 2)
    plan.check(tmp_path, plan.total)
    assert plan.verdict(plan.total).fits
    with pytest.raises(ResourceError):
        plan.check(tmp_path, plan.total - 1)
    assert plan.verdict(plan.total - 1).missing == 1


def test_a_refusal_names_every_number_and_what_would_fit(tmp_path: Path):
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
def test_the_largest_context_and_batch_fit_and_the_next_do_not(context: int, batch: int, spare: int):
    available = 200 * MB + spare
    verdict = run(context, batch).verdict(available)
    for n, limit, plan in (
        (verdict.largest_context, LIMITS.max_context, lambda n: run(n, batch)),
        (verdict.largest_batch, LIMITS.max_batch, lambda n: run(context, n)),
    ):
        assert n == 0 or plan(n).total <= available
        assert n == limit or plan(n + 1).total > available
    assert verdict.fits == (run(context, batch).total <= available)


@pytest.mark.parametrize("size", [1, 100 * MB, FIXED])
def test_nothing_is_promised_where_not_even_one_step_fits(tmp_path: Path, size: int):
    with pytest.raises(ResourceError, match="no context or batch is small enough: free memory or use a smaller"):
        run(256).check(tmp_path, size)


def test_loading_needs_the_first_step_only_unless_memory_is_promised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manifest: Manifest
):
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


def test_what_this_process_holds_already_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch):
    available(monkeypatch, 100 * MB)
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (40 * MB, 50 * MB))
    assert usable_memory(60 * MB) == 140 * MB
    assert usable_memory(30 * MB) == 130 * MB
    assert usable_memory(60 * MB, memory=1 * MB) == 1 * MB


def test_growth_counts_only_what_is_new(monkeypatch: pytest.MonkeyPatch, manifest: Manifest):
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
ON_GPU = DeviceMemory(context=500 * MB, weights=100 * MB, workspace=50 * MB, cache_per_token=10_000, logits=1 * MB)
ENGINE = EngineConfig(
    file="engine.plan",
    compute="float16",
    buckets=(256, 1024, 4096),
    decode=Profile(8, 1, 1),
    prefill=Profile(1, 256, 8),
    select="",
    candidates=0,
    platform="linux-x86_64",
    compute_capabilities=("8.7",),
    version_compatible=False,
    hardware_compatibility="none",
    stripped=False,
    verified="cpu",
)


@pytest.fixture
def on_gpu(manifest: Manifest) -> Manifest:
    memory = replace(PLAN, weights=0, embedding=0, workspace=0, workspace_per_token=0, cache_per_token=0)
    return replace(manifest, memory=memory, engine=ENGINE, device=ON_GPU)


@pytest.mark.parametrize(
    ("engine", "asked", "positions"),
    [
        (None, 300, 300),
        (ENGINE, 300, 4096),
    ],
)
def test_the_gpu_holds_as_many_positions_as_the_engine_makes_room_for(
    on_gpu: Manifest, engine: EngineConfig | None, asked: int, positions: int
):
    planned = replace(on_gpu, engine=engine)
    assert device_bytes(planned, asked, 3) == ON_GPU.total(positions, 3)
    assert device_bytes(replace(planned, device=None), asked, 3) == 0


def test_a_cache_on_a_gpu_is_held_against_the_gpus_memory(monkeypatch: pytest.MonkeyPatch, on_gpu: Manifest):
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
def test_a_budget_holds_both_memories_and_names_the_one_that_lacks(
    on_gpu: Manifest, process: int, gpu: int, lacking: str
):
    others = 7 * MB
    memory, device = on_gpu.memory.total(256, 2) + others + process, ON_GPU.total(4096, 2) + gpu
    budget = CacheBudget(on_gpu, memory, others, device)
    assert budget.fits(256, 2) == (not lacking)
    assert budget.fits(256, 1)
    if lacking:
        assert f"{(device if gpu else memory) // MB} MB may be taken" in str(budget.refusal(256, 2))
        assert lacking in str(budget.refusal(256, 2))


# ------------------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"threads": 0}, "threads is 0, expected 1 ... 1024"),
        ({"threads": 1025}, "threads is 1025, expected 1 ... 1024"),
        ({"threads": True}, "threads is True, expected 1 ... 1024"),
        ({"threads": 1.5}, "threads is 1.5, expected 1 ... 1024"),
        ({"threads": "2"}, "threads is '2', expected 1 ... 1024"),
        ({"max_context": 0}, "max_context is 0, expected 1 ... 2048"),
        ({"max_context": 2049}, "max_context is 2049, expected 1 ... 2048"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1, expected 1 ... 256"),
        ({"prefill_chunk": 257}, "prefill_chunk is 257, expected 1 ... 256"),  # the plan has no room for its scores
    ],
)
@pytest.mark.usefixtures("unopened")
def test_an_argument_out_of_range_is_refused(tiny_bundle: Path, arguments: dict[str, Any], expected: str):
    with pytest.raises(UsageError) as refused:
        load(tiny_bundle, **arguments)
    assert expected in str(refused.value)


@pytest.mark.usefixtures("unopened")
def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path, tiny_checkpoint: Path):
    for folder in (tmp_path, tiny_checkpoint / "config.json"):
        with pytest.raises(BundleError, match=r"no llmc.json here, .* make it with: llmc build"):
            load(folder)
    with pytest.raises(BundleError, match=r"there is no such folder, expected a bundle; build one with: llmc build"):
        load(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"is a checkpoint, expected a bundle; build one with: llmc build"):
        load(tiny_checkpoint)


@pytest.mark.parametrize("file", ["weights.bin", "prefill.onnx", "decode.onnx", "tokenizer.json"])
@pytest.mark.usefixtures("unopened")
def test_a_truncated_or_missing_file_is_refused_with_both_sizes(copied_bundle: Path, file: str):
    path = copied_bundle / file
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=f"{file} has {size - 1} bytes, {size} expected; copy or build"):
        load(copied_bundle)
    path.unlink()
    with pytest.raises(BundleError, match=f"{file} is missing, {size} expected; copy or build"):
        load(copied_bundle)


@pytest.mark.usefixtures("unopened")
def test_a_bundle_newer_than_the_runtime_is_refused(copied_bundle: Path):
    manifest = read_bundle(copied_bundle)
    write_manifest(replace(manifest, schema_version=99, llmc_version="9.0"), copied_bundle)
    with pytest.raises(BundleError, match=r"schema version 99, written by llmc 9\.0; .*: upgrade it with pip install"):
        load(copied_bundle)


@pytest.mark.usefixtures("unopened")
def test_not_enough_memory_is_refused_before_the_engine_opens_anything(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    available(monkeypatch, 1 * MB)
    monkeypatch.setattr("llmc.runtime.kv.budget.resident_bytes", lambda: (0, 0))
    with pytest.raises(ResourceError, match=r"to run it needs .* 1 MB are available, .* MB are missing; no context"):
        load(tiny_bundle)
    available(monkeypatch, 1000 * MB)
    with pytest.raises(ResourceError, match=r" 2 MB are available"):
        load(tiny_bundle, max_context=100, memory=2 * MB)


def test_a_given_memory_lowers_a_context_that_nobody_asked_for_and_says_so(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
):
    memory = plan_load(read_bundle(tiny_bundle), 256).total
    with load(tiny_bundle, memory=memory, threads=1) as model:
        assert model.engine.max_context == 256
    assert "hold a context of 256 tokens, not of 2048" in caplog.text
    with pytest.raises(ResourceError, match="a context of 256 tokens fits"):
        load(tiny_bundle, memory=memory, max_context=2048)


def test_growth_refused_before_and_in_the_middle_of_a_stream_leaves_the_model_usable(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    short, middle, long = ([token % 4000 + 10 for token in range(length)] for length in (20, 250, 300))
    with load(tiny_bundle, threads=1) as model:
        want = model.generate(short, max_tokens=8, temperature=0).token_ids
        available(monkeypatch, 1000)
        with pytest.raises(ResourceError, match=r"the cache for 512 tokens needs .* free memory"):
            model.generate(long, max_tokens=8)
        stream = model.stream(middle, max_tokens=20, temperature=0, ignore_eos=True)
        with pytest.raises(ResourceError, match="the cache for 512 tokens needs"):
            list(stream)
        assert len(stream.token_ids) == 7  # positions 250 ... 255, and the token that found no room after it was chosen
        assert model.runner.session.cache.capacity == 256
        assert model.generate(short, max_tokens=8, temperature=0).token_ids == want


def test_memory_that_ends_while_the_cache_grows_leaves_the_model_usable(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = count()

    def pages(*arguments: int, **options: int) -> mmap.mmap:
        if next(calls) == 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mmap.mmap(*arguments, **options)

    short, long = ([token % 4000 + 10 for token in range(length)] for length in (20, 1100))
    with load(tiny_bundle, threads=1) as model:
        want = model.generate(short, max_tokens=8, temperature=0).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(host_cache, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": pages}))
            with pytest.raises(ResourceError, match="growing the cache ran out of memory"):
                model.generate(long, max_tokens=8)
        assert model.runner.session.cache.capacity == 256
        assert model.generate(short, max_tokens=8, temperature=0).token_ids == want
        # A smaller growth than the one that failed halfway.
        assert model.generate(long[:300], max_tokens=8, temperature=0).usage.prompt_tokens == 300
