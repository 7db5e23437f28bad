"""The upstream: what is refused here is answered by another service, and what shall stay here does."""

import json
import logging
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from doubles.asgi import ask
from doubles.brakes import Brake
from doubles.listening import make_certificate
from doubles.planted_server import (
    END,
    RESET,
    STALL,
    STREAM,
    Asked,
    ChatServer,
    chunked,
    event,
    planted_server,
    response,
    text,
)
from doubles.serving import serving
from websockets.sync.client import connect

from llmc.errors import BundleError, EngineClosedError, ResourceError, UsageError
from llmc.runtime import Request, SamplingParams
from llmc.runtime.server import upstream
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded
from llmc.runtime.server.upstream import KEPT, ROUTES, Meter, Upstream, _is_within

SECRET = "sk-upstream-0123456789"
SAID = "nobody-else-may-read-this"
RICH = 600  # tokens of a minute, 10 in a second
KEYS = {
    "ann": "",
    "private": "local_only = true",
    "limited": 'models = ["tiny"]',
    "few": "requests_per_minute = 4",
    "poor": "tokens_per_minute = 1000",
    "rich": f"tokens_per_minute = {RICH}",
    "gone": "tokens_per_minute = 100",
}
LONG = "word " * 5000  # beyond any context here
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SAID}], "max_tokens": 4},
    "/v1/completions": {"prompt": SAID, "max_tokens": 4},
    "/v1/responses": {"input": SAID, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": SAID}], "max_tokens": 4},
}
ANSWER = {"id": "x", "model": "gpt-5-2026", "usage": {"prompt_tokens": 400, "completion_tokens": 800}}
PIECES = [b"data: " + json.dumps(text(word)).encode() + b"\n\n" for word in ("one", "two")] + [b"data: [DONE]\n\n"]
PATIENCE_S = 30.0  # of a loaded machine


def told(asked: Asked) -> Sequence[bytes]:
    """An answer as it should be, whole or in events."""
    if asked.body.get("stream"):
        return [STREAM, *map(chunked, PIECES), END]
    return [response(200, ANSWER)]


