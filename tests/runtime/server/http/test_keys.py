"""API keys: a file that says who may, and a request that must bring one."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from doubles.asgi import Echo, ask

from llmc.errors import UsageError
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.guarded import Guarded
from llmc.runtime.server.http.keys import read_keys

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789abc"
CONTENT = f"""
[alice]
key = "{ALICE}"
[bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
models = ["tiny"]
requests_per_minute = 7
admin = true
"""


def keys_file(folder: Path, content: str = CONTENT, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def app(tmp_path: Path, echo: Echo) -> Guarded:
    return Guarded(echo, ServerConfig(keys_file=keys_file(tmp_path)))


class TestFile:
    def test_has_names_hashes_models_and_rates(self, tmp_path):
        alice, bob = read_keys(keys_file(tmp_path))
        assert (alice.name, alice.models, alice.requests_per_minute) == ("alice", None, None)
        assert (bob.name, bob.requests_per_minute) == ("bob", 7)
        assert bob.admin and not alice.admin
        assert alice.allows("any") and bob.allows("tiny") and not bob.allows("any")
        assert ALICE not in repr(alice)

    @pytest.mark.threat("key-secrecy")
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "has 0 keys"),
            ('[a]\nkey = "short"', r"\[a\]\.key is no 16 ... 512 printable ASCII"),
            (f'[a]\nkey = "{ALICE} with a space"', "key is no 16 ... 512"),
            (f'[a]\nsha256 = "{"A" * 64}"', "sha256 is no 64 hexadecimal digits"),
            ("[a]", "has key and sha256, or neither"),
            (f'[a]\nkey = "{ALICE}"\nsha256 = "{"a" * 64}"', "has key and sha256, or neither"),
            (f'[a]\nkey = "{ALICE}"\nrate = 5', r"\[a\]\.rate is no entry"),
            (f'[a]\nkey = "{ALICE}"\nmodels = "tiny"', "models is 'tiny', expected a list"),
            (
                f'[a]\nkey = "{ALICE}"\ntokens_per_minute = 0',
                "tokens_per_minute is 0, expected an integer from 1 to 1000000000000",
            ),
            (f'[a]\nkey = "{ALICE}"\nrequests_per_minute = 1{"0" * 400}', "requests_per_minute is"),
            (f'[a]\nkey = "{ALICE}"\ntokens_per_minute = 1{"0" * 13}', "tokens_per_minute is"),
            (f'[a]\nkey = "{ALICE}"\nlowest_priority = -1001', "expected an integer from -1000 to 1000"),
            (f'[a]\nkey = "{ALICE}"\nadmin = "yes"', "admin is 'yes', expected true or false"),
            (f'["a b"]\nkey = "{ALICE}"', "is no name, expected letters"),
            (f'a = "{ALICE}"', "is no table"),
            (f'[a]\nkey = "{ALICE}"\n[b]\nkey = "{ALICE}"', "one key under two names"),
            (f'[a]\nkey = "{ALICE}', "is no TOML"),
        ],
    )
    def test_is_read_strictly_and_no_message_shows_a_key(self, tmp_path, content, message):
        with pytest.raises(UsageError, match=message) as refusal:
            read_keys(keys_file(tmp_path, content))
        assert ALICE not in str(refusal.value)

    @pytest.mark.threat("key-secrecy")
    def test_that_others_may_write_or_read_keys_in_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="mode 620, others may write it"):
            read_keys(keys_file(tmp_path, mode=0o620))
        with pytest.raises(UsageError, match="mode 644, everybody may read the keys"):
            read_keys(keys_file(tmp_path, mode=0o644))
        hashes = "[bob]" + CONTENT.partition("[bob]")[2]
        assert len(read_keys(keys_file(tmp_path, hashes, 0o644))) == 1
        assert len(read_keys(keys_file(tmp_path, mode=0o440))) == 2  # as Kubernetes mounts secrets

    def test_that_is_no_regular_file_is_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
            with pytest.raises(UsageError, match=rf"^keys_file {path} cannot be read"):
                read_keys(path)


class TestRequests:
    @pytest.mark.threat("key-secrecy")
    @pytest.mark.parametrize("header", ["Authorization: Bearer {}", "authorization: bearer {}", "x-api-key: {}"])
    def test_with_a_key_reach_the_application_without_it(self, app, echo, header):
        name, _, value = header.format(BOB).partition(": ")
        assert ask(app, headers={name: value}).status == 200
        assert echo.scope is not None
        client = call_of(echo.scope).client
        assert client.name == "bob" and not client.allows("other")
        assert BOB not in repr(echo.scope)

    @pytest.mark.threat("keys")
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/ready", "/openapi.json", "/healthy", "/pages"])
    @pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer sk-nobody-0123456789", f"Basic {ALICE}", "Bearer é"])
    def test_without_one_are_refused_on_every_route(self, app, echo, path, value):
        answer = ask(app, path, headers={} if value is None else {"authorization": value})
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert echo.scope is None

    def test_are_refused_in_the_format_of_their_dialect(self, app):
        answer = ask(app, "/v1/messages", method="POST", headers={"x-request-id": "mine"}, body=[b"{}"])
        assert answer.json["type"] == "error" and answer.json["error"]["type"] == "authentication_error"
        assert answer.json["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"

    def test_to_liveness_and_for_the_page_need_none(self, app, echo, tmp_path):
        for path in ("/health", "/", "/page/app.js"):
            assert ask(app, path).status == 200
            assert ask(app, path, method="POST").status == 401
        hidden = Guarded(echo, ServerConfig(keys_file=keys_file(tmp_path), page=False))
        assert ask(hidden, "/").status == ask(hidden, "/page/app.js").status == 401

    def test_need_none_where_there_is_no_file(self, echo):
        assert ask(Guarded(echo, ServerConfig()), headers={"authorization": "Bearer none"}).status == 200
        assert echo.scope is not None and call_of(echo.scope).client.key is None

    def test_have_a_name_of_their_own_or_the_clients_if_it_is_sane(self, app, echo):
        for asked in ("a b", "x" * 200, "é"):
            assert ask(app, "/health", headers={"x-request-id": asked}).headers["x-request-id"].startswith("req_")


class TestReload:
    @pytest.mark.threat("key-rights")
    def test_takes_new_keys_and_forgets_old_ones(self, app, tmp_path):
        keys_file(tmp_path, '[carol]\nkey = "sk-carol-0123456789"')
        assert ask(app, headers={"x-api-key": ALICE}).status == 200
        app.reload()
        assert ask(app, headers={"x-api-key": ALICE}).status == 401
        assert ask(app, headers={"x-api-key": "sk-carol-0123456789"}).status == 200

    @pytest.mark.threat("key-rights")
    def test_of_a_broken_file_keeps_those_before(self, app, tmp_path):
        keys_file(tmp_path, "[alice]")
        with pytest.raises(UsageError):
            app.reload()
        assert ask(app, headers={"x-api-key": ALICE}).status == 200


def test_a_websocket_is_closed_before_the_application_sees_it(app, echo):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "websocket", "path": "/v1/models", "headers": []}, send, send))
    assert sent == [{"type": "websocket.close"}] and echo.scope is None
