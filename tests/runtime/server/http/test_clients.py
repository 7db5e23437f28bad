"""What a key may do, in one process and in a fleet: the same guards hold in both."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from doubles.serving import serving
from starlette.types import Message
from websockets.sync.client import connect

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.fleet.calls import Forwarded
from llmc.runtime.server.fleet.front import make_front
from llmc.runtime.server.http.guarded import Guarded

KEYS: dict[str, str] = {
    "limited": 'models = ["small"]',
    "stranger": 'models = ["elsewhere"]',
    "admin": "admin = true",
    "lesser": 'admin = true\nmodels = ["small"]',
    "once": "requests_per_minute = 1",
    "listing": "requests_per_minute = 6",
    "crowd": "tokens_per_minute = 200",
    "greedy": "tokens_per_minute = 5",
    "modest": "tokens_per_minute = 200",
    "leaving": "tokens_per_minute = 400",
    "talking": 'models = ["small"]\ntokens_per_minute = 400',
    "ann": "",
    "ben": "",
    "changed": "",
}
MOST = 512  # tokens of a request
ROUTE = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    ROUTE: {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1},
    "/v1/responses": {"input": "Once", "max_output_tokens": 1, "store": False},
}


class OneReplica:
    """A fleet's only replica, without a cluster: what goes to it and comes back is copied, and nothing else that the
    front knows is known there, as between processes."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        from llmc.runtime.server.fleet.replica import Replica

        self._replica = Replica(config)
        self._replica._app, self._replica._pool = app, app.state.service.pool

    async def answer(self, call: Forwarded) -> AsyncGenerator[list[Message], None]:
        sent: Forwarded = pickle.loads(pickle.dumps(call))
        given: asyncio.Queue[bytes] = asyncio.Queue()

        async def answer() -> None:
            async with aclosing(self._replica.answer(sent.scope, sent.body)) as messages:
                async for several in messages:
                    given.put_nowait(pickle.dumps(several))
            given.put_nowait(pickle.dumps([]))

        answering = Context().run(asyncio.ensure_future, answer())
        try:
            while several := pickle.loads(await given.get()):
                yield several
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


@dataclass
class Served:
    """A service with keys, each named after its client."""

    http: httpx.Client
    keys: Path
    app: Guarded
    kind: str

    def ask(self, name: str, path: str = ROUTE, method: str = "POST", **body: Any) -> httpx.Response:
        content = {**BODIES.get(path, {}), **body} if method == "POST" else None
        return self.http.request(method, path, json=content, headers=headers(name))

    def get(self, name: str, path: str) -> httpx.Response:
        return self.ask(name, path, "GET")


def headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name:-<16}", "anthropic-version": "2023-06-01"}


def write(file: Path, tables: dict[str, str]) -> None:
    file.write_text("".join(f'[{name}]\nkey = "sk-{name:-<16}"\n{rest}\n' for name, rest in tables.items()))
    file.chmod(0o600)


