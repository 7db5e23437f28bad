"""The short way to the routes that answer with models, for bodies that the guard has parsed already.

FastAPI looks through all routes, finds arguments for functions of any form, and reads a body that was read before: of
what a request costs until the engine has it, that was a third. It makes the document as ever, and whatever is out of
the ordinary (no JSON, a query, another content type or method) goes its way, for it knows what to say.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin

from fastapi import APIRouter, Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import LlmcError
from llmc.runtime.server.errors import ApiError, from_llmc, response
from llmc.runtime.server.guard.bodies import PARSED
from llmc.runtime.server.validation import refusal_of

Found = Callable[[Request], Awaitable[Any]]


class ShortRoute:
    """A route of a function that takes ``body``, and beside it what other functions find in the request alone, and that
    gives a response.

    Args:
        route: FastAPI's.
        found: the parameters but for ``body``, each with what finds its value.
    """

    def __init__(self, route: APIRoute, found: Iterable[tuple[str, Found]]) -> None:
        self.route = route
        self._found = tuple(found)
        body = inspect.signature(route.endpoint).parameters["body"].annotation
        self._validate = TypeAdapter(body).validate_python

    async def __call__(self, request: Request, parsed: Any) -> Response:
        """The answer to a request with this body.

        Raises:
            ApiError: the body does not fit; or whatever the function raises.
        """
        try:
            body = self._validate(parsed, from_attributes=True)
        except ValidationError as error:
            raise refusal_of(error, parsed) from error
        arguments = {name: await find(request) for name, find in self._found}
        answer: Response = await self.route.endpoint(body=body, **arguments)
        return answer


def short_routes(routers: Iterable[APIRouter]) -> dict[str, ShortRoute]:
    """The routes of these that can be reached the short way, by their paths.

    A route with dependencies of its own, or of its router, is none of them. The application's only one, which refuses
    queries, need not be asked for: a request with a query goes the long way.
    """
    routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
    return {
        route.path: ShortRoute(route, found)
        for route in routes
        if route.methods == {"POST"} and not route.dependencies and (found := arguments_of(route.endpoint)) is not None
    }


class ShortWay:
    """Answer what can be answered the short way, and leave the rest to the application.

    Args:
        app: the application.
        routes: see :func:`short_routes`.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, ShortRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parsed = scope.pop(PARSED, None)  # which nobody is to keep
        ordinary = parsed is not None and scope["method"] == "POST" and not scope["query_string"]
        short = self._routes.get(scope["path"]) if ordinary and not scope.get("root_path") else None
        if short is None:
            return await self._app(scope, receive, send)
        scope["route"] = short.route
        try:
            answer = await short(Request(scope, receive, send), parsed)
        except (ApiError, LlmcError) as error:
            answer = response(scope, error if isinstance(error, ApiError) else from_llmc(error))
        return await answer(scope, receive, send)


def arguments_of(function: Callable[..., Any]) -> list[tuple[str, Found]] | None:
    """The parameters of a route's function but for ``body``, each with what finds its value in a request; None if one
    cannot be found so, if there is no ``body``, or if the function gives no response."""
    signature = inspect.signature(function)
    if signature.return_annotation is not Response or "body" not in signature.parameters:
        return None
    found = []
    for name, parameter in signature.parameters.items():
        if name == "body":
            continue
        if (find := _found(parameter)) is None:
            return None
        found.append((name, find))
    return found


def _found(parameter: inspect.Parameter) -> Found | None:
    """The finder of a parameter's value: the request itself, or an asynchronous function of nothing else."""
    if parameter.annotation is Request:
        return _itself
    marks = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    depends = next((mark for mark in (*marks, parameter.default) if isinstance(mark, Depends)), None)
    function = depends.dependency if depends else None
    if not inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != 1:
        return None
    return function


async def _itself(request: Request) -> Request:
    return request
