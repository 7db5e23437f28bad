"""An engine's metrics in the text format of Prometheus, through prometheus-client (extra ``metrics``).

Names follow vLLM's (https://docs.vllm.ai/en/latest/design/metrics.html) with ``llmc_`` in front, units are base units
and end the name (https://prometheus.io/docs/practices/naming/). ``exposition`` answers a scrape; an application with a
registry of its own registers an :class:`EngineCollector`.
"""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from llmc.errors import require
from llmc.runtime.observe.histogram import HistogramSnapshot
from llmc.runtime.observe.metrics import EngineMetrics, EngineSnapshot

# What a server answers a scrape with.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Name (prometheus-client appends _total), field of the snapshot, help.
_COUNTERS = (
    ("llmc_prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("llmc_generation_tokens", "output_tokens", "Tokens generated."),
    ("llmc_prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens taken from the prefix cache."),
    ("llmc_prefix_cache_miss_tokens", "prefix_miss_tokens", "Prompt tokens that had to be computed."),
    ("llmc_spec_decode_draft_tokens", "draft_proposed", "Tokens proposed by speculation."),
    ("llmc_spec_decode_accepted_tokens", "draft_accepted", "Proposed tokens that the model agreed with."),
    ("llmc_context_overflows", "overflows", "Contexts that were cut, as their requests' policy allows."),
)
_GAUGES = (
    ("llmc_num_requests_waiting", "waiting", "Requests in the queue."),
    ("llmc_num_requests_running", "running", "Requests that hold a place in the batch."),
    ("llmc_kv_cache_reserved_bytes", "kv_reserved_bytes", "Memory taken by the KV cache."),
    ("llmc_kv_cache_used_bytes", "kv_used_bytes", "Memory of the KV cache that valid positions fill."),
    ("llmc_prefix_cache_bytes", "prefix_cache_bytes", "Memory held by the prefix cache."),
)
_HISTOGRAMS = (
    ("llmc_time_to_first_token_seconds", "ttft", "Time from submission to the first token."),
    ("llmc_request_time_per_output_token_seconds", "tpot", "Mean time between the tokens of a finished request."),
    ("llmc_inter_token_latency_seconds", "itl", "Time between two tokens of a request; 0 within one step."),
    ("llmc_e2e_request_latency_seconds", "e2e", "Time from submission to the end of a request."),
    ("llmc_request_queue_time_seconds", "queue", "Time from submission to admission."),
    ("llmc_step_batch_size", "batch_size", "Rows of a call of the session."),
)


def exposition(metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> str:
    """All metrics of an engine as text, to be sent as CONTENT_TYPE.

    Args:
        labels: put on every sample, such as ``{"model_name": "tiny"}``.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """
    client = require("prometheus_client", "metrics")
    registry = client.CollectorRegistry()
    registry.register(EngineCollector(metrics, labels))
    text: str = client.generate_latest(registry).decode()
    return text


class EngineCollector:
    """An engine's metrics for a registry of prometheus-client to collect; each scrape is one snapshot.

    Args:
        labels: put on every sample, such as ``{"model_name": "tiny"}``; two engines in one process need different ones.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> None:
        self._metrics = metrics
        self._labels = dict(labels or {})
        self._core = require("prometheus_client.core", "metrics")

    def collect(self) -> Iterator[Any]:
        """The metric families of prometheus-client; what the machine does not measure is left out."""
        families = _Families(self._core, self._labels)
        snapshot = self._metrics.snapshot()
        yield families.counter("llmc_requests", "Requests that ended, by outcome.", "outcome", snapshot.requests)
        for name, attribute, text in _COUNTERS:
            yield families.counter(name, text, None, {"": getattr(snapshot, attribute)})
        if snapshot.energy_joules is not None:
            yield families.counter("llmc_energy_joules", "Energy used.", None, {"": snapshot.energy_joules})
        for name, attribute, text in _GAUGES:
            yield families.gauge(name, text, getattr(snapshot.gauges, attribute))
        yield from self._histograms(families, snapshot)

    def _histograms(self, families: "_Families", snapshot: EngineSnapshot) -> Iterator[Any]:
        for name, attribute, text in _HISTOGRAMS:
            yield families.histogram(name, text, None, {"": getattr(snapshot, attribute)})
        yield families.histogram(
            "llmc_step_duration_seconds", "Duration of a call of the session, by phase.", "phase", snapshot.step
        )


class _Families:
    """Makes metric families with the same labels on each; a family may have one label more, whose value varies."""

    def __init__(self, core: ModuleType, labels: Mapping[str, str]) -> None:
        self._core = core
        self._names = list(labels)
        self._values = list(labels.values())

    def counter(self, name: str, text: str, label: str | None, values: Mapping[str, float]) -> Any:
        family = self._core.CounterMetricFamily(name, text, labels=self._label_names(label))
        for value, number in values.items():
            family.add_metric(self._label_values(label, value), number)
        return family

    def gauge(self, name: str, text: str, number: float) -> Any:
        family = self._core.GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, number)
        return family

    def histogram(self, name: str, text: str, label: str | None, values: Mapping[str, HistogramSnapshot]) -> Any:
        family = self._core.HistogramMetricFamily(name, text, labels=self._label_names(label))
        for value, histogram in values.items():
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative, strict=True))
            family.add_metric(self._label_values(label, value), buckets, histogram.sum)
        return family

    def _label_names(self, label: str | None) -> list[str]:
        return self._names if label is None else [*self._names, label]

    def _label_values(self, label: str | None, value: str) -> list[str]:
        return self._values if label is None else [*self._values, value]
