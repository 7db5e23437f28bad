"""Counts of HTTP requests, and the metrics of every loaded model, for Prometheus."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.http.call import Client

if TYPE_CHECKING:
    from llmc.runtime.server.models.pool import Pool

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """Counts by route, method and status, durations, and requests that run."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        names = ("route", "method")
        self._requests = Counter(
            "llmc_http_requests", "Requests that were answered.", (*names, "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "llmc_http_request_duration_seconds",
            "Time from a request to the end of its answer.",
            names,
            buckets=SECONDS,
            registry=self._registry,
        )
        self._running = Gauge("llmc_http_requests_running", "Requests being answered.", registry=self._registry)

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        """A counter of something else that is told with these."""
        return Counter(name, text, labels, registry=self._registry)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Count the application's requests."""

        async def count_requests(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, start = 500, time.perf_counter()

            async def note_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            with self._running.track_inprogress():
                try:
                    await app(scope, receive, note_status)
                finally:
                    self._count(scope, status, time.perf_counter() - start)

        return count_requests

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        # By the route's pattern: a label for every path that somebody tries would grow without end.
        route = getattr(scope.get("route"), "path", "none")
        self._requests.labels(route, scope["method"], str(status)).inc()
        self._seconds.labels(route, scope["method"]).observe(seconds)

    def exposition(self, pool: "Pool", client: Client) -> bytes:
        """All metrics that a client may see, in the text format of Prometheus."""
        return generate_latest(self._registry) + generate_latest(_Models(pool, client))


class _Models(Collector):
    """The states of the models, and the metrics of the engines of those that are loaded.

    A family of metrics comes once, with the samples of all models.
    """

    def __init__(self, pool: "Pool", client: Client) -> None:
        self._pool, self._client = pool, client

    def collect(self) -> Iterator[Any]:
        states = GaugeMetricFamily(
            "llmc_model_state", "1 for the state that a model is in.", labels=("model_name", "state")
        )
        for name, state in self._pool.states().items():
            if self._client.allows(name):
                states.add_metric((name, state.phase), 1)
        yield states
        families: dict[str, Any] = {}
        models = ((name, model) for name, model in self._pool.models().items() if self._client.allows(name))
        for name, model in models:
            for family in model.metric_families({"model_name": name}):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
