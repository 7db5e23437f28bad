"""The exposition, read back by prometheus-client's own parser."""

import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llmc.errors import MissingExtraError
from llmc.runtime.observe.metrics import EngineMetrics, EngineSnapshot, Gauges, Histogram
from llmc.runtime.observe.prometheus import EngineCollector


@pytest.fixture
def metrics() -> EngineMetrics:
    """One of everything, no two numbers alike."""
    now = [100.0]
    engine = EngineMetrics(lambda: now[0])
    timeline, cancelled = engine.timeline(50), engine.timeline(3)
    now[0] = 100.004
    timeline.admit(cached_tokens=16)
    for i in range(12):
        now[0] = 100.1 + i * 0.02
        timeline.token()
    timeline.draft(9, 5)
    timeline.overflow()
    timeline.overflow()
    now[0] = 101.0
    cancelled.finish("cancelled")
    now[0] = 3100.0
    timeline.finish("stop")
    engine.count({}, "refused")
    engine.step("prefill", 0.09, 1)
    engine.step("decode", 0.02, 7)
    gauges = Gauges(waiting=3, running=2, kv_reserved_bytes=1 << 40, kv_used_bytes=1023, prefix_cache_bytes=511)
    engine.read_gauges = lambda: gauges
    return engine


def exposition(metrics: EngineMetrics, labels: dict[str, str] | None = None) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(metrics, labels))
    return generate_latest(registry).decode()


def parsed(text: str) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text))
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families)
    return by_name


def values(family: Metric, suffix: str = "") -> dict[tuple[str, ...], float]:
    samples = [sample for sample in family.samples if sample.name == family.name + suffix]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def histogram(family: Metric, *labels: str) -> tuple[tuple[float, ...], tuple[int, ...], float, float]:
    """Bounds, cumulative counts, count and sum."""
    samples = [(dict(sample.labels), sample.value) for sample in family.samples if sample.name.endswith("_bucket")]
    pairs = [(float(names.pop("le")), value, tuple(names.values())) for names, value in samples]
    buckets = {bound: value for bound, value, others in pairs if others == labels}
    assert list(buckets)[-1] == float("inf")
    return tuple(buckets), tuple(buckets.values()), values(family, "_count")[labels], values(family, "_sum")[labels]


def expected(snapshot: Histogram) -> tuple[tuple[float, ...], tuple[int, ...], float, float]:
    return (*snapshot.bounds, float("inf")), snapshot.cumulative, snapshot.count, snapshot.sum


def differences(text: str, snapshot: EngineSnapshot) -> list[str]:
    """Names whose samples are not the snapshot's."""
    families = parsed(text)
    gauges = snapshot.gauges
    counters = {
        "llmc_prompt_tokens": snapshot.prompt_tokens,
        "llmc_generation_tokens": snapshot.output_tokens,
        "llmc_prefix_cache_hit_tokens": snapshot.prefix_hit_tokens,
        "llmc_prefix_cache_miss_tokens": snapshot.prefix_miss_tokens,
        "llmc_spec_decode_draft_tokens": snapshot.draft_proposed,
        "llmc_spec_decode_accepted_tokens": snapshot.draft_accepted,
        "llmc_context_overflows": snapshot.overflows,
    }
    levels = {
        "llmc_num_requests_waiting": gauges.waiting,
        "llmc_num_requests_running": gauges.running,
        "llmc_kv_cache_reserved_bytes": gauges.kv_reserved_bytes,
        "llmc_kv_cache_used_bytes": gauges.kv_used_bytes,
        "llmc_prefix_cache_bytes": gauges.prefix_cache_bytes,
    }
    histograms = {
        "llmc_time_to_first_token_seconds": snapshot.ttft,
        "llmc_request_time_per_output_token_seconds": snapshot.tpot,
        "llmc_inter_token_latency_seconds": snapshot.itl,
        "llmc_e2e_request_latency_seconds": snapshot.e2e,
        "llmc_request_queue_time_seconds": snapshot.queue,
        "llmc_step_batch_size": snapshot.batch_size,
    }
    steps = families.pop("llmc_step_duration_seconds")
    requests = families.pop("llmc_requests")
    same = {name: values(families.pop(name), "_total") == {(): value} for name, value in counters.items()}
    same |= {name: values(families.pop(name)) == {(): value} for name, value in levels.items()}
    same |= {name: histogram(families.pop(name)) == expected(value) for name, value in histograms.items()}
    same |= {f"step {name}": histogram(steps, name) == expected(step) for name, step in snapshot.step.items()}
    same |= {"requests": values(requests, "_total") == {(key,): n for key, n in snapshot.requests.items()}}
    return [*(name for name, equal in same.items() if not equal), *families]


def test_every_number_is_read_back_and_nothing_else(metrics):
    assert differences(exposition(metrics), metrics.snapshot()) == []


def test_a_number_that_is_off_by_one_is_noticed(metrics):
    text, snapshot = exposition(metrics), metrics.snapshot()
    itl = replace(snapshot.itl, counts=(1, *snapshot.itl.counts[1:]))
    wrong = replace(
        snapshot, itl=itl, prompt_tokens=51, gauges=replace(snapshot.gauges, kv_reserved_bytes=(1 << 40) + 1)
    )
    assert differences(text, wrong) == [
        "llmc_prompt_tokens", "llmc_kv_cache_reserved_bytes", "llmc_inter_token_latency_seconds"
    ]  # fmt: skip


def test_an_idle_engine_lists_everything_at_zero(metrics):
    idle, busy = parsed(exposition(EngineMetrics())), parsed(exposition(metrics))
    assert set(busy) == set(idle)
    assert {sample.value for family in idle.values() for sample in family.samples} == {0.0}
    assert len(values(idle["llmc_requests"], "_total")) == 6


def test_labels_are_on_every_sample_and_escaped(metrics):
    label = 'a "model" \\ of\nmine'
    for family in parsed(exposition(metrics, {"model_name": label})).values():
        assert {sample.labels["model_name"] for sample in family.samples} == {label}


def test_without_prometheus_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingExtraError, match="pip install 'prometheus-client"):
        exposition(EngineMetrics())
