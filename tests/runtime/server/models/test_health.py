"""Questions to the server itself, and errors of no dialect."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.models.pool import ModelState


def test_it_is_alive_and_ready(http):
    assert http.get("/health").json() == {"status": "ok"}
    found = http.get("/ready")
    assert found.status_code == 200 and found.json()["models"]["tiny"]["phase"] == "ready"
    assert found.json()["models"]["tiny"]["memory"] > 1_000_000  # also of a single model, which has no plan


def test_it_says_which_models_of_the_start_are_loading():
    never: dict[str, Any] = {"reason": None, "memory": 0, "promised": 0, "users": 0, "draining": 0, "loads": 0}
    states = {"first": ModelState("unloaded", **never), "second": ModelState("loading", **never)}
    pool: Any = SimpleNamespace(names=tuple(states), states=lambda: states, lost=None)
    config = ServerConfig(models={name: Path(name) for name in states}, warm=("second",))
    found = TestClient(make_app(config, pool)).get("/ready")
    assert found.status_code == 503 and found.json()["message"].startswith("second is loading; ")
    states["second"] = ModelState("ready", **{**never, "loads": 1})
    found = TestClient(make_app(config, pool)).get("/ready")
    assert found.status_code == 200 and "message" not in found.json()


def test_metrics_count_requests_by_route_and_name_the_model(http):
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    http.get("/nowhere/at/all")
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    counted = {(sample.labels["route"], sample.labels["status"]) for sample in families["llmc_http_requests"].samples}
    assert ("/v1/completions", "200") in counted and ("none", "404") in counted
    assert not any("/nowhere" in route for route, _ in counted)
    engine = families["llmc_generation_tokens"].samples
    assert {sample.labels["model_name"] for sample in engine} == {"tiny"}


def test_errors_of_routes_are_in_the_common_format(http):
    assert "openapi.json" in http.get("/v2").json()["error"]["message"]
    assert http.get("/v1/chat/completions").status_code == 405


def test_the_document_lists_the_routes(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/health", "/metrics"} <= paths.keys()
