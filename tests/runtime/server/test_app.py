"""The application as a whole: what holds for several routes."""

import inspect

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from llmc.runtime.server.app import ROUTERS


def dependencies(dependant: Dependant) -> list[Dependant]:
    return [found for own in dependant.dependencies for found in (own, *dependencies(own))]


def test_nothing_of_a_request_takes_a_thread_by_being_no_coroutine():
    """A hop to a thread and back costs more than all the rest of a small request."""
    called = {
        call
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for call in (route.endpoint, *(own.call for own in dependencies(route.dependant)))
    }
    assert called
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []


READ = ["/", "/v1/models", "/v1/models/able", "/api/tags", "/api/version", "/health", "/ready", "/metrics"]
READ += ["/openapi.json"]


@pytest.mark.parametrize("path", [*READ, "/v1/models/other", "/v1/nothing"])
def test_head_is_get_without_the_body(able_http, path):
    got, head = able_http.get(path), able_http.head(path)
    assert head.status_code == got.status_code and head.content == b""
    changing = {"date", "x-request-id", "request-id"} | ({"content-length"} if path == "/metrics" else set())
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in got.headers.items() if k not in changing
    }


def test_head_of_what_is_stored_and_of_what_takes_a_body(able_http):
    stored = able_http.post("/v1/responses", json={"model": "able", "input": "a", "max_output_tokens": 1}).json()["id"]
    for path in (f"/v1/responses/{stored}", f"/v1/responses/{stored}/input_items?limit=1"):
        assert able_http.head(path).status_code == 200
        assert able_http.head(path).headers["content-length"] == str(len(able_http.get(path).content))
    assert able_http.head("/v1/completions").status_code == 405
    assert 'route="/v1/models",status="200"' in able_http.get("/metrics").text
