"""Foreign pages: names that they point at this machine, requests that they send, answers they may read."""

from pathlib import Path
from typing import Any

import pytest
from doubles.asgi import Answer, Echo, ask

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded, host_names

KEY = "sk-alice-0123456789"
PAGE = "https://chat.example"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nkey = "{KEY}"\n')
    path.chmod(0o600)
    return path


def asked(host: str, origin: str | None = None, method: str = "POST", headers: Any = None, **settings: Any) -> Answer:
    headers = {"host": host, **({} if origin is None else {"origin": origin}), **(headers or {})}
    return ask(Guarded(Echo(), ServerConfig(**settings)), method=method, headers=headers)


class TestHosts:
    @pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
    def test_that_are_this_machine_are_served(self, host):
        assert asked(host).status == 200

    @pytest.mark.threat("foreign-pages")
    @pytest.mark.parametrize("host", ["evil.example:8000", "", "localhost.evil", "[::1", "127.0.0.1@evil", "a b"])
    def test_that_are_not_are_refused_where_no_key_is_asked_for(self, host):
        answer = asked(host)
        assert answer.status == 400 and answer.json["error"]["code"] == "unknown_host"

    def test_are_those_of_the_settings(self, keys):
        assert asked("box.example", allowed_hosts=("box.example",)).status == 200
        assert asked("localhost", allowed_hosts=("box.example",)).status == 400
        assert asked("box.example", allowed_hosts=("*",)).status == 200
        assert host_names(ServerConfig(keys_file=keys)) is None
        assert host_names(ServerConfig(unix_socket=Path("s"))) is None
        assert host_names(ServerConfig(host="0.0.0.0", allow_no_keys=True)) is None
        assert host_names(ServerConfig(host="127.0.0.2")) == {"localhost", "127.0.0.1", "::1", "127.0.0.2"}


class TestPages:
    @pytest.mark.threat("foreign-pages")
    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "http://localhost:3000", "http://localhost.evil"]
    )
    def test_of_others_are_refused_where_no_key_is_asked_for(self, origin):
        answer = asked("localhost:8000", origin)
        assert answer.status == 403 and answer.json["error"]["code"] == "foreign_origin"

    def test_of_its_own_are_served(self):
        assert asked("localhost:8000", "http://localhost:8000").status == 200
        assert asked("localhost:8000", "https://localhost:8000").status == 200  # behind a proxy that adds TLS
        assert asked("localhost:8000", PAGE, cors_origins=(PAGE,)).status == 200

    def test_of_others_bring_no_key_by_themselves_so_that_they_are_refused_for_that(self, keys):
        assert asked("localhost:8000", "https://evil.example", keys_file=keys).status == 401


class TestAnswers:
    @pytest.mark.threat("foreign-pages")
    def test_are_for_no_foreign_page_by_default(self):
        assert not any(name.startswith("access-control") for name in asked("localhost").headers)
        preflight = asked("localhost", PAGE, "OPTIONS", {"access-control-request-method": "POST"})
        assert preflight.status == 403

    @pytest.mark.threat("foreign-pages")
    def test_are_for_the_origins_of_the_settings_alone(self, keys):
        settings: dict[str, Any] = {"keys_file": keys, "cors_origins": (PAGE,)}
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-new"}
        preflight = asked("any", PAGE, "OPTIONS", wanted, **settings)
        assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-new"
        assert "access-control-allow-credentials" not in preflight.headers
        assert asked("any", "https://evil.example", "OPTIONS", wanted, **settings).status == 400

        refused = asked("any", PAGE, **settings)  # and its page may read why
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == PAGE
        served = asked("any", PAGE, headers={"x-api-key": KEY}, **settings)
        assert served.status == 200 and "x-request-id" in served.headers["access-control-expose-headers"]
        other = asked("any", "https://evil.example", headers={"x-api-key": KEY}, **settings)
        assert "access-control-allow-origin" not in other.headers

    @pytest.mark.parametrize(("origin", "allowed"), [(PAGE, "true"), ("https://evil.example", None)])
    def test_reach_this_machine_from_the_web_for_the_origins_of_the_settings(self, keys, origin, allowed):
        wanted = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
        preflight = asked("any", origin, "OPTIONS", wanted, keys_file=keys, cors_origins=(PAGE,))
        assert preflight.headers.get("access-control-allow-private-network") == allowed
        assert preflight.status == (200 if allowed else 400)
