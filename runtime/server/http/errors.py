"""Errors as clients see them: a status, and a body in the format of the dialect that they speak."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmc.errors import (
    CancelledError,
    ContextError,
    DeadlineError,
    EngineClosedError,
    LlmcError,
    NonFiniteError,
    QueueFullError,
    RequestError,
    ResourceError,
    UsageError,
    printable,
)

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
# The first class that an error belongs to decides; what is none of these is a failure of the server.
STATUSES: tuple[tuple[type[LlmcError], int], ...] = (
    (QueueFullError, 429),
    (DeadlineError, 504),
    (EngineClosedError, 503),
    (CancelledError, 499),  # nginx's number for a client that closed the connection
    (NonFiniteError, 500),
    (ResourceError, 503),
    (UsageError, 400),
    (RequestError, 400),
)
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {
    **OPENAI_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: one sentence: what was found, what was expected, what to do.
        param: the parameter that is at fault, as ``messages[0].content``.
        code: a word that programs compare, as OpenAI's ``model_not_found``.
        retry_after_s: seconds after which another try may succeed, sent as Retry-After; rounded up.
        details: what Anthropic's clients compare, as ``{"error_code": ...}``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.details = details
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def body(self) -> dict[str, Any]:
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}, "request_id": request_id}


def from_llmc(error: ApiError | LlmcError, names: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """The answer to a request that llmc could not serve; an ApiError stays as it is.
    ``names``: the dialect's own names of parameters, by llmc's; ``prompt`` is that of what the model reads."""
    if isinstance(error, ApiError):
        return error
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), None)
    if status is None:
        log.error("a request failed: %s", error)
    retry = RETRY_AFTER_S if status in (429, 503) else None
    param = rename_place(error.parameter, names)
    code = "queue_full" if status == 429 else "context_length_exceeded" if isinstance(error, ContextError) else None
    said = f"the model: {hide_path(error)}" if status is None or error.path else error.sentence(param)
    return ApiError(status or 500, said, param=param or None, code=code, retry_after_s=retry)


def hide_path(error: Exception) -> str:
    """The problem of an error, for clients, who may not learn the server's folders: its class alone where the error
    does not keep its path apart."""
    if isinstance(error, LlmcError) and error.path:
        return printable(error.problem)
    return f"{type(error).__name__}; the server's log says more"


def rename_place(place: str, names: Mapping[str, str]) -> str:
    """A place, such as ``tools[0].function``, as the client knows it: its longest part among ``names`` is replaced."""
    begins = [name for name in names if place.startswith(name) and place[len(name) : len(name) + 1] in ("", ".", "[")]
    begin = max(begins, key=len, default="")
    return names.get(begin, "") + place[len(begin) :]


@contextmanager
def name_parameters(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of what the block does say a dialect's own names of parameters; see :func:`from_llmc`.
    Raises ApiError: the block raises a UsageError or a RequestError; others are left as they are."""
    try:
        yield
    except (UsageError, RequestError) as error:
        raise from_llmc(error, names) from error


def response(scope: Mapping[str, Any], error: ApiError) -> JSONResponse:
    """The error in the format of the dialect whose route was asked."""
    if scope.get("path", "").startswith("/api/"):  # Ollama's
        return JSONResponse({"error": error.message}, error.status, error.headers)
    if scope.get("path", "").startswith("/v1/messages"):
        request_id = scope.get("state", {}).get("request_id")
        return JSONResponse(error.anthropic_body(request_id), error.status, error.headers)
    return JSONResponse(error.body, error.status, error.headers)


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answer a request with an error before the application sees it."""
    await response(scope, error)(scope, receive, send)


def no_route(scope: Mapping[str, Any]) -> ApiError:
    """The refusal of an address that is none of this server's."""
    said = "OpenAI's clients take this address with /v1 behind it, Anthropic's and Ollama's without"
    return ApiError(404, f"there is no route {scope['path'][:200]!r}; {said}; GET /openapi.json lists those there are")


# ------------------------------------------------------------------------------------------------------ as documented


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def document_errors(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The errors that every route may answer with, for the OpenAPI document."""
    content = {"content": {"application/json": {"schema": schema}}}
    return {status: {"description": said, **content} for status, said in MEANINGS.items()}


MEANINGS = {
    400: "A parameter is unknown, out of range, or contradicts another.",
    401: "The key is missing or unknown.",
    403: "The key is not for this model.",
    404: "There is no such model, or nothing of this name.",
    413: "The body is too large.",
    429: "As many requests wait as may wait, or the key's rate is used up.",
    502: "The upstream failed, where there is one.",
    503: "The model cannot be loaded now, or the server is going down.",
    504: "The deadline, or the upstream's time, passed.",
}
_TEXT, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
OPENAI_ERRORS = document_errors(_object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE)))
OLLAMA_ERRORS = document_errors(_object(error=_TEXT))
ANTHROPIC_ERRORS = document_errors(
    _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_MAYBE)
)
