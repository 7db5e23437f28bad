"""The service as a process: it says when it is ready, loses no request when it stops or swaps, and logs no prompt."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from doubles.clocks import until
from doubles.listening import make_certificate
from doubles.refusals import about
from doubles.services import Process, service_process
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect, unix_connect

from llmc.errors import UsageError
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import Server, open_sockets, serve
from llmc.runtime.server.supervisor import notify

STEP_S = 0.02  # each step of these engines takes longer by so much
ENDLESS = {"prompt": "def", "max_tokens": 500, "ignore_eos": True, "temperature": 0}  # at least ten seconds
RESPONSE = json.dumps({"type": "response.create", "input": "def", "max_output_tokens": 400, "ignore_eos": True})
FIRST_KEY, SECOND_KEY = "sk-first-0123456789", "sk-second-0123456789"
SHORT = {"prompt": "def add(", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that may be replaced."""
    return Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("served") / "bundle"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    """One that has a single row and room for eight more requests."""
    with service_process(STEP_S, models={"m": folder}, max_batch=1, max_queue=8) as found:
        yield found
        assert found.end(signal.SIGINT) == 0


@pytest.fixture
def client(process: Process) -> Iterator[httpx.Client]:
    with process.client() as found:
        yield found
        until(lambda: gauge(found, "llmc_num_requests_running") == 0)


