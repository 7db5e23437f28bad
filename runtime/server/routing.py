"""Routes for bodies that the guard before them has parsed: validated, and handed to the route's function.

FastAPI finds arguments for functions of any form, and reads a body that was read before; of what a request costs until
the engine has it, that was a third. The document is made by FastAPI as for any route, and whatever is out of the
ordinary (no JSON, a query, another content type) goes its way, for it knows what to say.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, get_args, get_origin

from fastapi import Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from llmc.runtime.server.guard.bodies import PARSED
from llmc.runtime.server.validation import refusal_of

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Found = Callable[[Request], Awaitable[Any]]


class BodyRoute(APIRoute):
    """A route of a function that takes ``body``, and beside it what other functions find in the request alone, and that
    gives a response. A route of any other function is one of FastAPI's.

    Dependencies of the application as a whole are not asked for: the one there is (``no_query``) refuses queries, and a
    request with a query goes FastAPI's way.
    """

    def get_route_handler(self) -> Handler:
        """The handler of this route's requests."""
        general = super().get_route_handler()
        function = self.endpoint
        found = arguments_of(function)
        if found is None or self.dependencies:
            return general
        validate = TypeAdapter(inspect.signature(function).parameters["body"].annotation).validate_python

        async def handler(request: Request) -> Response:
            parsed = request.scope.pop(PARSED, None)  # nobody else keeps it, once it is validated
            if parsed is None or request.scope["query_string"]:
                return await general(request)
            try:
                body = validate(parsed, from_attributes=True)
            except ValidationError as error:
                raise refusal_of(error, parsed) from error
            del parsed
            response: Response = await function(body=body, **{name: await find(request) for name, find in found})
            return response

        return handler


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
    """What finds a parameter's value: the request itself, or an asynchronous function of nothing else."""
    if parameter.annotation is Request:
        return _itself
    marks = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    depends = next((mark for mark in (*marks, parameter.default) if isinstance(mark, Depends)), None)
    function = depends.dependency if depends else None
    if (
        function is None
        or not inspect.iscoroutinefunction(function)
        or len(inspect.signature(function).parameters) != 1
    ):
        return None
    return function


async def _itself(request: Request) -> Request:
    return request
