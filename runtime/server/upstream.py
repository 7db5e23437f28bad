"""The upstream: another service that answers what is refused here, where the settings name one.

A request goes there as it came, but for the model's name, and its answer comes back as it is, event by event. Each has
a connection of its own: one that is kept open may be closed by the other side just when a request was written to it,
and nothing is tried twice.
"""

import logging
import math
import re
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial
from typing import Any

import httpx2 as httpx
from anyio import fail_after
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from llmc import __version__
from llmc.errors import ContextError, LlmcError, QueueFullError, ResourceError, UsageError
from llmc.runtime.server.config import MODEL_NAME, ServerConfig
from llmc.runtime.server.dialects.completions import MOST_PROMPTS
from llmc.runtime.server.http.arrival import PARSED, value_of
from llmc.runtime.server.http.bodies import list_texts
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.errors import ApiError, from_llmc, response
from llmc.runtime.server.http.guarded import ANSWERED_BY
from llmc.runtime.server.http.keys import read_upstream_key
from llmc.runtime.server.http.streams import EventStream, encode_json, event, unless_gone
from llmc.runtime.server.http.validation import declares_json
from llmc.runtime.server.models.metrics import HttpMetrics
from llmc.runtime.server.models.service import Service

log = logging.getLogger(__name__)

# The dialects whose requests may go there, each with its names of the most tokens of an answer. Vectors may not: those
# of another model would be taken for those of the one that was asked for.
ROUTES = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
REASONS = ((ContextError, "context"), (QueueFullError, "busy"), (ResourceError, "busy"))
# Members that go on from what is kept where it was answered, or are answered later: what is kept here does not leave,
# and what is kept there belongs to everybody who comes with its one key.
KEPT = ("previous_response_id", "conversation", "prompt", "background")
LOCAL_ONLY = "x-llmc-local-only"
SENT = (b"accept", b"anthropic-version", b"anthropic-beta", b"openai-beta")  # of the client's headers; no other goes
JSON, EVENTS = "application/json", "text/event-stream"
MOST_BYTES = 16 << 20  # of an answer that is no stream, and of an event
BYTES_PER_TOKEN = 4  # of a prompt, as English has, and of answers that are no streams, where nobody tells the tokens
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
LONGEST_END = max(map(len, EVENT_ENDS))
_USAGE = re.compile(rb'"((?:prompt|input|completion|output)_tokens)"\s{0,9}:\s{0,9}(\d{1,9})')
_LONGEST_USAGE = 64  # bytes that it matches at most
_PROMPT = (b"prompt_tokens", b"input_tokens")  # one number's names; some services tell both
_PASSED = re.compile("1[.]1 llmc-[0-9a-f]{16}")


class UpstreamError(ApiError):
    """The upstream gave no answer, or not all of it. ``kind``: a word for how it failed."""

    def __init__(self, kind: str, said: str, status: int = 502) -> None:
        super().__init__(status, f"the upstream {said}; try again later", code=f"upstream_{kind}")
        self.kind = kind