def gauge(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def opened(address: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a streamed completion has begun."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    text = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    return connection


class TestRequests:
    @pytest.mark.threat("model-memory")
    def test_a_client_that_leaves_frees_its_row_at_once(self, process, client):
        before = gauge(client, "llmc_generation_tokens_total")
        opened(process.address, ENDLESS).close()
        until(lambda: gauge(client, "llmc_num_requests_running") == 0)
        assert gauge(client, "llmc_generation_tokens_total") - before < ENDLESS["max_tokens"] / 10

    def test_a_websocket_that_is_closed_frees_its_row_at_once(self, process, client):
        before = gauge(client, "llmc_generation_tokens_total")
        address = process.address.replace("http", "ws", 1)
        with connect(f"{address}/v1/responses") as connection:
            connection.send(RESPONSE)
            while "delta" not in json.loads(connection.recv()):
                pass
        until(lambda: gauge(client, "llmc_num_requests_running") == 0)
        assert gauge(client, "llmc_generation_tokens_total") - before < ENDLESS["max_tokens"] / 10

    def test_one_more_than_may_wait_is_told_when_to_come_again(self, process, client):
        held = [opened(process.address, ENDLESS)]
        body = json.dumps({**ENDLESS, "stream": True}).encode()
        host, _, port = process.address.removeprefix("http://").rpartition(":")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        for _ in range(8):
            held.append(socket.create_connection((host, int(port)), timeout=60))
            held[-1].sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: gauge(client, "llmc_num_requests_waiting") == 8)
        refused = client.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        for connection in held:  # those who wait leave no less than those who run
            connection.close()
        until(lambda: gauge(client, "llmc_num_requests_waiting") == 0)
        assert client.post("/v1/completions", json=SHORT).status_code == 200

    def test_a_deadline_ends_a_request_and_a_stream_in_the_dialects_words(self, client):
        late = {**ENDLESS, "deadline_s": 0.3}
        answer = client.post("/v1/completions", json=late)
        assert answer.status_code == 504 and "the deadline of 0.3 s passed" in answer.json()["error"]["message"]
        streamed = client.post("/v1/completions", json={**late, "stream": True})
        last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
        assert streamed.status_code == 200 and "the deadline" in last["error"]["message"]


class TestLog:
    @pytest.mark.threat("log-privacy")
    def test_has_a_line_for_each_request_and_no_prompt(self, process, client):
        body = {**SHORT, "prompt": "def my_secret(", "user": "ann"}
        client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        client.get("/nowhere?my_secret")
        client.post("/v1/completions", content=b'{"my_secret')
        assert client.post("/v1/completions", json={**SHORT, "user": "ann\nforged"}).status_code == 400
        until(lambda: len([line for line in process.lines("request") if line["status"] in (400, 404, 422)]) == 3)
        line = next(line for line in process.lines("request") if line["request_id"] == "mine-1")
        numbers = {"duration_s", "ttft_s", "prompt_tokens", "cached_tokens", "output_tokens"}
        assert {name for name in line if isinstance(line[name], int | float)} == numbers | {"status"}
        assert (line["method"], line["route"], line["status"], line["model"]) == ("POST", "/v1/completions", 200, "m")
        assert line["user"] == "ann"
        assert line["output_tokens"] == SHORT["max_tokens"] and 0 < line["ttft_s"] < line["duration_s"]
        assert "my_secret" not in process.text and not [line for line in process.lines("request") if "key" in line]


class TestReload:
    def test_swaps_a_bundle_that_was_published_anew_under_load_without_a_failed_request(
        self, process, client, folder, tiny_bundle
    ):
        expected = client.post("/v1/completions", json=SHORT).json()["choices"]
        swapped, answers = threading.Event(), []

        def ask() -> None:
            with process.client() as own:
                while not swapped.is_set():
                    answers.append(own.post("/v1/completions", json=SHORT))
                answers.append(own.post("/v1/completions", json=SHORT))

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            try:
                until(lambda: len(answers) > 4)
                shutil.copytree(tiny_bundle, folder.parent / "next")
                folder.rename(folder.parent / "former")
                (folder.parent / "next").rename(folder)
                process.popen.send_signal(signal.SIGHUP)
                until(lambda: bool(process.lines("model swapped")))
            finally:
                swapped.set()
            for one in asking:
                one.result()
        assert {answer.status_code for answer in answers} == {200}
        assert all(answer.json()["choices"] == expected for answer in answers)
        until(lambda: client.get("/ready").json()["models"]["m"]["draining"] == 0)
        assert client.get("/ready").json()["models"]["m"]["loads"] == 2
        process.hear("RELOADING=1")

    @pytest.mark.threat("publish-damaged")
    def test_of_a_spoilt_bundle_leaves_the_one_that_serves(self, process, client, folder):
        whole = (folder / "llmc.json").read_text()
        (folder / "spoilt").write_text("{}")
        (folder / "spoilt").rename(folder / "llmc.json")
        process.popen.send_signal(signal.SIGHUP)
        until(lambda: "llmc.json" in (client.get("/ready").json()["models"]["m"]["reason"] or ""))
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        (folder / "llmc.json").write_text(whole)


@pytest.mark.threat("wire")
def test_a_rotation_takes_keys_and_certificate_together_or_neither(tiny_bundle, tmp_path):
    old, new = make_certificate(tmp_path / "old"), make_certificate(tmp_path / "new")
    cert, key = (Path(shutil.copy(part, tmp_path)) for part in old)
    keys = tmp_path / "keys.toml"

    def reload(*, times: int) -> None:
        process.popen.send_signal(signal.SIGHUP)
        until(lambda: len(process.lines("reloaded")) == times)

    def serves(pair: tuple[Path, Path], api_key: str) -> bool:
        """True if connections of both versions of TLS, with and without a name, get this certificate."""
        presented = set()
        host, _, port = process.address.removeprefix("https://").partition(":")
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            for name in ("localhost", None):
                context = ssl._create_unverified_context()
                context.minimum_version = context.maximum_version = version
                with socket.create_connection((host, int(port))) as plain:
                    with context.wrap_socket(plain, server_hostname=name) as connection:
                        presented.add(ssl.DER_cert_to_PEM_cert(connection.getpeercert(True) or b""))
        with process.client(verify=False, headers={"x-api-key": api_key}) as client:
            return presented == {pair[0].read_text()} and client.get("/v1/models").status_code == 200

    def rotate_keys(api_key: str) -> None:
        keys.write_text(f'[client]\nkey = "{api_key}"')
        keys.chmod(0o600)

    rotate_keys(FIRST_KEY)
    with service_process(models={"m": tiny_bundle}, tls_cert=cert, tls_key=key, keys_file=keys) as process:
        rotate_keys(SECOND_KEY)
        for times, half in enumerate((new[0].read_text(), "garbage", new[0].read_text()[:200], ""), 1):
            cert.write_text(half)
            reload(times=times)
            assert serves(old, FIRST_KEY), half
        shutil.copy(new[0], cert)
        shutil.copy(new[1], key)
        keys.write_text("[")
        reload(times=5)
        assert serves(old, FIRST_KEY)
        rotate_keys(SECOND_KEY)
        reload(times=6)
        assert serves(new, SECOND_KEY)
        assert len(process.lines("reloaded")) == 6 and process.text.count("stay as they are") == 5


@pytest.mark.threat("reload-flood")
def test_hundreds_of_signals_are_two_reloads():
    """One that runs, and one for whatever changed while it ran."""
    server: Any = Server(uvicorn.Config(lambda: None), *[None] * 3)
    reloads = []

    async def reload() -> None:
        reloads.append(len(reloads))
        await asyncio.sleep(0.05)

    async def main() -> None:
        server._reload = reload
        task = asyncio.ensure_future(server._reload_when_asked())
        with server.capture_signals():
            for _ in range(300):
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0)
            await asyncio.sleep(0.3)
        task.cancel()

    asyncio.run(main())
    assert 1 <= len(reloads) <= 3  # the signals themselves may take longer than one


class TestSupervisor:
    def test_is_told_of_life_and_readiness(self, process):
        process.hear("WATCHDOG=1")
        assert len(process.lines("ready")) == 1

    @pytest.mark.threat("unix-socket")
    def test_that_does_not_listen_is_not_waited_for(self, tmp_path, monkeypatch):
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as deaf:
            deaf.bind(str(tmp_path / "notify"))
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            for _ in range(1000):  # more than the kernel keeps for it
                notify("WATCHDOG=1")
            assert deaf.recv(100) == b"WATCHDOG=1"


