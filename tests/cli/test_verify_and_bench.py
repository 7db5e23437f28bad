"""``llmc verify`` and ``llmc bench``: one call with the same names, and a report for people or programs."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.cli.bench import benchmark_rows
from llmc.runtime.bench.benchmark import BenchmarkReport
from llmc.runtime.selftest.values import VerifyReport

COMMON: dict[str, Any] = {
    "bundle": "b",
    "model": "tiny",
    "precision": "int4",
    "prompt_length": 128,
    "new_tokens": 64,
    "threads": 2,
    "llmc_version": "0.1.0",
    "engine": "onnxruntime",
    "engine_version": "1.31.1",
    "python_version": "3.11.7",
    "cpu": "a processor",
}
BENCHMARK = BenchmarkReport(
    **COMMON,
    repeats=3,
    load_s=0.16,
    ttft_p50_s=0.01795,
    ttft_p95_s=0.01945,
    tpot_p50_s=0.00032,
    tpot_p95_s=0.00437,
    prefill_tokens_per_s=7132.4,
    decode_tokens_per_s=3166.7,
    rss_after_load_bytes=84_300_000,
    rss_peak_bytes=120_000_000,
    weight_bytes_per_token=3_100_000,
    read_bandwidth=33.45e9,
    roofline_fraction=0.29,
)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def benchmark(bundle: Path, **options: Any) -> BenchmarkReport:
        calls.append({"bundle": bundle, **options})
        return BENCHMARK

    monkeypatch.setattr("llmc.runtime.bench.benchmark.benchmark", benchmark)
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    return calls


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def verify(bundle: Path, **options: Any) -> VerifyReport:
        options.pop("progress")("hashed weights.bin")
        calls.append({"bundle": bundle, **options})
        return VerifyReport(files=6, prompts=4, tokens=64, equal_tokens=63, largest_difference=9.5e-7)

    monkeypatch.setattr("llmc.runtime.loading.verify", verify)
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    generates = SimpleNamespace(geometry=SimpleNamespace(encoder=None))
    monkeypatch.setattr("llmc.cli.verify.read_bundle", lambda _: generates)
    return calls


def test_bench_passes_its_options_on_and_shows_latencies_speeds_memory_and_roofline(llmc, benchmarks, tmp_path: Path):
    out = llmc("bench", tmp_path).out
    for text in ("17.95 ms p50", "4.37 ms p95", "7132.4 tok/s", "84.3 MB loaded", "33.45 GB/s", "29%", "1.31.1"):
        assert text in out
    options = ("--prompt-length", 512, "--new-tokens", 16, "--repeats", 5, "--threads", 1)
    assert json.loads(llmc("bench", tmp_path, *options, "--json").out) == vars(BENCHMARK)
    on_gpu = replace(BENCHMARK, read_bandwidth=None, copy_bandwidth=2.5e12)
    assert dict(benchmark_rows(on_gpu))["GPU copy bandwidth"] == "2500.00 GB/s"
    unmeasured = replace(on_gpu, copy_bandwidth=None, roofline_fraction=None)
    assert benchmark_rows(unmeasured)[-1] == ("GPU copy bandwidth", "not measured")
    assert benchmarks == [
        {"bundle": tmp_path, "prompt_length": 128, "new_tokens": 64, "repeats": 3, "threads": None},
        {"bundle": tmp_path, "prompt_length": 512, "new_tokens": 16, "repeats": 5, "threads": 1},
    ]


def test_verify_passes_its_options_on_and_says_sound(llmc, verifications: list[dict[str, Any]], tmp_path: Path):
    ran = llmc("verify", tmp_path, "--threads", 2)
    assert verifications == [{"bundle": tmp_path, "threads": 2, "emulate": False}]
    assert "63 of 64" in ran.out and ran.out.endswith(f"{tmp_path} is sound\n")
    report = json.loads(llmc("verify", tmp_path, "--json").out)
    assert report == {
        "files": 6,
        "prompts": 4,
        "tokens": 64,
        "equal_tokens": 63,
        "largest_difference": 9.5e-7,
        "unlisted": [],
    }