class Upstream:
    """The service that answers in this one's place. ``metrics``: get its counts.
    Raises UsageError: the file of its key cannot be used."""

    def __init__(self, config: ServerConfig, service: Service, metrics: HttpMetrics) -> None:
        self._config, self._service = config, service
        self._base = (config.upstream or "").rstrip("/")
        self._via = f"1.1 llmc-{secrets.token_hex(8)}"
        self._names = dict(pair.split("=", 1) for pair in config.upstream_models)
        self._tls = ssl.create_default_context()
        self._key_headers("")
        count = metrics.counter
        self._answers = count("llmc_upstream_requests", "Requests that the upstream answered.", ("reason", "status"))
        self._refusals = count("llmc_upstream_refusals", "Requests that a rule keeps here.", ("reason", "rule"))
        self._failures = count("llmc_upstream_failures", "Requests that the upstream failed.", ("reason", "failure"))

    # ------------------------------------------------------------------------------------------ which requests go there

    async def claim(self, request: Request) -> None:
        """Refuse a model that is not here before the body is read as strictly as one for a model here.
        Raises ApiError: 404, for :meth:`answer`; 400 or 429, there are more prompts than the client may send."""
        path, body = request.scope["path"], request.scope.get(PARSED)
        if path not in ROUTES or not isinstance(body, dict) or not declares_json(request) or _is_local_only(request):
            return
        client = call_of(request.scope).client
        try:
            if type(body.get("model")) is str:
                self._service.find(client, body["model"])
        except ApiError as error:
            if path == "/v1/completions" and _reason_of(error) == "model":
                client.spend(requests=len(list_texts("prompt", body.get("prompt"), MOST_PROMPTS)) - 1)
            raise

    async def answer(self, request: Request, error: ApiError | LlmcError) -> Response:
        """The upstream's answer to what is refused here; else the refusal, or why there is no answer."""
        refusal, reason = from_llmc(error), _reason_of(error)
        if reason is None or request.scope["path"] not in ROUTES:
            return response(request.scope, refusal)
        body = await call_of(request.scope).aside(partial(value_of, await request.body()))
        if rule := self._keep(request, body, reason, refusal):
            self._refusals.labels(reason, rule).inc()
            return response(request.scope, refusal)
        try:
            return await self._ask(request, body, reason)
        except ApiError as failure:
            self._count_failure(request.scope, reason, failure)
            return response(request.scope, failure)

    def _keep(self, request: Request, body: dict[str, Any], reason: str, refusal: ApiError) -> str:
        """The rule by which a request stays here, of which the refusal then tells; empty where it may go."""
        path, most = request.scope["path"], self._config.max_request_tokens
        if _is_local_only(request):
            return "local_only"
        if self._via in _list_passed(request):  # the upstream is this service, or has it as its own
            return "loop"
        if reason == "model":
            asked = body["model"]
            if not (MODEL_NAME.fullmatch(asked) and call_of(request.scope).client.allows(asked)):
                return "model"
        if path == "/v1/responses" and (kept := _find_kept(body)):
            refusal.param = kept
            refusal.message += f"; the upstream cannot answer either, which knows nothing of {kept}: leave it out"
            return "stored"
        if most is not None and not _is_within(most, body, ROUTES[path]):
            refusal.param = ROUTES[path][0]
            refusal.message += f"; the upstream may be asked for at most {most} tokens, so give {refusal.param}"
            return "limit"
        return ""

    # ------------------------------------------------------------------------------------------ there and back

    async def _ask(self, request: Request, body: dict[str, Any], reason: str) -> Response:
        call = call_of(request.scope)
        content, asked = await request.body(), body.get("model") or self._service.find(call.client, None)
        name = self._names.get(asked, asked)
        if name != body.get("model"):
            content = (await call.aside(partial(encode_json, {**body, "model": name}))).encode()
        call.note(model=asked, upstream_model=name, upstream_reason=reason)
        call.ignored.clear()  # the upstream gets them all
        until = time.monotonic() + (self._config.request_deadline_s or math.inf)
        meter = Meter(len(content))
        try:
            async with AsyncExitStack() as held:
                answer = await unless_gone(request.receive, self._open(request, content, until, held))
                headers = {ANSWERED_BY: "upstream", "x-llmc-upstream-model": name}
                if re.fullmatch("[0-9]{1,9}", wait := answer.headers.get("retry-after", "")):
                    headers["retry-after"] = wait
                pieces = self._pieces(answer, until)
                if _media(answer) == EVENTS:
                    events = self._events(request.scope, pieces, meter, reason)
                    found: Response = EventStream(events, held.pop_all(), heartbeat_s=0)
                    found.status_code = answer.status_code
                    found.headers.update(headers)
                else:
                    whole = await unless_gone(request.receive, _read_whole(pieces, meter))
                    found = Response(whole, answer.status_code, headers, media_type=JSON)
                    if answer.is_success:
                        call.client.owe(meter.tokens)
        except ApiError as failure:
            if not isinstance(failure, UpstreamError):  # the client left, and what it asked for is computed
                call.client.owe(meter.tokens)
            raise
        self._answers.labels(reason, str(answer.status_code)).inc()
        call.note(answered_by="upstream")
        return found

    async def _open(self, request: Request, content: bytes, until: float, held: AsyncExitStack) -> httpx.Response:
        """The answer once it has begun. Raises UpstreamError: there is none, or none that may be passed on."""
        path = request.scope["path"]
        with _failures_named(), fail_after(self._patience(until)):
            headers = [
                *(pair for pair in request.headers.raw if pair[0] in SENT),
                (b"content-type", JSON.encode()),
                (b"accept-encoding", b"identity"),
                (b"user-agent", f"llmc/{__version__}".encode()),
                (b"via", ", ".join([*_list_passed(request), self._via]).encode()),
                *self._key_headers(path),
            ]
            client = self._make_client()
            await held.enter_async_context(client)
            url = self._base + path.removeprefix("/v1") + "?beta=true" * bool(request.query_params)
            answer = await client.send(client.build_request("POST", url, content=content, headers=headers), stream=True)
        _check_answer(answer)
        return answer

    def _make_client(self) -> httpx.AsyncClient:
        """Neither with proxies and names of the environment, nor with cookies of other requests, nor redirects."""
        return httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None, follow_redirects=False)

    def _key_headers(self, path: str) -> list[tuple[bytes, bytes]]:
        if self._config.upstream_key_file is None:
            return []
        key = read_upstream_key(self._config.upstream_key_file).encode()
        return [(b"authorization", b"Bearer " + key), *([(b"x-api-key", key)] if path == "/v1/messages" else [])]

    def _patience(self, until: float) -> float:
        return min(self._config.upstream_timeout_s, until - time.monotonic())

    async def _pieces(self, answer: httpx.Response, until: float) -> AsyncGenerator[bytes, None]:
        async with aclosing(answer.aiter_raw()) as pieces:
            while True:
                with _failures_named(), fail_after(self._patience(until)):
                    piece = await anext(pieces, b"")
                if not piece:
                    return
                yield piece

    async def _events(
        self, scope: Scope, pieces: AsyncGenerator[bytes, None], meter: "Meter", reason: str
    ) -> AsyncGenerator[bytes, None]:
        """Events as they come, each whole, so that a failure in the middle can be told as another one."""
        waiting = bytearray()
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    meter.take(piece)
                    start = max(0, len(waiting) - LONGEST_END)  # no event ends before: it would have been sent
                    waiting += piece
                    _check_size(len(waiting))
                    found = ((waiting.rfind(mark, start), len(mark)) for mark in EVENT_ENDS)
                    if end := max((place + length for place, length in found if place >= 0), default=0):
                        yield bytes(waiting[:end])
                        del waiting[:end]
            meter.ended = True
            yield bytes(waiting)
        except UpstreamError as failure:
            self._count_failure(scope, reason, failure)
            yield _last_event(scope, failure)
        finally:
            call_of(scope).client.owe(meter.tokens)

    def _count_failure(self, scope: Scope, reason: str, failure: ApiError) -> None:
        """Count and log a failure of the upstream's; that its client is gone is none."""
        if isinstance(failure, UpstreamError):
            self._failures.labels(reason, failure.kind).inc()
            call_of(scope).note(upstream_failure=failure.kind)
            shown = isinstance(failure.__cause__, httpx.ConnectError | UsageError)  # others may quote what is sent
            log.warning("%s%s", failure.message, f" ({failure.__cause__})" if shown else "")