class TestStop:
    def test_of_a_socket_that_a_killed_process_left_and_under_load_loses_nothing(self, tiny_bundle, tmp_path):
        place = tmp_path / "llmc.sock"
        with closing(socket.socket(socket.AF_UNIX)) as killed:
            killed.bind(str(place))
        with service_process(STEP_S, models={"m": tiny_bundle}, unix_socket=place) as process:
            assert stat.S_IMODE(place.stat().st_mode) == 0o660
            body = {**SHORT, "max_tokens": 40, "ignore_eos": True}

            def ask(stream: bool) -> httpx.Response:
                with process.client() as own:
                    return own.post("/v1/completions", json={**body, "stream": stream})

            def converse() -> tuple[list[str], int]:
                found: list[str] = []
                with unix_connect(str(place), "ws://localhost/v1/responses") as connection:
                    connection.send(RESPONSE.replace("400", "40"))
                    with pytest.raises(ConnectionClosed) as closed:
                        while True:
                            found.append(json.loads(connection.recv())["type"])
                assert closed.value.rcvd is not None
                return found, closed.value.rcvd.code

            with ThreadPoolExecutor(5) as threads, process.client() as client:
                asked = [threads.submit(ask, stream) for stream in (True, False, True, False)]
                conversing = threads.submit(converse)
                until(lambda: gauge(client, "llmc_num_requests_running") == 5)
                status = process.end()
            answers = [one.result() for one in asked]
            assert status == 0 and not place.exists()
            assert {answer.status_code for answer in answers} == {200}
            assert [answer.text.strip().endswith("data: [DONE]") for answer in answers[::2]] == [True, True]
            kinds, code = conversing.result()
            assert (kinds[-1], code) == ("response.incomplete", 1001)
            process.hear("STOPPING=1")

    def test_tells_requests_that_take_too_long_and_still_ends_well(self, tiny_bundle, certificate):
        cert, key = certificate
        with service_process(STEP_S, models={"m": tiny_bundle}, drain_s=0.2, tls_cert=cert, tls_key=key) as process:
            with ThreadPoolExecutor(2) as threads, process.client(verify=False) as client:
                asked = [
                    threads.submit(client.post, "/v1/completions", json={**ENDLESS, "stream": stream})
                    for stream in (True, False)
                ]
                until(lambda: gauge(client, "llmc_num_requests_running") == 2)
                assert process.end() == 0
                streamed, whole = (one.result() for one in asked)
            last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
            assert (whole.status_code, last) == (503, whole.json()) and "closed" in last["error"]["message"]

    def test_told_twice_ends_at_once_with_all_that_it_had_loaded(self, tiny_bundle):
        models = {"m": tiny_bundle, "n": tiny_bundle}
        with service_process(STEP_S, models=models, warm=("n", "m")) as process:
            assert [line["model"] for line in process.lines("model loaded")] == ["n", "m"]  # before it says ready
            connection = opened(process.address, ENDLESS)
            process.popen.send_signal(signal.SIGTERM)
            process.hear("STOPPING=1")
            assert process.end() == 128 + signal.SIGTERM
            connection.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


class TestListening:
    def test_a_port_that_is_taken_is_named(self):
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            config = ServerConfig(port=taken.getsockname()[1])
            with pytest.raises(UsageError, match=r"127.0.0.1:\d+ cannot be listened on \(Address already in use"):
                with open_sockets(config):
                    pass

    @pytest.mark.threat("unix-socket")
    def test_a_unix_socket_takes_no_place_that_somebody_has(self, tmp_path):
        place = tmp_path / "socket"
        config = ServerConfig(unix_socket=place)
        with open_sockets(config), pytest.raises(UsageError, check=about("unix_socket")):
            with open_sockets(config):
                pass
        place.write_text("notes")
        with pytest.raises(UsageError, match="is there and no socket"):
            with open_sockets(config):
                pass
        assert place.read_text() == "notes"

    def test_a_path_that_is_too_long_is_named(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be listened on"):
            with open_sockets(ServerConfig(unix_socket=tmp_path / ("x" * 120))):
                pass

    def test_takes_the_sockets_that_systemd_opened(self, monkeypatch):
        with closing(socket.create_server(("127.0.0.1", 0))) as given:
            port = given.getsockname()[1]
            monkeypatch.setattr("llmc.runtime.server.supervisor.FIRST", os.dup(given.fileno()))
            for name, value in {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}.items():
                monkeypatch.setenv(name, value)
            with open_sockets(ServerConfig(port=1)) as found:
                assert [one.getsockname()[1] for one in found] == [port]
            assert "LISTEN_FDS" not in os.environ
        monkeypatch.setenv("LISTEN_PID", "1")
        monkeypatch.setenv("LISTEN_FDS", "1")
        with suppress(UsageError), open_sockets(ServerConfig(port=0)) as own:
            assert own[0].getsockname()[1] != port

    def test_a_certificate_that_is_none_is_refused_before_a_model_is_loaded(self, tiny_bundle, tmp_path):
        cert = tmp_path / "cert.pem"
        cert.write_text("nonsense")
        with pytest.raises(UsageError, match=r"tls_cert .* cannot be used"):
            serve(ServerConfig(models={"m": tiny_bundle}, tls_cert=cert, tls_key=cert))
