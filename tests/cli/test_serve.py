"""``llmc serve``: flags are the keys of the file, and go before it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.runtime.server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The settings that the service was started with, and no service."""
    found: list[ServerConfig] = []
    monkeypatch.setattr("llmc.sources.built.find_bundle", lambda name, **_: Path(name))
    monkeypatch.setitem(sys.modules, "llmc.runtime.server.run", SimpleNamespace(serve=found.append))
    return found


def test_flags_are_the_settings(llmc, served: list[ServerConfig]):
    ran = llmc(
        "serve", "small=a/b", "c/large", "--port", "0", "--max-body-bytes", "1MiB", "--response-store-bytes", "0",
        "--cors-origins", "https://a.example", "--cors-origins", "https://b.example", "--no-page", "--log-prompts",
        "--determinism", "batch", "--unix-socket", "s", "--drain-s", "1.5",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (config,) = served
    assert config == ServerConfig(
        models={"small": Path("a/b"), "c/large": Path("c/large")},
        port=0,
        max_body_bytes=1 << 20,
        response_store_bytes=0,
        cors_origins=("https://a.example", "https://b.example"),
        page=False,
        log_prompts=True,
        determinism="batch",
        unix_socket=Path("s"),
        drain_s=1.5,
    )


def test_flags_go_before_the_file(llmc, served: list[ServerConfig], tmp_path: Path):
    file = tmp_path / "serve.toml"
    file.write_text("port = 1\npage = false\nlog_prompts = true\nmax_queue = 2\n[models]\ntiny = 'a'\n")
    assert llmc("serve", "--config", str(file), "--port", "3", "--page", "--no-log-prompts").code == 0
    (config,) = served
    assert (config.port, config.page, config.log_prompts, config.max_queue) == (3, True, False, 2)
    assert config.models == {"tiny": tmp_path / "a"}
    assert llmc("serve", "--config", str(file), "other=b").code == 0
    assert served[1].models == {"other": Path("b")} and served[1].page is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port is 70000, expected 0 ... 65535"),
        (["--host", "0.0.0.0"], "--host is '0.0.0.0', which other machines reach, and no key would be asked for"),
        (["--host", "0.0.0.0"], "give keys_file or, if everybody may use the service, allow_no_keys"),
        (["--tls-cert", "c"], "--tls-cert is given without tls_key"),
        (["--max-body-bytes", "big"], "'big' is no size"),
        (["--config", "none.toml"], "'none.toml' does not exist"),
        (["a=x", "a=y"], "BUNDLES has the name 'a' twice"),
        (["a b=x"], "models has the name 'a b', expected letters, digits and . _ : / + @ -"),
        ([""], "BUNDLES has '', which names no model"),
        (["a="], "BUNDLES has 'a=', which names no model"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_flag(llmc, served: list[ServerConfig], arguments: list[str], message: str):
    ran = llmc("serve", "tiny", *arguments)
    assert (ran.code, served) == (2, []) and message in ran.err