@dataclass
class Box:
    """The service, and the upstream that records all that it gets; ``answer`` says what it sends."""

    url: str
    app: Any
    guarded: Guarded
    server: ChatServer

    @property
    def upstream(self) -> Upstream:
        found: Upstream = self.app.state.upstream
        return found

    def ask(self, path: str, body: dict[str, Any], key: str = "ann", **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=of(key) | headers, timeout=PATIENCE_S)

    def count(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of a counter by their labels' values."""
        found = self.app.state.metrics._registry.collect()
        samples = (sample for family in found for sample in family.samples if sample.name == f"{name}_total")
        return {tuple(sample.labels.values()): sample.value for sample in samples}


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {client_key(key)}", "anthropic-version": "2023-06-01"}


def client_key(name: str) -> str:
    return f"sk-{name:-<16}"


def secret_file(folder: Path, content: str) -> Path:
    path = folder / "secret"
    path.write_text(content)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def one(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder, made = tmp_path_factory.mktemp("upstream"), []

    def around(app: Any, config: ServerConfig) -> Guarded:
        made.extend([app, Guarded(app, config)])
        return made[1]

    keys = secret_file(
        folder, "".join(f'[{name}]\nkey = "{client_key(name)}"\n{rest}\n' for name, rest in KEYS.items())
    )
    key = secret_file(tmp_path_factory.mktemp("key"), f"{SECRET}\n")
    with planted_server(told) as server:
        config = ServerConfig(
            models={"tiny": tiny_bundle},
            threads=1,
            max_batch=1,
            max_queue=1,
            keys_file=keys,
            upstream=f"{server.url}/v1",
            upstream_key_file=key,
            upstream_models=("smart=gpt-5",),
        )
        with serving(config, around) as url:
            yield Box(url, *made, server)


@pytest.fixture
def box(one: Box) -> Box:
    """The service, whose upstream answers as it should and was asked nothing yet."""
    one.server.answer, one.server.connections = told, 0
    one.server.asked.clear()
    one.server.left.clear()
    return one


@pytest.fixture
def settings(box: Box, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the upstream other settings for the time of a test."""
    return lambda **given: monkeypatch.setattr(box.upstream, "_config", replace(box.upstream._config, **given))


@contextmanager
def busy(box: Box, waiting: int = 1) -> Iterator[None]:
    """All rows are taken, and so many requests wait, of which one may."""
    engine = box.app.state.service.pool.models()["tiny"].engine
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    brake = Brake(1)
    running = engine.submit(Request([1, 2, 3], params, stopping_criteria=[brake]))
    next(iter(running.events()))
    others = [engine.submit(Request([1, 2, 3], params)) for _ in range(waiting)]
    try:
        yield
    finally:
        brake.let_go()
        for handle in (running, *others):
            handle.result(PATIENCE_S)


def requests(reason: str) -> dict[str, dict[str, Any]]:
    """A request in each dialect that is the upstream's for this reason."""
    if reason == "model":
        return {path: {"model": "smart", **body} for path, body in BODIES.items()}
    if reason == "busy":
        return {path: {"model": "tiny", **body} for path, body in BODIES.items()}
    longer = json.loads(json.dumps(BODIES).replace(SAID, f"{SAID} {LONG}"))
    return {path: {"model": "tiny", **body} if path == "/v1/messages" else body for path, body in longer.items()}


REFUSALS = {"model": (404, "model_not_found"), "context": (400, "context_length_exceeded"), "busy": (429, "queue_full")}


class TestAnswers:
    @pytest.mark.parametrize("path", ROUTES)
    def test_pass_as_they_are_whole_and_streamed(self, box, path):
        body = {"model": "gpt-9", "web_search_options": {"unknown": "here"}, **BODIES[path]}
        whole = box.ask(path, body)
        assert (whole.status_code, whole.json()) == (200, ANSWER)
        streamed = box.ask(path, {**body, "stream": True})
        assert (streamed.status_code, streamed.content) == (200, b"".join(PIECES))
        for answer in (whole, streamed):
            assert answer.headers["x-llmc-answered-by"] == "upstream"
            assert answer.headers["x-llmc-upstream-model"] == "gpt-9"
        assert [asked.body for asked in box.server.asked] == [body, {**body, "stream": True}]
        assert {asked.line for asked in box.server.asked} == {f"POST {path} HTTP/1.1"}

    @pytest.mark.parametrize("reason", REFUSALS)
    def test_come_for_each_reason_in_each_dialect(self, box, reason):
        before = box.count("llmc_upstream_requests").get((reason, "200"), 0)
        for path, body in requests(reason).items():
            if reason == "busy":
                with busy(box):
                    answer = box.ask(path, body)
            else:
                answer = box.ask(path, body)
            assert (answer.status_code, answer.headers["x-llmc-answered-by"]) == (200, "upstream"), path
        assert box.count("llmc_upstream_requests")[reason, "200"] == before + len(ROUTES)
        name = "gpt-5" if reason == "model" else "tiny"
        assert {asked.body["model"] for asked in box.server.asked} == {name}

    def test_come_when_a_request_has_waited_its_time_which_costs_nothing_here(self, box, monkeypatch):
        service = box.app.state.service
        monkeypatch.setattr(service, "config", replace(service.config, max_queue_s=0.2))
        body = {"model": "tiny", **BODIES["/v1/completions"], "prompt": "word " * 40}
        box.server.answer = lambda asked: [response(200, {**ANSWER, "usage": {"prompt_tokens": 1}})]
        with busy(box, waiting=0):
            for path, given in (*requests("busy").items(), ("/v1/completions", body)):
                answer = box.ask(path, given, key="rich")
                assert (answer.status_code, answer.headers["x-llmc-answered-by"]) == (200, "upstream"), path
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= RICH - len(box.server.asked)
        again = box.ask("/v1/completions", body, key="rich")
        assert again.headers["x-llmc-answered-by"] == "box" and len(box.server.asked) == len(ROUTES) + 1

    @pytest.mark.parametrize(
        ("error", "status", "by"),
        [
            (ResourceError("others hold the memory"), 200, "upstream"),
            (EngineClosedError("the service is stopping"), 503, "box"),
            (BundleError("it is damaged"), 500, "box"),
        ],
    )
    def test_come_where_room_is_missing_and_not_where_a_model_fails(self, box, monkeypatch, error, status, by):
        def refuse(name: str) -> Any:
            raise error

        monkeypatch.setattr(box.app.state.service.pool, "lease", refuse)
        answer = box.ask("/v1/chat/completions", {"service_tier": "auto", **BODIES["/v1/chat/completions"]})
        assert (answer.status_code, answer.headers["x-llmc-answered-by"]) == (status, by)
        assert ("x-llmc-ignored" in answer.headers) == (by == "box")  # the upstream gets all of it

    def test_of_this_service_say_so_and_so_do_its_refusals(self, box):
        body = {"model": "tiny", **BODIES["/v1/completions"]}
        answers = [
            box.ask("/v1/completions", body),
            box.ask("/v1/completions", {**body, "unknown": 1}),
            box.ask("/v1/completions", body, key="stranger"),
        ]
        assert [answer.status_code for answer in answers] == [200, 400, 401]
        assert {answer.headers["x-llmc-answered-by"] for answer in answers} == {"box"}
        assert box.server.connections == 0

    def test_come_event_by_event(self, box):
        half = event(text("half an event"))
        box.server.answer = lambda asked: [STREAM, chunked(PIECES[0]), half[: len(half) // 2], STALL]
        with httpx.stream(
            "POST", f"{box.url}/v1/completions", json=streamed("/v1/completions"), headers=of("ann")
        ) as got:
            pieces = got.iter_raw()  # whose end would close the connection
            assert next(pieces) == PIECES[0]
            assert not box.server.left.is_set()

    def test_are_refused_with_the_upstreams_own_status(self, box):
        said = {"error": {"message": "too many", "code": "rate_limit_exceeded"}}
        limited = response(429, said).replace(b"\r\n\r\n", b"\r\nRetry-After: 7\r\nSet-Cookie: a=b\r\n\r\n", 1)
        box.server.answer = lambda asked: [limited]
        answer = box.ask("/v1/completions", {"model": "smart", **BODIES["/v1/completions"]})
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, said, "7")
        assert "set-cookie" not in answer.headers

    def test_reach_the_official_clients(self, box):
        chat: Any = [{"role": "user", "content": SAID}]
        with openai.OpenAI(base_url=f"{box.url}/v1", api_key=client_key("ann"), max_retries=0) as client:
            found = client.chat.completions.with_raw_response.create(model="smart", messages=chat, stream=True)
            assert found.headers["x-llmc-answered-by"] == "upstream"
            assert [chunk.choices[0].delta.content for chunk in found.parse()] == ["one", "two"]
        message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "yes"}], **ANSWER}
        box.server.answer = lambda asked: [response(200, message)]
        with anthropic.Anthropic(base_url=box.url, api_key=client_key("ann"), max_retries=0) as other:
            answer = other.messages.create(model="smart", max_tokens=4, messages=chat)
            assert (answer.content[0].text, answer.model) == ("yes", "gpt-5-2026")  # type: ignore[union-attr]


def streamed(path: str) -> dict[str, Any]:
    return {"model": "smart", "stream": True, **BODIES[path]}


class TestRequests:
    @pytest.mark.threat("upstream-privacy")
    def test_carry_the_upstreams_key_and_nothing_of_the_clients(self, box):
        sent = {"cookie": "c=1", "x-forwarded-for": "10.0.0.1", "origin": box.url, "x-stainless-os": "Linux"}
        box.ask("/v1/messages", {"model": "smart", **BODIES["/v1/messages"]}, **sent)
        (asked,) = box.server.asked
        common = {
            "host",
            "connection",
            "content-length",
            "content-type",
            "accept",
            "accept-encoding",
            "user-agent",
            "via",
        }
        assert asked.headers.keys() == {*common, "accept-encoding", "authorization", "x-api-key", "anthropic-version"}
        assert asked.headers["authorization"] == f"Bearer {SECRET}" and asked.headers["x-api-key"] == SECRET
        assert asked.headers["accept-encoding"] == "identity" and asked.headers["user-agent"].startswith("llmc/")

    @pytest.mark.threat("upstream-use")
    def test_read_the_key_anew_and_no_log_shows_it(self, box, settings, tmp_path, caplog):
        with caplog.at_level(logging.DEBUG):
            for key in ("sk-first", "sk-second"):
                settings(upstream_key_file=secret_file(tmp_path, key))
                box.ask("/v1/completions", {"model": "smart", **BODIES["/v1/completions"]})
            settings(upstream_key_file=secret_file(tmp_path, "two\nlines"))
            answer = box.ask("/v1/completions", {"model": "smart", **BODIES["/v1/completions"]})
        assert [asked.headers["authorization"] for asked in box.server.asked] == ["Bearer sk-first", "Bearer sk-second"]
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_key")
        assert caplog.text and not any(word in caplog.text for word in ("sk-first", "sk-second", "two", SAID))

    @pytest.mark.threat("upstream-use")
    def test_are_admitted_here_first(self, box):
        body = {"model": "smart", **BODIES["/v1/completions"]}
        assert box.ask("/v1/completions", body, key="stranger").status_code == 401
        assert box.ask("/v1/completions", {**body, "prompt": "a" * (9 << 20)}).status_code == 413
        assert box.ask("/v1/completions", body, key="limited").status_code == 404
        deep = b'{"model": "smart", "x": ' + b"[" * 99 + b"]" * 99 + b"}"
        sent = {**of("ann"), "content-type": "application/json"}
        assert httpx.post(f"{box.url}/v1/completions", content=deep, headers=sent).status_code == 400
        form = {**of("ann"), "content-type": "text/plain"}
        assert httpx.post(f"{box.url}/v1/completions", content=json.dumps(body), headers=form).status_code == 400
        assert box.server.connections == 0
        several = [box.ask("/v1/completions", {**body, "prompt": ["a"] * 3}, key="few").status_code for _ in range(2)]
        assert several == [200, 429] and box.server.connections == 1

    def test_of_foreign_pages_are_refused_where_no_key_is_asked_for(self, box):
        open_to_all = Guarded(box.app, replace(box.upstream._config, keys_file=None))
        content = [json.dumps({"model": "smart", **BODIES["/v1/completions"]}).encode()]
        sent = {"content-type": "application/json", "content-length": str(len(content[0]))}

        def post(**more: str) -> int:
            return ask(open_to_all, "/v1/completions", method="POST", headers=sent | more, body=content).status

        assert post(origin="https://evil.example") == 403 and box.server.connections == 0
        assert post() == 200 and box.server.connections == 1

    def test_keep_within_the_tokens_of_one(self, box, settings):
        settings(max_request_tokens=8)
        for path, body in requests("model").items():
            assert box.ask(path, body).status_code == 200, path
            unbounded = {name: value for name, value in body.items() if "max" not in name}
            answer = box.ask(path, {**unbounded, "n": 1})
            assert answer.status_code == 404 and f"so give {ROUTES[path][0]}" in answer.text, path
        assert len(box.server.asked) == len(ROUTES)

    @pytest.mark.parametrize(
        ("body", "within"),
        [
            ({"max_tokens": 8}, True),
            ({"max_tokens": 9}, False),
            ({"max_tokens": 4, "n": 2}, True),
            ({"max_tokens": 4, "n": 3}, False),
            ({"max_tokens": 4, "best_of": 3, "n": 1}, False),
            ({"max_tokens": 4, "n": "3"}, False),
            ({"max_tokens": -1}, False),
            ({"max_tokens": True}, False),
            ({"max_tokens": 4, "prompt": ["a", "b"]}, True),
            ({"max_tokens": 4, "prompt": ["a", "b", "c"]}, False),
            ({"max_tokens": 4, "prompt": [1, 2, 3]}, True),
            ({}, False),
        ],
    )
    def test_ask_for_so_many_tokens_over_all_outputs(self, body, within):
        assert _is_within(8, body, ("max_tokens",)) is within

    @pytest.mark.threat("upstream-use")
    def test_pay_for_the_tokens_that_the_answer_tells(self, box):
        body = {"model": "smart", **BODIES["/v1/completions"]}
        answer = box.ask("/v1/completions", body, key="poor")
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")  # 1200 of 1000
        assert box.ask("/v1/completions", body, key="poor").status_code == 429
        assert len(box.server.asked) == 1

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_pay_for_tokens_however_the_answer_is_cut(self, size):
        answer = b'data: {"usage": {"input_tokens": 25, "output_tokens": 1}}\n\n' * 2 + b'{"output_tokens": 310}'
        meter = Meter(sent=4000)
        for at in range(0, len(answer), size):
            meter.take(answer[at : at + size])
        meter.ended = True
        assert meter.tokens == 335

    def test_pay_once_for_what_is_told_by_two_names(self):
        meter = Meter(sent=400)
        meter.take(b'{"prompt_tokens": 25, "completion_tokens": 8, "input_tokens": 25, "output_tokens": 8}')
        meter.ended = True
        assert meter.tokens == 33

    def test_pay_for_the_events_of_an_answer_that_they_leave_before_it_tells_its_tokens(self):
        meter = Meter(sent=4000)
        meter.take(b'event: message_start\ndata: {"usage": {"input_tokens": 25, "output_tokens": 1}}\n\n')
        meter.take(PIECES[0] * 500)
        assert meter.tokens == 25 + 501

    @pytest.mark.threat("upstream-use")
    def test_pay_for_their_prompt_if_they_leave_before_the_answer(self, box):
        body = {"model": "smart", **BODIES["/v1/completions"], "prompt": "a" * 4000}
        box.server.answer = lambda asked: [STALL]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{box.url}/v1/completions", json=body, headers=of("gone"), timeout=0.5)
        assert box.server.left.wait(PATIENCE_S)
        assert box.ask("/v1/completions", body, key="gone").status_code == 429

    def test_pay_by_bytes_and_events_where_nobody_tells(self):
        meter = Meter(sent=400)
        for piece in PIECES:
            meter.take(piece)
        assert meter.tokens == 100 + len(PIECES)


class TestPrivacy:
    @pytest.mark.threat("upstream-privacy")
    @pytest.mark.parametrize("reason", REFUSALS)
    @pytest.mark.parametrize("by", ["key", "header"])
    def test_nothing_of_a_local_only_request_leaves(self, box, reason, by):
        """What the recorder gets without the mark is held by the test of each reason above."""
        key, sent = ("private", {}) if by == "key" else ("ann", {"x-llmc-local-only": "true"})
        for path, body in requests(reason).items():
            for one in (body, {**body, "stream": True}):
                if reason == "busy":
                    with busy(box):
                        answer = box.ask(path, one, key, **sent)
                else:
                    answer = box.ask(path, one, key, **sent)
                status, code = REFUSALS[reason]
                assert answer.status_code == status and answer.headers["x-llmc-answered-by"] == "box", path
                assert path == "/v1/messages" or answer.json()["error"]["code"] == code, path
        assert box.server.connections == 0 and box.server.asked == []
        assert box.count("llmc_upstream_refusals")[reason, "local_only"] > 0

    def test_a_header_that_says_false_changes_nothing_and_any_other_keeps_it_here(self, box):
        body = {"model": "smart", **BODIES["/v1/completions"]}
        for value in ("true", "1", "", "yes"):
            assert box.ask("/v1/completions", body, **{"x-llmc-local-only": value}).status_code == 404
        strict = box.ask("/v1/completions", {**body, "unknown": 1}, **{"x-llmc-local-only": "true"})
        assert (strict.status_code, strict.json()["error"]["param"]) == (400, "unknown")  # as without an upstream
        assert box.server.connections == 0
        assert box.ask("/v1/completions", body, **{"x-llmc-local-only": "False"}).status_code == 200

    def test_official_clients_can_say_so(self, box):
        mark = {"x-llmc-local-only": "true"}
        chat: Any = [{"role": "user", "content": SAID}]
        with openai.OpenAI(base_url=f"{box.url}/v1", api_key=client_key("ann"), max_retries=0) as client:
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="smart", messages=chat, extra_headers=mark)
        with anthropic.Anthropic(base_url=box.url, api_key=client_key("ann"), max_retries=0) as other:
            with pytest.raises(anthropic.NotFoundError):
                other.messages.create(model="smart", max_tokens=4, messages=chat, extra_headers=mark)
        assert box.server.connections == 0

    @pytest.mark.threat("upstream-privacy")
    @pytest.mark.parametrize("name", KEPT)
    def test_what_is_kept_stays_where_it_is(self, box, name):
        answer = box.ask("/v1/responses", {"model": "smart", **BODIES["/v1/responses"], name: "resp_1"})
        assert answer.status_code == 404 and answer.json()["error"]["param"] == name
        assert f"knows nothing of {name}" in answer.json()["error"]["message"]
        assert box.server.connections == 0

    @pytest.mark.threat("upstream-privacy")
    @pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
    def test_what_an_item_refers_to_is_kept_too(self, box, item):
        answer = box.ask("/v1/responses", {"model": "smart", **BODIES["/v1/responses"], "input": [item]})
        assert answer.status_code == 404 and "knows nothing of item_reference" in answer.json()["error"]["message"]
        assert box.server.connections == 0

    def test_a_stored_conversation_beyond_the_context_stays_here(self, box):
        first = box.ask("/v1/responses", {"model": "tiny", "input": "Once", "max_output_tokens": 1})
        more = {"previous_response_id": first.json()["id"], **requests("context")["/v1/responses"]}
        answer = box.ask("/v1/responses", more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "previous_response_id" in answer.json()["error"]["message"] and box.server.connections == 0

    @pytest.mark.threat("upstream-privacy")
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/api/chat", {"model": "smart", "messages": [{"role": "user", "content": SAID}]}),
            ("/v1/embeddings", {"model": "smart", "input": SAID}),
            ("/v1/messages/count_tokens", {"model": "smart", "messages": [{"role": "user", "content": SAID}]}),
            ("/tokenize", {"model": "smart", "prompt": SAID}),
        ],
    )
    def test_other_routes_refuse_as_ever(self, box, path, body):
        assert box.ask(path, body).status_code == 404 and box.server.connections == 0


