"""An engine's metrics for Prometheus, through prometheus-client (extra ``metrics``).

Names follow vLLM's (https://docs.vllm.ai/en/latest/design/metrics.html) with the prefix ``llmc_``; each ends with its
base unit (https://prometheus.io/docs/practices/naming/).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_origin, get_type_hints

from llmc.errors import require
from llmc.runtime.observe.metrics import EngineMetrics, Histogram, Metric


class EngineCollector:
    """Collects an engine's metrics for a registry of prometheus-client; each scrape is one snapshot.

    ``labels``, such as ``{"model_name": "tiny"}``, are added to every sample; engines in one process need different
    ones.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> None:
        self._metrics = metrics
        self._labels = dict(labels or {})
        self._core = require("prometheus_client.core", "metrics")

    def collect(self) -> Iterator[Any]:
        """The metric families of prometheus-client, without those that the machine cannot measure."""
        snapshot, core = self._metrics.snapshot(), self._core
        for record, kind in ((snapshot, core.CounterMetricFamily), (snapshot.gauges, core.GaugeMetricFamily)):
            for name, hint in get_type_hints(type(record), include_extras=True).items():
                value = getattr(record, name)
                if get_origin(hint) is Annotated and value is not None:
                    yield self._family(hint.__metadata__[0], kind, value)

    def _family(self, metric: Metric, kind: Callable[..., Any], value: Any) -> Any:
        parts = {(part,): each for part, each in value.items()} if metric.label else {(): value}
        histograms = all(isinstance(each, Histogram) for each in parts.values())
        names = [*self._labels, *([metric.label] if metric.label else [])]
        family = (self._core.HistogramMetricFamily if histograms else kind)(
            f"llmc_{metric.name}", metric.meaning, labels=names
        )
        for part, each in parts.items():
            labels = [*self._labels.values(), *part]
            if histograms:
                bounds = [*map(repr, each.bounds), "+Inf"]
                family.add_metric(labels, list(zip(bounds, each.cumulative, strict=True)), each.sum)
            else:
                family.add_metric(labels, each)
        return family
