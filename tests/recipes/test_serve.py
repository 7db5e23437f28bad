"""Files to deploy the service with say what the service says: settings, paths, commands, ports, times."""

import json
import re
import shutil
import ssl
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, get_origin, get_type_hints

import pytest
from doubles.listening import make_certificate

from llmc.cli.main import cli
from llmc.runtime.observe.metrics import EngineSnapshot, Gauges
from llmc.runtime.server.config import read_config

FOLDER = Path(__file__).parents[2] / "recipes" / "serve"


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    """Settings of the unit's service; some come several times."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Z]\w+)=(.*)$", (FOLDER / "llmc.service").read_text(), re.M):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """Instructions of each stage of the Containerfile."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest.strip()))
    return found


def instruction(stage: list[tuple[str, str]], name: str) -> str:
    return next(rest for found, rest in reversed(stage) if found == name)


@pytest.mark.parametrize("name", ["llmc.service", "llmc.socket"])
def test_systemd_finds_nothing_wrong(name, tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    for file in FOLDER.glob("llmc.*"):
        text = file.read_text().replace("/opt/llmc/bin/llmc", sys.executable)
        (tmp_path / file.name).write_text(text)
    done = subprocess.run([analyze, "verify", tmp_path / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_may_write_where_its_settings_say(unit):
    settings = read_config(FOLDER / "serve.toml")
    assert unit["CacheDirectory"] == ["llmc"] and "LLMC_CACHE=/var/cache/llmc" in unit["Environment"][0]
    assert settings.prefix_cache_folder is not None and settings.prefix_cache_folder.is_relative_to("/var/cache/llmc")


def test_the_container_runs_a_command_that_exists_as_nobody_of_note(stages):
    build, last = stages
    command = json.loads(instruction(last, "ENTRYPOINT")) + json.loads(instruction(last, "CMD"))
    assert command == ["/opt/llmc/bin/llmc", "serve", "--config", "/etc/llmc/serve.toml"]
    assert "serve" in cli.list_commands(None)  # type: ignore[arg-type]
    user, _, group = instruction(last, "USER").partition(":")
    assert int(user) > 1000 and int(group) > 1000
    copied = [rest.split() for name, rest in last if name == "COPY"]
    assert copied[0] == ["--from=build", "/opt/llmc", "/opt/llmc"] and copied[1][1] == command[-1]
    assert json.loads(instruction(last, "HEALTHCHECK").partition("CMD ")[2])[1] == copied[2][1]
    assert all((FOLDER.parents[1] / copy[0]).is_file() for copy in copied[1:])
    extras = re.findall(r"\[([\w,]+)\]", instruction(build, "RUN"))[0].split(",")
    declared = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.M) for extra in extras)


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check_asks_with_and_without_tls_and_with_a_key(tls, tmp_path, monkeypatch):
    asked: list[tuple[str, str | None]] = []

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*make_certificate(tmp_path))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    environment = {"PORT": str(server.server_port), "PROBE_KEY": "k\n"}
    codes = [
        subprocess.run([sys.executable, FOLDER / "health.py", *path], env=environment, capture_output=True).returncode
        for path in ([], ["/ready"])
    ]
    server.shutdown()
    server.server_close()
    assert codes == [0, 1] and asked == [("/health", "Bearer k"), ("/ready", "Bearer k")]


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    kinds = (EngineSnapshot, Gauges)
    hints = [hint for kind in kinds for hint in get_type_hints(kind, include_extras=True).values()]
    stated = [hint.__metadata__[0] for hint in hints if get_origin(hint) is Annotated]
    known = {f"llmc_{metric.name}" for metric in stated}
    known |= {"llmc_http_requests_total", "llmc_model_state"}
    known |= {f"{name}{end}" for name in known for end in ("_bucket", "_total")}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert asked and {name for text in asked for name in re.findall(r"llmc_\w+", text)} <= known
    labels = {metric.label for metric in stated} | {"le", "model_name", "route", "status"}
    grouped = {name for text in asked for by in re.findall(r"by \((.*?)\)", text) for name in by.split(", ")}
    assert grouped <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def secret_file(compose: Any) -> str:
    """The file of keys, from the folder that the image is built in."""
    return str(Path("recipes") / "serve" / compose["secrets"]["llmc_keys"]["file"])


def test_compose_gives_what_the_settings_name_and_no_more():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service, settings = compose["services"]["llmc"], read_config(FOLDER / "container.toml")
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["ports"] == [f"127.0.0.1:8000:{settings.port}"]
    # The folder around the bundle, or a bundle that is built anew would not be seen.
    assert service["volumes"][0].endswith(f":{settings.models['default'].parent}:ro")
    assert secret_file(compose) in (FOLDER / "Containerfile.dockerignore").read_text().split()
    assert str(settings.keys_file) == f"/run/secrets/{service['secrets'][0]}"
    context = (FOLDER / service["build"]["context"]).resolve()
    assert (context / service["build"]["dockerfile"]).is_file()
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.drain_s + 15