HEAD = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n"


def raw(status: bytes, body: bytes = b"{}", media: bytes = b"application/json", more: bytes = b"") -> bytes:
    return HEAD % (status, media, len(body), more) + body


# Each is known by what came, whatever the route, and each route has its own words for it: every failure on one route.
FAILURES = [
    ("status", 502, [raw(b"500 Oops", b'{"error": "stack trace"}')]),
    ("status", 502, [raw(b"503 Busy", b"<html>", b"text/html")]),
    ("status", 502, [raw(b"302 Found", more=b"Location: /v1/elsewhere\r\n")]),
    ("key", 502, [raw(b"401 No", b'{"error": "wrong key sk-upst***"}')]),
    ("form", 502, [raw(b"200 OK", b"<script>", b"text/html")]),
    ("form", 502, [raw(b"200 OK", more=b"Content-Encoding: gzip\r\n")]),
    ("broken", 502, [RESET]),
    ("broken", 502, [b"no HTTP at all\r\n\r\n"]),
    ("broken", 502, [HEAD % (b"200 OK", b"application/json", 99, b"") + b'{"half', RESET]),
    ("timeout", 504, [STALL]),
    ("timeout", 504, [HEAD % (b"200 OK", b"application/json", 99, b"") + b'{"half', STALL]),
]


