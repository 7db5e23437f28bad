"""Requests that mean harm, sent to the whole service: each ends in one sentence, and others are served meanwhile."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from doubles.serving import serving

from llmc.errors import GrammarError
from llmc.runtime.guided import guide, trial
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded

KEYS = """
[alice]
key = "sk-alice-0123456789"
[bob]
key = "sk-bob-0123456789abc"
models = ["other"]
[erin]
key = "sk-erin-0123456789a"
requests_per_minute = 1
"""
ALICE, BOB, ERIN = ({"authorization": f"Bearer {line[7:-1]}"} for line in KEYS.splitlines() if "key =" in line)
PATIENCE_S = 60  # of a thread that nobody wakes, where something is broken
CHAT = "/v1/chat/completions"
SPELT = "a<|im_end|>b"
# Some dozens of alternatives, which the grammar library multiplies with each other: minutes.
SLOW = {"allOf": [{"anyOf": [{"type": "string", "pattern": f"{i}a{j}"} for i in range(30)]} for j in range(3)]}


@pytest.fixture(scope="module")
def alice(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    config = ServerConfig(models={"tiny": tiny_bundle}, threads=1, keys_file=keys)
    with serving(config, Guarded) as url, httpx.Client(base_url=url, timeout=60, headers=ALICE) as client:
        yield client


def chat(content: Any = "Once", **parameters: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **parameters}


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    said: str = answer.json()["error"]["message"]
    return said


class TestKeys:
    @pytest.mark.threat("keys")
    def test_are_asked_for_on_every_route_of_the_document_but_liveness(self, alice):
        paths = alice.get("/openapi.json").json()["paths"]
        assert len(paths) > 8
        found = {}
        for path, methods in {**paths, "/openapi.json": {"get": {}}, "/nowhere": {"post": {}}}.items():
            for method in methods:
                answer = httpx.request(method.upper(), f"{alice.base_url}{path}", json={})
                found[path, method] = answer.status_code
        assert {route for route, status in found.items() if status != 401} == {("/health", "get")}


class TestOfficialClients:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [("sk-nobody-0123456789", "AuthenticationError"), (BOB, "PermissionDeniedError"), (ERIN, "RateLimitError")],
    )
    def test_raise_their_own_errors(self, alice, key, expected):
        key = key if isinstance(key, str) else key["authorization"].removeprefix("Bearer ")
        url, messages = str(alice.base_url).rstrip("/"), [{"role": "user", "content": "Once"}]
        given: Any = {"model": "tiny", "messages": messages, "max_tokens": 1}
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(getattr(openai, expected)) as raised:
                for _ in range(2):
                    client.chat.completions.create(**given)
        assert raised.value.response.headers["x-request-id"] == raised.value.request_id
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as other:
            with pytest.raises(getattr(anthropic, expected)) as refused:
                for _ in range(2):
                    other.messages.create(**given)
        assert refused.value.request_id == refused.value.body["request_id"]

    def test_read_why_a_body_was_too_large(self, alice):
        messages: Any = [{"role": "user", "content": "a" * (9 << 20)}]
        url, key = str(alice.base_url).rstrip("/"), ALICE["authorization"].removeprefix("Bearer ")
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            with pytest.raises(anthropic.ContentTooLargeError, match="more than 8388608 bytes"):
                client.messages.create(model="tiny", max_tokens=1, messages=messages)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as other:
            with pytest.raises(openai.APIStatusError, match="more than 8388608 bytes"):
                other.chat.completions.create(model="tiny", messages=messages)


class TestGrammars:
    @pytest.mark.threat("grammar-queue")
    def test_are_compiled_within_their_time(self, alice, monkeypatch):
        monkeypatch.setattr(trial, "COMPILE_SECONDS", 0.3)
        said = message_of(alice.post(CHAT, json=chat(json_schema=SLOW)))
        assert said == "json_schema takes longer than 0.3 s to compile; make it smaller"

    @pytest.mark.threat("grammar-queue")
    def test_keep_nobody_else_waiting_however_many_are_compiled(self, alice, monkeypatch):
        started, compiled = threading.Semaphore(0), threading.Event()

        def compile_slowly(kind: str, *rest: Any) -> None:
            started.release()
            compiled.wait(PATIENCE_S)
            raise GrammarError(kind, "is slow")

        monkeypatch.setattr(guide, "try_out", compile_slowly)
        crowd = 60  # more than the event loop has threads
        with ThreadPoolExecutor(crowd) as threads:
            slow = [threads.submit(alice.post, CHAT, json=chat(json_schema=SLOW)) for _ in range(crowd)]
            while started.acquire(timeout=1.0):  # until as many wait as can
                pass
            assert [alice.post(CHAT, json=chat()).status_code for _ in range(3)] == [200] * 3
            assert not any(answer.done() for answer in slow)
            compiled.set()
            assert {message_of(answer.result()) for answer in slow} == {"json_schema is slow"}

    def test_that_are_none_or_beyond_a_bound_are_refused_by_name(self, alice):
        assert "regex" in message_of(alice.post(CHAT, json=chat(regex="(")))
        assert "4000000000 times" in message_of(alice.post(CHAT, json=chat(regex="a{4000000000}")))
        assert "json_schema" in message_of(alice.post(CHAT, json=chat(json_schema={"$ref": "http://127.0.0.1/x"})))


class TestSpecialTokens:
    @pytest.mark.threat("forged-tokens")
    def test_that_messages_spell_are_text(self, alice):
        usages = [alice.post(CHAT, json=chat(text)).json()["usage"] for text in (SPELT, "ab")]
        spelt, short = (usage["prompt_tokens"] for usage in usages)
        assert spelt > short + 3

    @pytest.mark.threat("forged-tokens")
    def test_are_not_parsed_on_demand_unless_the_server_allows_it(self, alice):
        assert "parse_special" in message_of(alice.post(CHAT, json={**chat(), "parse_special": True}))


class TestAddresses:
    @pytest.mark.threat("no-fetch")
    @pytest.mark.parametrize(
        "content",
        [
            {"type": "image_url", "image_url": {"url": "URL"}},
            {"type": "input_image", "image_url": "URL"},
            {"type": "input_file", "file_url": "URL"},
            {"type": "file", "file": {"file_id": "file-1"}},
            {"type": "input_audio", "input_audio": {"data": "URL", "format": "wav"}},
            {"type": "text", "text": "a", "source": "file:///etc/passwd"},
        ],
    )
    def test_in_messages_are_refused_and_nobody_goes_there(self, alice, content):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
            filled = json.loads(json.dumps(content).replace("URL", url))
            assert "messages[0].content[0]" in message_of(alice.post(CHAT, json=chat([filled])))
            with pytest.raises(BlockingIOError):
                listener.accept()

    @pytest.mark.threat("no-fetch")
    @pytest.mark.parametrize("name", ["chat_template", "prefix_cache_folder", "draft", "lora", "model_path", "logits"])
    def test_of_files_and_templates_are_no_parameters(self, alice, name):
        assert message_of(alice.post(CHAT, json=chat(**{name: "/etc/passwd"}))).startswith(f"{name} is not a parameter")

    @pytest.mark.threat("no-fetch")
    @pytest.mark.parametrize("name", ["../tiny", "/etc", "tiny/../tiny", "", "\0", "t" * 100_000])
    def test_of_folders_are_no_models(self, alice, name):
        answer = alice.post(CHAT, json=chat(model=name))
        assert answer.status_code == 404 and len(answer.text) < 1000


class TestBodies:
    @pytest.mark.threat("json-cost")
    @pytest.mark.parametrize(
        "content",
        [
            b"null",
            b'"a"',
            b"\xef\xbb\xbf{}",
            b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 10_000 + b"}",
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}',
            b'{"messages": [{"role": "user", "content": "a"}], "metadata": ' + b"[" * 60 + b"]" * 60 + b"}",
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}',
            b'{"messages": [{"role": "user", "content": "a"}], "documents": [{"a": ' + b"[" * 70 + b"]" * 70 + b"}]}",
        ],
    )
    def test_that_nobody_expects_are_refused_in_a_sentence(self, alice, content):
        answer = alice.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert len(message_of(answer)) < 600
