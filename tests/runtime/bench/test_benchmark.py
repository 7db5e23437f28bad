"""The benchmark's figures follow from what it timed, and its arguments are checked before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.plans import plan_of

from llmc import __version__
from llmc.bundle import read_bundle
from llmc.errors import BundleError, GpuError, ResourceError, UsageError
from llmc.runtime import Model, load
from llmc.runtime.bench import benchmark as module
from llmc.runtime.bench.benchmark import BenchmarkReport, benchmark

DEVICE = plan_of(context=0, weights=0, workspace=0, cache_per_token=1, logits=0)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth loop reads 1 MiB instead of 256."""
    monkeypatch.setattr(module, "BYTES_PER_THREAD", 1 << 20)


@pytest.fixture(scope="module")
def report(tiny_bundle: Path) -> BenchmarkReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BYTES_PER_THREAD", 1 << 20)
        return benchmark(tiny_bundle, prompt_length=20, new_tokens=8, repeats=2, threads=1)


def test_the_report_says_what_was_run_and_where(tiny_bundle, report):
    manifest = read_bundle(tiny_bundle)
    assert (report.bundle, report.model, report.precision) == (str(tiny_bundle), manifest.source.name, "int8")
    assert (report.prompt_length, report.new_tokens, report.repeats, report.threads) == (20, 8, 2, 1)
    assert (report.llmc_version, report.engine) == (__version__, "onnxruntime")
    assert all((report.engine_version, report.python_version, report.cpu))
    assert report.weight_bytes_per_token == manifest.graphs["decode"].step_weight_bytes
    assert 0 < report.load_s < 60
    assert 0 < report.ttft_p50_s <= report.ttft_p95_s
    assert 1 << 20 < report.rss_after_load_bytes <= report.rss_peak_bytes
    assert report.copy_bandwidth is None
    assert 0 < report.roofline_fraction <= 1


def test_the_figures_follow_from_the_times(tiny_bundle, monkeypatch):
    """The first of four runs is not counted, and memory is so slow that the fastest step sets the limit."""
    timed: list[tuple[int, int, int]] = []
    runs = iter([(9.0, [9.0]), (0.5, [0.01, 0.02]), (0.1, [0.03, 0.04]), (0.2, [0.05, 0.06])])

    def time_request(model: Any, prompt_length: int, new_tokens: int, index: int) -> tuple[float, list[float]]:
        timed.append((prompt_length, new_tokens, index))
        return next(runs)

    monkeypatch.setattr(module, "_time_request", time_request)
    monkeypatch.setattr(module, "read_bandwidth", lambda threads: 1.0)
    report = benchmark(tiny_bundle, prompt_length=10, new_tokens=3, repeats=3, threads=1)
    assert timed == [(10, 2, 0), (10, 3, 1), (10, 3, 2), (10, 3, 3)]
    assert (report.ttft_p50_s, report.ttft_p95_s) == pytest.approx((0.2, 0.47))
    assert (report.tpot_p50_s, report.tpot_p95_s) == pytest.approx((0.035, 0.0575))
    assert (report.prefill_tokens_per_s, report.decode_tokens_per_s) == pytest.approx((50, 6 / 0.21))
    assert report.read_bandwidth == pytest.approx(report.weight_bytes_per_token / 0.01)
    assert report.roofline_fraction == pytest.approx(0.01 / 0.035)


class Copies:
    """A driver that knows how fast it copies, or why it cannot say."""

    def __init__(self, answer: float | Exception) -> None:
        self.answer, self.closed = answer, False

    def copy_bandwidth(self) -> float:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("answer", [4e9, ResourceError("256 MB are free"), GpuError("waiting failed")], ids=str)
def test_a_bundle_on_a_gpu_is_measured_by_the_gpus_memory(tiny_bundle, monkeypatch, caplog, answer):
    """The bundle runs on the CPU and says that it has a GPU; the host's memory is not read."""
    driver = Copies(answer)

    def load_on_gpu(folder: Path, **options: Any) -> Model:
        model = load(folder, **options)
        model.manifest = replace(model.manifest, device=DEVICE)
        return model

    monkeypatch.setattr(module, "load", load_on_gpu)
    monkeypatch.setattr(module, "_time_request", lambda *_: (0.5, [0.01, 0.02, 0.03]))
    monkeypatch.setattr(module, "open_driver", lambda: driver)
    monkeypatch.delattr(module, "read_bandwidth")
    report = benchmark(tiny_bundle, prompt_length=10, new_tokens=3, repeats=1, threads=1)
    assert report.read_bandwidth is None
    assert driver.closed
    if isinstance(answer, Exception):
        assert (report.copy_bandwidth, report.roofline_fraction) == (None, None)
        assert f"the GPU's copy bandwidth was not measured: {answer}" in caplog.text
    else:
        assert report.copy_bandwidth == answer
        assert report.roofline_fraction == pytest.approx(report.weight_bytes_per_token / 0.02 / answer)


def test_no_prompt_comes_from_the_prefix_cache(tiny_bundle):
    with load(tiny_bundle, self_test=False) as model:
        for index in range(2):
            module._time_request(model, 200, 4, index)
        assert model.engine.metrics.snapshot().prefix_hit_tokens == 0


def test_an_argument_out_of_range_is_refused(tiny_bundle, tmp_path):
    for arguments in ({"prompt_length": 0}, {"new_tokens": 1}, {"repeats": 0}, {"new_tokens": 1921}):
        ((name, value),) = arguments.items()
        with pytest.raises(UsageError, match=rf"{name} (is )?{value}.*, expected at least .* 2048 tokens"):
            benchmark(tiny_bundle, **arguments)
    with pytest.raises(BundleError, match="llmc build"):
        benchmark(tmp_path)