class TestFailures:
    @pytest.mark.threat("upstream-failure")
    @pytest.mark.parametrize(
        ("path", "kind", "status", "pieces"),
        [(path, *failure) for path, failure in zip(cycle(ROUTES), FAILURES, strict=False)],
    )
    def test_are_refused_by_name(self, box, settings, path, kind, status, pieces):
        settings(upstream_timeout_s=0.3 if kind == "timeout" else PATIENCE_S)
        box.server.answer = lambda asked: pieces
        before = box.count("llmc_upstream_failures").get(("model", kind), 0)
        answer = box.ask(path, {"model": "smart", **BODIES[path]})
        assert answer.status_code == status and answer.headers["x-llmc-answered-by"] == "box"
        assert answer.json()["error"]["message"].startswith("the upstream ")
        assert path == "/v1/messages" or answer.json()["error"]["code"] == f"upstream_{kind}"
        assert not any(word in answer.text for word in ("stack trace", "sk-upst", "script", "half"))
        assert len(box.server.asked) == 1  # neither tried again nor followed
        assert box.count("llmc_upstream_failures")["model", kind] == before + 1

    def test_to_end_within_the_deadline_of_all_requests_are_refused(self, box, settings):
        settings(request_deadline_s=0.3)
        for begun in ([], [STREAM, chunked(PIECES[0])]):
            box.server.answer = lambda asked, begun=begun: [*begun, STALL]  # type: ignore[misc]
            answer = box.ask("/v1/completions", streamed("/v1/completions"))
            assert (
                answer.status_code == (200 if begun else 504) and "the upstream did not answer in time" in answer.text
            )

    def test_to_stop_are_refused(self, box, monkeypatch):
        monkeypatch.setattr(upstream, "MOST_BYTES", 100)
        for answer, status in ([response(200, "a" * 100)], 502), ([STREAM, chunked(b"data: " + b"a" * 100), END], 200):
            box.server.answer = lambda asked, answer=answer: answer  # type: ignore[misc]
            found = box.ask("/v1/completions", streamed("/v1/completions"))
            assert (found.status_code, "sent more than 100 bytes at once" in found.text) == (status, True)

    def test_of_an_address_where_nobody_listens(self, box, monkeypatch):
        with planted_server(told) as gone:
            pass
        for address in (gone.url, "https://[v1.x]"):
            monkeypatch.setattr(box.upstream, "_base", address)
            answer = box.ask("/v1/completions", {"model": "smart", **BODIES["/v1/completions"]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_connection")

    @pytest.mark.threat("upstream-failure")
    @pytest.mark.parametrize(
        ("path", "end", "kind"), [*((path, RESET, "broken") for path in ROUTES), ("/v1/responses", STALL, "timeout")]
    )
    def test_amid_a_stream_are_its_last_event(self, box, settings, path, end, kind):
        settings(upstream_timeout_s=0.5 if kind == "timeout" else PATIENCE_S)
        box.server.answer = lambda asked: [STREAM, chunked(PIECES[0] + PIECES[1][:9]), end]
        answer = box.ask(path, streamed(path))
        first, last = answer.text[: len(PIECES[0])], answer.text[len(PIECES[0]) :]
        assert (answer.status_code, first.encode()) == (200, PIECES[0])
        found = json.loads(last.partition("data: ")[2])
        assert found["error"]["message"].startswith("the upstream ")
        assert last.startswith("event: error\n") == (path in ("/v1/messages", "/v1/responses"))

    def test_amid_a_stream_are_raised_by_the_official_clients(self, box):
        chat: Any = [{"role": "user", "content": SAID}]
        box.server.answer = lambda asked: [STREAM, chunked(PIECES[0]), RESET]
        with openai.OpenAI(base_url=f"{box.url}/v1", api_key=client_key("ann"), max_retries=0) as client:
            with pytest.raises(openai.APIError, match="the upstream broke off"):
                list(client.chat.completions.create(model="smart", messages=chat, stream=True))
            with pytest.raises(openai.APIError, match="the upstream broke off"):
                list(client.responses.create(model="smart", input=SAID, stream=True))
        with anthropic.Anthropic(base_url=box.url, api_key=client_key("ann"), max_retries=0) as other:
            with pytest.raises(anthropic.APIStatusError, match="the upstream broke off"):
                list(other.messages.create(model="smart", max_tokens=4, messages=chat, stream=True))

    @pytest.mark.parametrize("begun", [[], [STREAM, chunked(PIECES[0])]], ids=["before", "amid"])
    def test_of_the_client_cancel_the_upstreams_call(self, box, begun):
        box.server.answer = lambda asked: [*begun, STALL]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{box.url}/v1/completions", json=streamed("/v1/completions"), headers=of("ann"), timeout=0.5)
        assert box.server.left.wait(PATIENCE_S)

    def test_of_a_service_that_is_its_own_upstream_end_at_once(self, box, monkeypatch):
        def come_back(asked: Asked) -> Sequence[bytes]:
            again = {"via": f"{asked.headers['via']}, 1.1 proxy", **of("ann")}
            answers.append(httpx.post(f"{box.url}/v1/completions", json=asked.body, headers=again).status_code)
            return told(asked)

        answers: list[int] = []
        box.server.answer = come_back
        assert box.ask("/v1/completions", {"model": "smart", **BODIES["/v1/completions"]}).status_code == 200
        assert answers == [404] and len(box.server.asked) == 1

    @pytest.mark.threat("upstream-use")
    def test_of_services_that_are_each_others_upstream_end_too(self, box):
        other = f"1.1 llmc-{'0' * 16}"
        body = {"model": "smart", **BODIES["/v1/completions"]}
        assert box.ask("/v1/completions", body, via=f"1.1 somebodys-proxy, {other}").status_code == 200
        assert box.server.asked[0].headers["via"] == f"{other}, {box.upstream._via}"

    @pytest.mark.threat("upstream-use")
    def test_of_its_certificate_are_refused_before_anything_is_sent(self, box, monkeypatch, tmp_path):
        cert, key = make_certificate(tmp_path)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(cert, key)
        with planted_server(told, tls) as server:
            monkeypatch.setattr(box.upstream, "_base", f"{server.url}/v1")
            body = {"model": "smart", **BODIES["/v1/completions"]}
            answer = box.ask("/v1/completions", body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_connection")
            assert server.asked == []
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
            monkeypatch.setattr(box.upstream, "_tls", ssl.create_default_context())
            assert box.ask("/v1/completions", body).json() == ANSWER


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "ключ"])
def test_a_key_that_is_none_is_refused_at_the_start(box, tmp_path, content):
    path = secret_file(tmp_path, content)
    with pytest.raises(UsageError, match=r"upstream_key_file .*/secret holds no key") as refusal:
        Upstream(replace(box.upstream._config, upstream_key_file=path), box.app.state.service, None)  # type: ignore[arg-type]
    assert not content or content not in str(refusal.value)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="everybody may read"):
        Upstream(replace(box.upstream._config, upstream_key_file=path), box.app.state.service, None)  # type: ignore[arg-type]