class Meter:
    """The tokens of an answer that passes: what it tells of its usage, else a guess from the request's ``sent`` bytes
    and the answer's events. ``ended``: it is whole; what one that is broken off told of its output is of its beginning.
    """

    def __init__(self, sent: int) -> None:
        self._sent, self._bytes, self._events, self._last = sent, 0, 0, b""
        self._prompt = self._output = 0
        self.ended = False

    def take(self, piece: bytes) -> None:
        seen = self._last + piece
        for name, count in _USAGE.findall(seen):
            if name in _PROMPT:
                self._prompt = max(self._prompt, int(count))
            else:
                self._output = max(self._output, int(count))
        self._last = seen[-_LONGEST_USAGE:]
        self._bytes += len(piece)
        self._events += piece.count(b"data:")

    @property
    def tokens(self) -> int:
        output = self._events or self._bytes // BYTES_PER_TOKEN
        if not (self._prompt or self._output):
            return self._sent // BYTES_PER_TOKEN + output
        return self._prompt + (self._output if self.ended else max(self._output, output))


# ---------------------------------------------------------------------------------------------------------- requests


def _reason_of(error: ApiError | LlmcError) -> str | None:
    """The reason for which a request that was refused is the upstream's; None: it is not."""
    if isinstance(error, ApiError) and error.code == "model_not_found":
        return "model"
    cause = error.__cause__ if isinstance(error, ApiError) else error
    return next((reason for kind, reason in REASONS if isinstance(cause, kind)), None)


