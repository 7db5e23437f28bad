"""Replicas on a cluster of several nodes, all of them processes of this machine, behind Ray's HTTP proxy."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from doubles.clocks import until

from llmc.bundle import read_bundle, write_manifest
from llmc.errors import UsageError

pytest.importorskip("ray.serve", reason="needs Ray Serve")

# Ray leaves files and sockets to the garbage collector in this process, and uses what it has itself deprecated.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

NAME = f"test-{os.getpid()}"  # of the application, by which its processes are found
CHAT = "/v1/chat/completions"
WAIT_S = 120.0  # for what takes seconds, on a machine that does much else
GROUPS = 4  # of each dialect; without sessions all would meet at one of two replicas once in 2**16 runs
STREAMS, PLAIN = 3, 1
MEMORY = 80 << 20  # of a node's object store, the least that Ray takes; nothing is put there


@pytest.fixture(scope="module")
def folder(tiny_in: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_in("fp32"), tmp_path_factory.mktemp("served") / "bundle"))


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    """What a config file says."""
    own = {"threads": 1, "ray_cpus": 1.9, "ray_min_replicas": 2, "allow_no_keys": True}
    return {**own, "models": {"tiny": str(folder)}}


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT_S)


@pytest.fixture(scope="module")
def url(config: dict[str, Any]) -> Iterator[str]:
    """Two replicas, one on each of two nodes, and a front beside one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # processes for work that never comes
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_worker_niceness", "0")  # or another test process beside this one starves them
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from llmc.runtime.server.fleet.cluster import build

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 3, "include_dashboard": False, "object_store_memory": MEMORY},
        )
        try:
            cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
            ray.init(address=cluster.address, log_to_driver=False)
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            patch.setenv("RAY_ADDRESS", cluster.address)  # for processes that a test starts
            serve.run(build(config), name=NAME)
            yield f"http://127.0.0.1:{port}"
        finally:
            pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_ours(int(entry))}
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()
            until(lambda: not any(_is_ours(pid) for pid in pids))


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with client(url) as http:
        yield http


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_ours(pid: int) -> bool:
    return f"ray::ServeReplica:{NAME}:" in _command(pid)