def test_a_websockets_answer_is_the_upstreams_and_goes_on_with_what_was_said(box):
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    whole = {"id": "resp_there", "store": True, "output": [item], "usage": {"input_tokens": 4, "output_tokens": 8}}
    event = (
        b"event: response.completed\ndata: " + json.dumps({"type": "response.completed", "response": whole}).encode()
    )
    box.server.answer = lambda asked: [STREAM, chunked(event + b"\n\n"), END]
    with connect(f"{box.url}/v1/responses".replace("http", "ws", 1), additional_headers=of("ann")) as socket:
        for more in ({}, {"previous_response_id": "resp_there"}, {"previous_response_id": "resp_there"}):
            socket.send(json.dumps({"type": "response.create", "model": "smart", "input": SAID, **more}))
            found = json.loads(socket.recv(timeout=PATIENCE_S))
            assert (found["type"], found["response"]["output"]) == ("response.completed", [item])
        box.server.answer = lambda asked: [response(500, {})]
        socket.send(json.dumps({"type": "response.create", "model": "smart", "input": SAID}))
        failed = json.loads(socket.recv(timeout=PATIENCE_S))
    assert (failed["status"], failed["error"]["code"]) == (502, "upstream_status")
    first, *_, second, _ = box.server.asked  # the upstream uses a name again, which goes on from the first of them
    user = {"role": "user", "content": SAID}
    assert first.body == {"model": "gpt-5", "input": SAID, "stream": True}
    assert (second.body["input"], second.body["previous_response_id"]) == ([user, item, user], None)
