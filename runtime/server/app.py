"""The application: the routes of every dialect, what is asked of the server itself, and how errors are answered."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc import __version__
from llmc.errors import LlmcError
from llmc.runtime.server import page
from llmc.runtime.server.dialects import (
    anthropic,
    cohere,
    completions,
    embeddings,
    models,
    ollama,
    openai_chat,
    responses,
    transcriptions,
)
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.errors import OPENAI_ERRORS, ApiError, from_llmc, no_route, response
from llmc.runtime.server.http.validation import api_error, document_bodies, no_query
from llmc.runtime.server.models import admin, health
from llmc.runtime.server.models.metrics import HttpMetrics
from llmc.runtime.server.models.service import Service
from llmc.runtime.server.upstream import Upstream

if TYPE_CHECKING:
    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.models.pool import Pool

# In the order in which /docs lists them.
ROUTERS = (
    openai_chat.router,
    completions.router,
    responses.router,
    transcriptions.router,
    anthropic.router,
    ollama.router,
    embeddings.router,
    cohere.router,
    models.router,
    health.router,
)


def make_app(config: "ServerConfig", pool: "Pool") -> FastAPI:
    """The application over these models; keys and limits stand around it, see :mod:`llmc.runtime.server.http.guarded`.
    ``pool``: the models; whoever made it closes it."""
    # docs_url: the interactive pages of FastAPI fetch scripts from elsewhere.
    app = FastAPI(title="llmc", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.router.redirect_slashes = False  # a redirect would name whatever host the client did
    app.state.service = Service(config, pool)
    app.state.metrics = HttpMetrics()
    guards = [Depends(no_query)]
    app.state.upstream = None
    if config.upstream is not None:
        app.state.upstream = Upstream(config, app.state.service, app.state.metrics)
        guards.append(Depends(app.state.upstream.claim))
    for router in (*ROUTERS, *([admin.router] if config.keys_file else [])):
        app.include_router(router, responses=OPENAI_ERRORS, dependencies=guards)
    if config.page:
        page.mount(app)
    for kind, answer in HANDLERS.items():
        app.add_exception_handler(kind, answer)
    app.add_middleware(answer_heads)
    app.add_middleware(name_ignored)
    app.add_middleware(app.state.metrics.middleware)
    document_bodies(app.openapi(), (route for each in ROUTERS for route in each.routes if isinstance(route, APIRoute)))
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which is never sent: it is 400 here
    return app


def name_ignored(app: ASGIApp) -> ASGIApp:
    """Name the call's ignored parameters in a header of its answer."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and (ignored := call_of(scope).ignored):
                MutableHeaders(scope=message)["x-llmc-ignored"] = ", ".join(ignored)
            await send(message)

        await app(scope, receive, send_named)

    return call


def answer_heads(app: ASGIApp) -> ASGIApp:
    """Answer HEAD as GET, without the body."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await app(scope, receive, send)

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        asked = {**scope, "method": "GET"}
        try:
            await app(asked, receive, send_head)
        finally:
            scope["route"] = asked.get("route")  # which logs and metrics name

    return call


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, (ApiError, LlmcError))
    if request.app.state.upstream is not None:
        answer: Response = await request.app.state.upstream.answer(request, error)
        return answer
    return response(request.scope, from_llmc(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response(request.scope, api_error(error.errors()))  # of the query or a header


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return response(request.scope, no_route(request.scope))
    # The methods of routes that only admins see are not told to others.
    if path.startswith(admin.PREFIX) and (hidden := admin.refusal(request.scope)) is not None:
        return response(request.scope, hidden)
    said = {405: f"{request.method} is not a method of {path[:200]!r}; GET /openapi.json lists what is"}.get(
        error.status_code, str(error.detail)
    )
    return response(request.scope, ApiError(error.status_code, said, headers=error.headers))


async def _bug(request: Request, error: Exception) -> Response:
    said = f"something went wrong inside ({type(error).__name__}); the log of the server has more, by the request's id"
    return response(request.scope, ApiError(500, said))


HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _answer,
    LlmcError: _answer,
    RequestValidationError: _invalid,
    HTTPException: _http,
    Exception: _bug,
}