def replicas() -> list[int]:
    """Processes of the replicas."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if f"ray::ServeReplica:{NAME}:replicas" in _command(pid)]


def chat(group: int, **given: Any) -> dict[str, Any]:
    """A request whose prompt begins as those of its group do, and as no other one."""
    messages = [{"role": "user", "content": words(group)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True, **given}


def words(group: int) -> str:
    return f"group {group}: " + f"{group} and {group * 7} " * 30


# Requests of one token by route, and where the answer tells how many of the prompt's were cached.
DIALECTS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[Any], int]]] = {
    CHAT: (
        lambda text: {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "/v1/completions": (
        lambda text: {"model": "tiny", "prompt": text, "max_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "/v1/messages": (
        lambda text: {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1},
        lambda answer: answer["usage"]["cache_read_input_tokens"],
    ),
    "/v1/responses": (
        lambda text: {"model": "tiny", "input": text, "max_output_tokens": 1, "store": False},
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
    ),
}


@dataclass
class Load:
    """Clients that ask again and again, and what they got."""

    url: str
    answers: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # texts, by group and kind
    broken: list[int] = field(default_factory=list)  # streams that ended with an error, after how many characters
    failed: list[str] = field(default_factory=list)  # everything else
    count: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def plain(self, group: int) -> None:
        with client(self.url) as http:
            while not self.stop.is_set():
                answer = http.post(CHAT, json=chat(group, max_tokens=8))
                if answer.status_code != 200:
                    self.failed.append(answer.text)
                else:
                    self._note(group, 8, answer.json()["choices"][0]["message"]["content"])

    def stream(self, group: int) -> None:
        with client(self.url) as http:
            while not self.stop.is_set():
                self._stream(http, group)

    def _stream(self, http: httpx.Client, group: int) -> None:
        text, last = "", ""
        with http.stream("POST", CHAT, json=chat(group, max_tokens=64, stream=True)) as answer:
            for line in answer.iter_lines():
                last = line or last
                if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                    text += choices[0]["delta"].get("content", "")
        if last == "data: [DONE]":
            self._note(group, 64, text)
        elif "replica_lost" in last:
            self.broken.append(len(text))
        else:
            self.failed.append(last)

    def _note(self, group: int, tokens: int, text: str) -> None:
        self.count += 1
        self.answers.setdefault((group, tokens), set()).add(text)


@contextmanager
def under_load(url: str) -> Iterator[Load]:
    """Requests that run for as long as the block, and some of each kind before and after what it does."""
    load = Load(url)
    with ThreadPoolExecutor(STREAMS + PLAIN) as threads:
        running = [threads.submit(load.stream, group) for group in range(STREAMS)]
        running += [threads.submit(load.plain, group) for group in range(PLAIN)]
        try:
            until(lambda: load.count > STREAMS + PLAIN)
            yield load
            before = load.count
            until(lambda: load.count > before + STREAMS + PLAIN)
        finally:
            load.stop.set()
    for one in running:
        one.result()


@pytest.mark.threat("open-by-accident")
def test_a_fleet_for_others_needs_keys(tmp_path):
    from llmc.runtime.server.fleet.cluster import build

    with pytest.raises(UsageError, match="no key would be asked for"):
        build({"models": {"tiny": str(tmp_path)}})


def test_a_stream_comes_as_it_is_made(http):
    with http.stream("POST", CHAT, json=chat(0, max_tokens=256, stream=True)) as answer:
        pieces = list(answer.iter_raw())
    assert len(pieces) > 50
    assert b"[DONE]" in pieces[-1] and b"[DONE]" not in b"".join(pieces[:-1])


def test_requests_that_begin_alike_meet_at_one_replica(http):
    for number, (route, (body, cached)) in enumerate(DIALECTS.items()):
        for group in range(number * GROUPS, (number + 1) * GROUPS):  # prompts that no other dialect has
            asked = {"json": body(words(group)), "headers": {"anthropic-version": "2026-10-21"}}
            answers = [http.post(route, **asked).json() for _ in range(2)]
            assert cached(answers[1]) > 64, route


def test_a_replica_killed_under_load_takes_nothing_with_it_but_streams_that_had_begun(url):
    known = replicas()
    assert len(known) == 2
    with under_load(url) as load:
        os.kill(known[0], signal.SIGKILL)
        until(lambda: known[0] not in replicas())
    assert load.failed == []
    assert len(load.broken) <= STREAMS
    assert all(len(texts) == 1 for texts in load.answers.values())  # also of those that were asked for twice


def test_replicas_of_other_settings_take_over_without_a_failed_request(url, http, config):
    from ray import serve

    from llmc.runtime.server.fleet.cluster import build

    known = replicas()
    with under_load(url) as load:
        serve.run(build({**config, "max_context": 512}), name=NAME)
        until(lambda: len(replicas()) == 2 and not {*known} & {*replicas()})
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert load.failed == [] and load.broken == []
    assert all(len(texts) == 1 for texts in load.answers.values())


def test_a_bundle_built_anew_takes_over_without_a_failed_request(url, http, folder):
    from ray import serve

    from llmc.runtime.server.fleet.cluster import RayReplicas

    def prints() -> set[str]:
        return {http.post(CHAT, json=chat(group, max_tokens=1)).json()["system_fingerprint"] for group in range(GROUPS)}

    fleet = RayReplicas(serve.get_deployment_handle("replicas", NAME))
    with under_load(url) as load:
        following = Path(shutil.copytree(folder, folder.with_name("next")))
        manifest = read_bundle(following)
        write_manifest(replace(manifest, source=replace(manifest.source, fingerprint="e" * 64)), following)
        folder.rename(folder.with_name("former"))
        following.rename(folder)
        assert list(asyncio.run(fleet.refresh()).values()) == [None, None]
        assert prints() == {"fp_eeeeeeeeeeee"}
    assert load.failed == [] and load.broken == []
    assert all(len(texts) == 1 for texts in load.answers.values())


def test_the_command_serves_from_replicas_of_its_own_and_takes_them_with_it(url, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "llmc.cli", "serve", "--ray", "--ray-address=auto", "--ray-cpus=0.3"]
    process = subprocess.Popen(
        [*command, "--threads=1", f"--port={own.rpartition(':')[2]}", f"tiny={folder}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            with httpx.Client(base_url=own, timeout=WAIT_S) as http:
                until(lambda: process.poll() is not None or _ready(http))
                answer = http.post(CHAT, json=chat(0, max_tokens=4, stream=True))
                assert answer.text.endswith("data: [DONE]\n\n")
                process.send_signal(signal.SIGHUP)
                assert http.post(CHAT, json=chat(0, max_tokens=4)).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, said
    events = [json.loads(line)["message"] for line in said.splitlines() if line.startswith("{")]
    assert {"ready", "reloaded", "stopped"} <= {*events}
    until(
        lambda: not any("ray::ServeReplica:llmc:" in _command(int(pid)) for pid in os.listdir("/proc") if pid.isdigit())
    )


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
