"""Lines of the log: what a request cost, where a failure happened, and no word of anybody's unless asked for."""

import asyncio
import io
import json
import logging
import sys
from typing import Any

import httpx2 as httpx
import pytest
from doubles.asgi import ask
from doubles.serving import serving
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from llmc.runtime.api.handle import Handle, OutputCollector
from llmc.runtime.observe.logs import event
from llmc.runtime.server import page
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.keys import Key
from llmc.runtime.server.http.logs import RequestLog, TextFormatter, costs_of, log_to_stderr

SECRET = "a secret"


def answered(app: Any, *, bodies: bool = False, body: bytes = b"") -> None:
    """Have an application answer a request."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": [], "state": {"request_id": "r"}}
    call_of(scope).client.key = Key("ann", b"")
    asyncio.run(RequestLog(app, bodies=bodies)(scope, receive, send))


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    call_of(scope).note(model="m")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"an answer", "more_body": False})


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError(SECRET)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Any:
    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    return read


def test_a_request_leaves_a_line_with_the_name_of_its_key(lines):
    with log_to_stderr("json"):
        answered(fine, body=b"a secret")
    (line,) = lines()
    said = {name: line[name] for name in ("request_id", "key", "method", "status", "model")}
    assert said == {"request_id": "r", "key": "ann", "method": "POST", "status": 200, "model": "m"}
    assert "a secret" not in str(line) and "an answer" not in str(line)


def test_bodies_are_written_where_they_are_asked_for(lines):
    with log_to_stderr("json"):
        answered(fine, bodies=True, body=b"a secret")
    (line,) = lines()
    assert (line["body"], line["answer"]) == ("a secret", "an answer")


@pytest.mark.threat("log-privacy")
@pytest.mark.parametrize("bodies", [False, True])
def test_a_failure_is_written_with_its_place_and_its_message_only_where_bodies_are(bodies, lines):
    with log_to_stderr("json"):
        answered(broken, bodies=bodies)
    failure, line = lines()
    assert (failure["level"], failure["error"], failure["request_id"]) == ("ERROR", "KeyError", "r")
    assert line["status"] == 500
    assert "in broken" in failure["traceback"] and ("a secret" in str(failure)) == bodies


def test_requests_of_supervisors_leave_no_line(lines):
    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        call_of(scope).note(route="/health")
        await fine(scope, receive, send)

    with log_to_stderr("json"):
        answered(health)
    assert lines() == []


def test_the_page_leaves_its_route(lines):
    app = Starlette()
    page.mount(app)  # type: ignore[arg-type]
    with log_to_stderr("json"):
        ask(RequestLog(app), "/")
    assert [line["route"] for line in lines()] == ["/"]


def test_what_clients_say_of_themselves_is_in_the_line(tiny_bundle, lines):
    config = ServerConfig(models={"tiny": tiny_bundle}, threads=1)
    said = {"user": "ann", "safety_identifier": "h4sh", "metadata": {"team": "a\nb"}}
    messages = [{"role": "user", "content": "Hello"}]
    with log_to_stderr("json"), serving(config, lambda app, config: RequestLog(app)) as url:
        bodies = {
            "chat/completions": {"messages": messages, "max_tokens": 1},
            "responses": {"input": messages, "max_output_tokens": 1},
        }
        for path, body in bodies.items():
            assert httpx.post(f"{url}/v1/{path}", json={**body, **said}, timeout=60).status_code == 200
    found = [line for line in lines() if line.get("event", line.get("message")) == "request"]
    assert [{name: line[name] for name in said} for line in found] == [said] * 2


def test_people_get_lines_of_their_own():
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "said", (), None)
    record.created = 0.0
    record.__dict__["llmc_fields"] = {"tokens": 3, "model": "m"}
    assert TextFormatter().format(record).endswith("INFO    said tokens=3 model=m")


FORGED = ["a\n12:00:00 INFO    request status=200", "a status=200", 'a" status=200', "\x1b[2J", "a\rb"]
FORGED += ["\u202eb", "\x85c", "\u2028d"]


@pytest.mark.threat("log-forgery")
@pytest.mark.parametrize("text", FORGED)
@pytest.mark.parametrize("place", ["field", "mapping", "message", "failure"])
def test_no_client_forges_a_line_or_a_field_or_steers_the_terminal(text, place):
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, text if place == "message" else "request", (), None)
    record.__dict__["llmc_fields"] = {"user": {"field": text, "mapping": {text: text}}.get(place, "ann"), "status": 400}
    if place == "failure":
        try:
            raise ValueError(text)
        except ValueError:
            record.exc_info = sys.exc_info()
    first, *rest = TextFormatter().format(record).split("\n")
    assert all(line.startswith("  ") for line in rest) and (place == "failure" or not rest)
    assert "".join([first, *rest]).isprintable()
    fields = first.rpartition(" user=")[2]
    assert fields.endswith(" status=400")
    assert place == "message" or json.loads(f"[{fields.removesuffix(' status=400') if place != 'failure' else 0}]")


def test_people_at_a_terminal_get_them_unless_told_otherwise(monkeypatch, lines):
    with log_to_stderr(None):
        answered(fine)
    assert lines()[0]["status"] == 200
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with log_to_stderr(None):
        answered(fine)
    assert " status=200 " in terminal.getvalue()


def test_of_a_request_that_was_left_the_prompt_counts():
    handle = Handle(OutputCollector(), lambda: None, 1, False)
    handle.prompt_tokens = 7
    handle.token_ids.extend([1, 2])
    costs = costs_of([handle])
    assert (costs["prompt_tokens"], costs["output_tokens"]) == (7, 2)


def test_what_was_logged_before_is_so_again(lines):
    logger = logging.getLogger("llmc.runtime.server")
    with log_to_stderr("text"):
        assert logger.isEnabledFor(logging.INFO)
    event(logger, "nobody hears it")
    assert not logger.isEnabledFor(logging.INFO) and lines() == []