def _list_passed(request: Request) -> list[str]:
    """The names of the services of this kind that a request came through."""
    return _PASSED.findall(", ".join(request.headers.getlist("via")))


def _is_local_only(request: Request) -> bool:
    """True if the client's key or a header says that nothing may leave; any value but ``false`` says so."""
    key = call_of(request.scope).client.key
    said = any(value.strip().lower() != "false" for value in request.headers.getlist(LOCAL_ONLY))
    return said or (key is not None and key.local_only)


def _find_kept(body: dict[str, Any]) -> str | None:
    """The member of a request of the Responses that goes on from what is kept, or is kept for it."""
    items = body.get("input")
    found = (it for it in items if isinstance(it, dict)) if isinstance(items, list) else ()
    if any(it.get("type") == "item_reference" or it.keys() <= {"id", "type"} for it in found):
        return "item_reference"
    return next(filter(body.get, KEPT), None)


def _is_within(most: int, body: dict[str, Any], limits: Sequence[str]) -> bool:
    """True if a request names the most tokens of its answer, and they are not too many over all outputs."""
    asked = [body[name] for name in limits if body.get(name) is not None]
    outputs = [body[name] for name in ("n", "best_of") if body.get(name) is not None]
    if not asked or any(type(number) is not int or number < 1 for number in (*asked, *outputs)):
        return False
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not (prompt and type(prompt[0]) is int) else 1
    return bool(max(asked) * max([1, *outputs]) * prompts <= most)


# ----------------------------------------------------------------------------------------------------------- answers


@contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise UpstreamError("timeout", "did not answer in time", 504) from error
    except (httpx.ConnectError, httpx.InvalidURL) as error:
        raise UpstreamError("connection", "cannot be reached") from error
    except httpx.HTTPError as error:
        raise UpstreamError("broken", "broke off") from error
    except UsageError as error:
        raise UpstreamError("key", "is not asked, for its key cannot be read") from error


def _media(answer: httpx.Response) -> str:
    return str(answer.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _check_answer(answer: httpx.Response) -> None:
    """Refuse what is no answer to a client. Raises UpstreamError: it is a failure, a redirect, or no JSON or events."""
    status = answer.status_code
    if status in (401, 403):  # which would say that the client's own key is wrong, and may quote this one
        raise UpstreamError("key", f"does not take this service's key (status {status})")
    if status >= 500 or status < 200 or answer.is_redirect:
        raise UpstreamError("status", f"answered with status {status}")
    if _media(answer) not in (JSON, EVENTS) or answer.headers.get("content-encoding", "identity") != "identity":
        raise UpstreamError("form", f"answered with status {status} and neither JSON nor events")


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise UpstreamError("form", f"sent more than {MOST_BYTES} bytes at once")


async def _read_whole(pieces: AsyncGenerator[bytes, None], meter: Meter) -> bytes:
    whole = bytearray()
    async with aclosing(pieces):
        async for piece in pieces:
            meter.take(piece)
            whole += piece
            _check_size(len(whole))
    meter.ended = True
    return bytes(whole)


def _last_event(scope: Scope, failure: UpstreamError) -> bytes:
    """The failure as the last event of a stream, in the dialect's form."""
    if scope["path"] == "/v1/messages":
        return event(failure.anthropic_body(scope.get("state", {}).get("request_id")), "error")
    if scope["path"] == "/v1/responses":
        return event({**failure.body["error"], **failure.body, "type": "error"}, "error")
    return event(failure.body)
