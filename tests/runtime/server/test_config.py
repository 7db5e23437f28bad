"""Settings of the service: a strict file, flags over it, and what may not be together."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.refusals import about

from llmc.errors import UsageError
from llmc.runtime.server.config import ANY_TOKENS, ServerConfig, describe_values, is_local, read_config, settings
from llmc.sources import is_hub_name


def written(folder: Path, content: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(content)
    return path


class TestFile:
    def test_gives_the_settings_and_flags_win(self, tmp_path):
        path = written(tmp_path, 'port = 9000\nbody_timeout_s = 5\nlog_format = "text"\n[models]\ntiny = "a"\n')
        config = read_config(path, {"port": 9001, "host": None})
        assert (config.port, config.host, config.body_timeout_s) == (9001, "127.0.0.1", 5.0)
        assert config.log_format == "text" and config.models == {"tiny": tmp_path / "a"}

    @pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
    @pytest.mark.parametrize("value", ["[[7]]", f"1{'0' * 400}"], ids=["of another kind", "beyond all numbers"])
    def test_is_refused_with_what_was_found_and_expected(self, tmp_path, setting, value):
        path = written(tmp_path, f"{setting.name} = {value}")
        with pytest.raises(UsageError, check=about(setting.name)) as refused:
            read_config(path)
        found, expected = refused.value.problem.split(", expected ")
        assert refused.value.path == path and found.startswith("is ") and expected == describe_values(setting)

    def test_names_paths_beside_itself(self, tmp_path):
        path = written(tmp_path, 'keys_file = "keys.toml"\ntls_cert = "/etc/c"\ntls_key = "k"\ndraft = "small"\n')
        config = read_config(path)
        assert config.keys_file == tmp_path / "keys.toml" and config.tls_cert == Path("/etc/c")
        assert config.draft == str(tmp_path / "small")
        for word in ("auto", "lookup", "none"):
            assert read_config(written(tmp_path, f'draft = "{word}"')).draft == word

    def test_names_models_of_the_hub_unless_a_folder_beside_it_has_the_name(self, tmp_path):
        (tmp_path / "org" / "local").mkdir(parents=True)
        path = written(tmp_path, 'draft = "org/small"\n[models]\na = "org/model:Q4_K_M"\nb = "org/local"\nc = "c"\n')
        config = read_config(path, is_name=is_hub_name)
        assert config.draft == "org/small"
        assert config.models == {"a": Path("org/model:Q4_K_M"), "b": tmp_path / "org/local", "c": tmp_path / "c"}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("max_bodybytes = 1", "max_bodybytes is no setting; did you mean max_body_bytes?"),
            ("zzz = 1", "zzz is no setting; llmc serve --help lists them"),
            ("port = 65536", "port is 65536, expected 0 ... 65535"),
            ("port = true", "port is True, expected 0"),
            ('port = "80"', "port is '80', expected 0"),
            ("page = 1", "page is 1, expected true or false"),
            ("body_timeout_s = nan", "body_timeout_s is nan, expected 0.1 ... 3600 seconds"),
            ("drain_s = -1", "drain_s is -1, expected 0 ... 86400 seconds"),
            ('log_format = "xml"', "log_format is 'xml', expected one of json, text"),
            ("cors_origins = 'https://a'", "cors_origins is 'https://a', expected a list of texts"),
            ('host = ""', "host is '', expected a text"),
            ('[models]\n"a b" = "x"', "models has the name 'a b', expected letters"),
            ("[models]\na = 1", "models is {'a': 1}, expected names"),
            ("port = ", "cannot be read as settings"),
        ],
    )
    def test_is_refused_by_its_name_and_the_key(self, tmp_path, content, message):
        path = written(tmp_path, content)
        with pytest.raises(UsageError) as refusal:
            read_config(path)
        assert str(path) in str(refusal.value) and message in str(refusal.value)

    def test_that_is_not_there_or_not_utf_8_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be read as settings: No such file"):
            read_config(tmp_path / "none.toml")
        (tmp_path / "serve.toml").write_bytes(b"\xff")
        with pytest.raises(UsageError, match="cannot be read as settings"):
            read_config(tmp_path / "serve.toml")


class TestTogether:
    @pytest.mark.threat("open-by-accident")
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "box.example"])
    def test_other_machines_are_served_with_keys_or_if_asked_to_only(self, host):
        with pytest.raises(UsageError, match=r"no key would be asked for; give keys_file or, .*, allow_no_keys"):
            ServerConfig(host=host)
        assert ServerConfig(host=host, allow_no_keys=True).host == host
        assert ServerConfig(host=host, keys_file=Path("keys.toml")).host == host

    def test_this_machine_is_served_without(self):
        for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1"):
            assert is_local(host) and ServerConfig(host=host).host == host
        assert ServerConfig(unix_socket=Path("s"), host="0.0.0.0")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"tls_cert": Path("c")}, "tls_cert is given without tls_key"),
            ({"tls_key": Path("k")}, "tls_key is given without tls_cert"),
            ({"tls_key": Path("k"), "tls_cert": Path("c"), "unix_socket": Path("s")}, "unix_socket is given beside"),
            ({"models": {"a": Path("a")}, "warm": ("a", "b")}, "warm holds 'b', expected names of models: a"),
            ({"upstream_key_file": Path("k")}, "upstream_key_file is given without upstream"),
            ({"upstream_plain_http": True}, "upstream_plain_http is given without upstream"),
            ({"upstream": "https://a", "ray": True}, "upstream is given beside ray"),
            ({"upstream": "http://box.example/v1"}, "upstream is of http on another machine"),
            ({"upstream": "http://127.0.0.1.example/v1"}, "upstream is of http on another machine"),
            ({"upstream": "https://a", "upstream_models": ("small",)}, "upstream_models holds 'small'"),
            ({"upstream": "https://a", "upstream_models": ("small=",)}, "upstream_models holds 'small='"),
            ({"cors_origins": ("*",)}, "cors_origins holds '\\*'"),
            ({"cors_origins": ("https://a.example/",)}, "cors_origins holds"),
            ({"cors_origins": ("https://A.example",)}, "cors_origins holds"),
        ],
    )
    def test_contradictions_are_refused(self, given, message):
        with pytest.raises(UsageError, match=message):
            ServerConfig(**given)

    @pytest.mark.parametrize(
        "address",
        [
            "api.example",
            "ftp://a/v1",
            "https://",
            "https://u:secret@a/v1",
            "https://a/v1?k=secret",
            "https://a:x/v1",
            "https://a/v1?",
        ],
    )
    def test_an_upstream_is_an_address_and_no_message_shows_what_may_be_secret(self, address):
        with pytest.raises(UsageError, match="upstream is no address of a service") as refusal:
            ServerConfig(upstream=address)
        assert "secret" not in str(refusal.value)

    @pytest.mark.parametrize("address", ["http://localhost:1/v1", "http://[::1]:1/v1", "https://a.example/v1"])
    def test_an_upstream_is_of_https_or_on_this_machine(self, address):
        assert ServerConfig(upstream=address).upstream == address
        assert ServerConfig(upstream="http://box.example/v1", upstream_plain_http=True).upstream


class TestSettings:
    def test_say_what_they_are(self):
        for setting in settings():
            assert setting.help.endswith(".") and setting.help[0].isupper(), setting
            assert describe_values(setting) and setting.flag.startswith("--")
            assert (setting.low is not None) == (setting.kind in ("integer", "number")), setting

    def test_give_the_arguments_of_load_that_were_given(self):
        assert ServerConfig(max_queue=3, memory=10**9).load_options == {
            "determinism": "fast",
            "draft": "auto",
            "max_queue": 3,
            "default_max_tokens": ANY_TOKENS,
        }

    def test_give_each_model_its_format_of_calls(self):
        models = {"a": Path("a"), "b": Path("b")}
        assert ServerConfig(models=models).tool_formats == {}
        assert ServerConfig(models=models, tool_format=["hermes"]).tool_formats == {"a": "hermes", "b": "hermes"}
        both = ServerConfig(models=models, tool_format=["b=olmo3", "hermes"])
        assert both.tool_formats == {"a": "hermes", "b": "olmo3"}

    @pytest.mark.parametrize("given", ["xml", "a=xml", "c=hermes", "hermes=a", ""])
    def test_refuse_a_format_or_a_model_that_is_not_there(self, given):
        with pytest.raises(
            UsageError, match=f"tool_format holds '{given}', expected a format or NAME=FORMAT; .*s are "
        ):
            ServerConfig(models={"a": Path("a")}, tool_format=[given])

    def test_are_frozen_and_can_be_sent_to_another_process(self):
        config = ServerConfig(models={"tiny": Path("a")})
        assert pickle.loads(pickle.dumps(config)) == config
        with pytest.raises(AttributeError):
            config.port = 1  # type: ignore[misc]

    def test_are_listed_without_a_web_package(self):
        code = (
            "import sys, llmc.runtime.server.config as c; c.settings(); "
            "print({'pydantic', 'fastapi', 'starlette', 'uvicorn', 'numpy'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"
