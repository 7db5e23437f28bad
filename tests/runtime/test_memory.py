"""Loading and growing: arguments, the bundle and memory are checked first, and what is refused names the numbers."""

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from llmc.bundle import MemoryPlan, read_bundle, write_manifest
from llmc.errors import BundleError, ResourceError, UsageError
from llmc.runtime import load
from llmc.runtime.memory import check_growth, check_load
from llmc.runtime.sessions import onnxruntime

MB = 1_000_000
PLAN = MemoryPlan(weights=100 * MB, cache_per_token=10_000, workspace=20 * MB, workspace_per_token=2_000)


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
    monkeypatch.setattr("llmc.runtime.memory.available_memory", lambda: size)


# ------------------------------------------------------------------------------------------------------------ the plan


def test_what_fits_exactly_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    available(monkeypatch, PLAN.total(1000))
    check_load(tmp_path, PLAN, 1000)


def test_a_bundle_that_does_not_fit_is_refused_with_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    available(monkeypatch, 126 * MB)
    with pytest.raises(ResourceError) as refused:
        check_load(tmp_path, PLAN, 1000)
    assert str(refused.value) == (
        f"{tmp_path} needs 132 MB (100 weights, 10 cache for 1000 tokens, 22 workspace), 126 MB are available; at most "
        "500 tokens of context fit: free memory, lower --max-context or build a smaller precision"
    )
    check_load(tmp_path, PLAN, 500)


@pytest.mark.parametrize("size", [0, 100 * MB, 120 * MB])
def test_no_context_is_promised_where_the_weights_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
):
    available(monkeypatch, size)
    with pytest.raises(ResourceError, match=f"{size // MB} MB are available; not even the weights fit"):
        check_load(tmp_path, PLAN, 256)


def test_growth_counts_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    available(monkeypatch, 12 * MB)
    check_growth(PLAN, 1000, 2000)
    available(monkeypatch, 12 * MB - 1)
    with pytest.raises(ResourceError, match="cache for 2000 tokens needs 12 MB more, 11 MB are available; free memory"):
        check_growth(PLAN, 1000, 2000)


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
    for folder in (tmp_path / "nowhere", tmp_path, tiny_checkpoint, tiny_checkpoint / "config.json"):
        with pytest.raises(BundleError, match=r"no llmc.json here, .* make it with: llmc build"):
            load(folder)


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
    with pytest.raises(ResourceError, match=r"cache for 256 tokens, .* 1 MB are available"):
        load(tiny_bundle)
    with pytest.raises(ResourceError, match=r"cache for 100 tokens, .* 1 MB are available"):
        load(tiny_bundle, max_context=100)


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
            stream.finish()
        assert len(stream.token_ids) == 7  # positions 250 ... 255, and the token that found no room after it was chosen
        assert model.engine.session.capacity == 256
        assert model.generate(short, max_tokens=8, temperature=0).token_ids == want


def test_memory_that_ends_while_the_cache_grows_leaves_the_model_usable(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = count()

    def zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
        if next(calls) == 3:
            raise MemoryError
        return np.zeros(shape, dtype)

    short, long = ([token % 4000 + 10 for token in range(length)] for length in (20, 1100))
    with load(tiny_bundle, threads=1) as model:
        want = model.generate(short, max_tokens=8, temperature=0).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(onnxruntime, "np", SimpleNamespace(**{**vars(np), "zeros": zeros}))
            with pytest.raises(ResourceError, match="growing the cache ran out of memory"):
                model.generate(long, max_tokens=8)
        assert model.engine.session.capacity == 256
        assert model.generate(short, max_tokens=8, temperature=0).token_ids == want
        # A smaller growth than the one that failed halfway.
        assert model.generate(long[:300], max_tokens=8, temperature=0).usage.prompt_tokens == 300