@pytest.fixture(scope="module", params=["process", "fleet"])
def served(request: Any, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "fleet":
        pytest.importorskip("ray.serve", reason="needs Ray Serve")
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(keys, KEYS)
    models = {"secret": tiny_bundle, "small": tiny_bundle}
    config = ServerConfig(models=models, warm=tuple(models), threads=1, keys_file=keys, max_request_tokens=MOST)
    made: list[Guarded] = []

    def around(app: Any, config: ServerConfig) -> Guarded:
        made.append(Guarded(make_front(OneReplica(app, config)) if request.param == "fleet" else app, config))
        return made[0]

    with serving(config, around) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Served(http, keys, made[0], request.param)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


class TestModels:
    @pytest.mark.threat("key-rights")
    @pytest.mark.parametrize("path", BODIES)
    def test_of_others_are_refused(self, served, path):
        refused = served.ask("limited", path, model="secret")
        assert refused.status_code == 403 and "'limited' is not for the model 'secret'" in message_of(refused)
        assert served.ask("limited", path, model="small").status_code == 200

    @pytest.mark.threat("key-rights")
    def test_of_others_are_named_nowhere(self, served):
        lists = ("/v1/models", "/ready", *(("/metrics",) if served.kind == "process" else ()))
        told = [served.get("limited", path) for path in (*lists, "/admin/models")]
        told.append(served.ask("limited", model="none"))
        told.append(served.ask("stranger"))
        assert [answer.status_code for answer in told[-2:]] == [404, 403]
        assert not [answer.text for answer in told if "secret" in answer.text]
        assert all("small" in answer.text for answer in (*told[: len(lists)], told[-2]))
        assert all("secret" in served.get("ann", path).text for path in lists)

    def test_that_nobody_names_are_the_first_that_the_key_is_for(self, served):
        assert [served.ask(name).json()["model"] for name in ("limited", "ann")] == ["small", "secret"]


class TestAdmins:
    @pytest.mark.threat("admin")
    def test_alone_reach_their_routes_which_no_fleet_has(self, served):
        asked = [("GET", ""), ("POST", "/small/reload"), ("POST", "/small/adapters/none/load")]
        found = [
            served.ask(name, f"/admin/models{path}", method).status_code
            for name in ("admin", "ann")
            for method, path in asked
        ]
        assert found == ([200, 200, 400, 403, 403, 403] if served.kind == "process" else [404] * 6)
        if served.kind == "process":
            assert [model["id"] for model in served.get("lesser", "/admin/models").json()["data"]] == ["small"]


class TestRequests:
    @pytest.mark.threat("key-rates")
    def test_at_once_are_counted(self, served):
        with ThreadPoolExecutor(12) as threads:
            found = list(threads.map(lambda _: served.ask("once").status_code, range(12)))
        assert sorted(found) == [200] + [429] * 11

    @pytest.mark.threat("key-rates")
    def test_of_a_list_are_as_many_as_it_has_prompts(self, served):
        answers = [served.ask("listing", prompt=["Once"] * 4) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "6 requests per minute" in message_of(answers[1])

    @pytest.mark.threat("key-rates")
    def test_may_ask_for_so_many_tokens_over_all_prompts(self, served):
        refused = served.ask("ann", prompt=["Once"] * 128, max_tokens=16)
        assert refused.status_code == 400 and "128 outputs" in message_of(refused)
        assert served.ask("ann", prompt=["Once"] * 4, max_tokens=MOST // 4 + 1).status_code == 400


class TestTokens:
    @pytest.mark.threat("key-rates")
    def test_at_once_keep_within_the_rate(self, served):
        body = {"max_tokens": 60, "ignore_eos": True}
        with ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda _: served.ask("crowd", **body), range(20)))
        used = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert sum(used) <= 200 + 10  # the bucket, and what flows in within three seconds

    @pytest.mark.threat("key-rates")
    def test_beyond_a_minutes_are_owed(self, served):
        answers = [served.ask("greedy", max_tokens=20) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[0].headers["x-ratelimit-remaining-tokens"] == "0"

    @pytest.mark.threat("key-rates")
    def test_that_were_not_used_are_given_back(self, served):
        answers = [served.ask("modest", max_tokens=150, choice=["a", "b"]) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3

    @pytest.mark.threat("key-rates")
    def test_of_one_who_leaves_are_those_so_far(self, served):
        body = {**BODIES[ROUTE], "max_tokens": 380, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", ROUTE, json=body, headers=headers("leaving")) as answer:
            next(answer.iter_raw())
        for _ in range(100):  # until the server has noticed
            again = served.ask("leaving", max_tokens=250)
            if again.status_code == 200:
                break
        assert again.status_code == 200
        assert int(again.headers["x-ratelimit-remaining-tokens"]) < 399


@pytest.mark.threat("prefix-privacy")
def test_prefixes_are_cached_for_each_key_alone(served):
    def cached(name: str) -> int:
        usage = served.ask(name, prompt="A story of one who went far away. " * 8).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) > 0 for name in ("ann", "ben", "ann", "ben")] == [False, False, True, True]


@pytest.mark.threat("websocket")
def test_frames_of_a_websocket_are_requests_of_their_key(served):
    def converse(**body: Any) -> dict[str, Any]:
        socket.send(json.dumps({"type": "response.create", **BODIES["/v1/responses"], **body}))
        last: dict[str, Any] = {"type": ""}
        while last["type"] not in ("error", "response.incomplete"):
            last = json.loads(socket.recv(timeout=60))
        return last

    address = f"{served.http.base_url}/v1/responses".replace("http", "ws", 1)
    try:
        with connect(address, additional_headers=headers("talking")) as socket:
            assert converse(model="secret")["error"]["code"] == "model_not_allowed"
            first = converse()["response"]
            assert first["model"] == "small" and not first["store"]
            second = converse(previous_response_id=first["id"], max_output_tokens=300)["response"]
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
            assert converse(max_output_tokens=300, ignore_eos=True)["status"] == 429
            write(served.keys, {name: rest for name, rest in KEYS.items() if name != "talking"})
            served.app.reload()
            assert converse()["error"]["code"] == "invalid_api_key"
    finally:
        write(served.keys, KEYS)
        served.app.reload()
    if served.kind == "process":
        counted = served.get("ann", "/metrics").text.splitlines()
        assert any('route="/v1/responses"' in line and 'status="200"' in line for line in counted)
