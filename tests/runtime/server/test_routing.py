"""Routes with a body: the short way and FastAPI's answer alike."""

import json
from typing import Annotated, Any

import httpx2 as httpx
import pytest
from doubles.asgi import ask
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.responses import JSONResponse

from llmc.runtime.server import routing
from llmc.runtime.server.app import HANDLERS, ROUTERS
from llmc.runtime.server.bodies import Body
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.guard.guarded import Guarded
from llmc.runtime.server.routing import ShortWay, arguments_of, short_routes

SHORT = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses"}
JSON = "application/json"
BODIES: list[tuple[bytes, str]] = [
    (b'{"a": 1}', JSON),
    (b'{"a": 1}', "Application/JSON; charset=utf-8"),
    (b'{"a": 1}', "application/vnd.api+json"),
    (b'{"a": 1}', "text/plain"),
    (b'{"a": 1.5}', JSON),
    (b'{"a": 1, "b": {"a": "x"}}', JSON),
    (b'{"b": null}', JSON),
    (b'{"a": 1, "unknown": 2}', JSON),
    (b'{"a": NaN}', JSON),
    (b"[1]", JSON),
    (b"null", JSON),
    (b'"text"', JSON),
    (b'{"a": ', JSON),
    (b"\xff", JSON),
    (b'\xef\xbb\xbf{"a": 1}', JSON),
    (b'{"a": %d}' % 10**400, JSON),
    (b"[" * 40 + b"]" * 40, JSON),
]


class Given(Body):
    """A body."""

    a: int
    b: "Given | None" = None


async def path_of(request: Request) -> str:
    return request.url.path


async def answer(body: Given, request: Request, path: Annotated[str, Depends(path_of)]) -> Response:
    assert request.url.path == path
    return JSONResponse({"body": body.model_dump(), "long": "router" in request.scope})


@pytest.fixture
def app() -> Any:
    made, short = FastAPI(), APIRouter()
    short.post("/short", response_model=None)(answer)
    made.post("/long", response_model=None)(answer)
    made.include_router(short)
    for error, handler in HANDLERS.items():
        made.add_exception_handler(error, handler)
    made.add_middleware(ShortWay, routes=short_routes([short]))
    return Guarded(made, ServerConfig())


@pytest.mark.parametrize(("body", "kind"), BODIES)
def test_both_ways_answer_alike(app: Any, body: bytes, kind: str):
    headers = {"content-type": kind, "content-length": str(len(body))}
    short, long = (ask(app, path, method="POST", headers=headers, body=[body]) for path in ("/short", "/long"))
    assert short.status == long.status
    assert {**json.loads(short.body), "long": None} == {**json.loads(long.body), "long": None}
    if short.status == 200 and kind.lower().startswith(JSON):
        assert (short.json["long"], long.json["long"]) == (False, True)  # it went the short way


def test_a_difference_would_be_noticed(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "refusal_of", lambda error, body: RuntimeError("another refusal"))
    with pytest.raises(RuntimeError, match="another"):
        test_both_ways_answer_alike(app, b'{"a": 1.5}', JSON)


def test_functions_of_other_forms_are_left_to_fastapi():
    def found(request: Request) -> str:
        return ""

    async def of_a_thread(body: Given, path: Annotated[str, Depends(found)]) -> Response: ...
    async def of_a_query(body: Given, limit: int = 1) -> Response: ...
    async def of_a_value(body: Given) -> dict[str, Any]: ...
    async def of_no_body(request: Request) -> Response: ...

    assert [arguments_of(each) for each in (of_a_thread, of_a_query, of_a_value, of_no_body)] == [None] * 4
    assert [name for name, _ in arguments_of(answer) or ()] == ["request", "path"]


def test_the_busiest_routes_go_the_short_way():
    assert short_routes(ROUTERS).keys() == SHORT


def test_what_is_asked_of_a_router_keeps_its_routes_on_the_long_way():
    router = APIRouter(dependencies=[Depends(path_of)])
    router.post("/a", response_model=None)(answer)
    assert short_routes([router]) == {}


@pytest.mark.parametrize("path", sorted(SHORT))
def test_what_the_application_asks_of_all_routes_is_asked_there_too(http: httpx.Client, path: str):
    answer = http.post(f"{path}?invented=1", json={})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "invented"
