"""``llmc verify`` and ``llmc bench``: one call with the same names, and a report for people or programs."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.runtime.bench.benchmark import BenchmarkReport
from llmc.runtime.bench.load_test import LoadReport, Percentiles
from llmc.runtime.selftest import VerifyReport

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
LOAD = LoadReport(
    **COMMON,
    concurrency=8,
    max_queue=256,
    rate=20.0,
    arrival_seed=0,
    requests=40,
    determinism="fast",
    draft="lookup",
    load_s=0.25,
    arrived_rate=17.26,
    completed=37,
    rejected=2,
    failed=1,
    failure="the deadline passed",
    duration_s=3.25,
    achieved_rate=11.38,
    output_tokens_per_s=728.6,
    total_tokens_per_s=2185.8,
    ttft=Percentiles(0.001, 0.002, 0.003),
    tpot=Percentiles(0.004, 0.005, 0.006),
    itl=Percentiles(0.007, 0.008, 0.009),
    e2e=Percentiles(0.010, 0.011, 0.012),
    queue=Percentiles(0.013, 0.014, 0.015),
    draft_acceptance=0.75,
    rss_peak_bytes=144_300_000,
)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def load_test(bundle: Path, **options: Any) -> LoadReport:
        calls.append({"bundle": bundle, **options})
        return LOAD

    monkeypatch.setattr("llmc.runtime.bench.load_test.load_test", load_test)
    return calls


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def benchmark(bundle: Path, **options: Any) -> BenchmarkReport:
        calls.append({"bundle": bundle, **options})
        return BENCHMARK

    monkeypatch.setattr("llmc.runtime.bench.benchmark.benchmark", benchmark)
    return calls


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def verify(bundle: Path, **options: Any) -> VerifyReport:
        options.pop("progress")("hashed weights.bin")
        calls.append({"bundle": bundle, **options})
        return VerifyReport(files=6, prompts=4, tokens=64, equal_tokens=63, largest_difference=9.5e-7)

    monkeypatch.setattr("llmc.runtime.model.verify", verify)
    generates = SimpleNamespace(geometry=SimpleNamespace(encoder=None))
    monkeypatch.setattr("llmc.cli.verify.read_bundle", lambda _: generates)
    return calls


def test_bench_passes_its_options_on_and_shows_latencies_speeds_memory_and_roofline(llmc, benchmarks, tmp_path: Path):
    out = llmc("bench", tmp_path).out
    for text in ("17.95 ms p50", "4.37 ms p95", "7132.4 tok/s", "84.3 MB loaded", "33.45 GB/s", "29%", "1.31.1"):
        assert text in out
    options = ("--prompt-length", 512, "--new-tokens", 16, "--repeats", 5, "--threads", 1)
    assert json.loads(llmc("bench", tmp_path, *options, "--json").out) == vars(BENCHMARK)
    assert benchmarks == [
        {"bundle": tmp_path, "prompt_length": 128, "new_tokens": 64, "repeats": 3, "threads": None},
        {"bundle": tmp_path, "prompt_length": 512, "new_tokens": 16, "repeats": 5, "threads": 1},
    ]


def test_bench_under_load_passes_on_what_was_given_and_shows_every_figure(llmc, loads, tmp_path: Path):
    given = {"max_queue": 5, "requests": 9, "seed": 3, "draft": "lookup", "determinism": "strict", "rate": 2.5}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert json.loads(llmc("bench", tmp_path, *options, "--json").out) == dataclasses.asdict(LOAD)
    assert loads == [{"bundle": tmp_path, "prompt_length": 128, "new_tokens": 64, "threads": None, **given}]
    out = llmc("bench", tmp_path, "--concurrency", 4).out
    for text in (
        "1.00 ms p50, 2.00 ms p95, 3.00 ms p99",
        "4.00 ms p50",
        "7.00 ms p50",
        "12.00 ms p99",
        "14.00 ms p95",
        "20 per second, seed 0, which gave 17.26 per second",
        "37 completed, 2 rejected by a full queue, 1 failed: the deadline passed",
        "of the 37 that completed",
        "728.6 new tok/s, 2185.8 with prompts",
        "11.38 per second, for 3.2 s",
        "8 rows, a queue of 256, determinism fast, draft lookup",
        "75%",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--draft", "lookup"], "--draft is for the engine under load: give --concurrency or --rate too"),
        (["--rate", 3, "--repeats", 3], "--repeats is for one sequence; under load, say --requests"),
        (["--repeats", 0], "Invalid value for '--repeats': 0 is not in the range x>=1; see llmc bench --help"),
    ],
)
def test_bench_refuses_what_cannot_be_and_options_of_its_other_half(
    llmc, benchmarks: list, loads: list, tmp_path: Path, arguments: list[object], sentence: str
):
    ran = llmc("bench", tmp_path, *arguments)
    assert (ran.code, ran.err, benchmarks, loads) == (2, f"llmc: error: {sentence}\n", [], [])


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
