"""A replica without a cluster: its methods are called as Ray would call them."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from doubles.refusals import about

pytest.importorskip("ray.serve", reason="needs Ray Serve")

from llmc.errors import EngineClosedError, GpuError, UsageError
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.fleet import replica as module
from llmc.runtime.server.fleet.calls import BILL, make_call
from llmc.runtime.server.fleet.replica import Replica

Serving = Callable[[], AbstractAsyncContextManager[Replica]]
HEADERS = [(b"content-type", b"application/json")]
CALL: dict[str, Any] = {"type": "http", "path": "/v1/completions", "query_string": b"", "headers": HEADERS}


@pytest.fixture
def serving(tiny_bundle: Path, tmp_path: Path) -> Serving:
    """A replica of a copy of the small model."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[Replica]:
        folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
        found = Replica(ServerConfig(threads=1))
        await found.reconfigure({"models": {"m": str(folder)}, "revision": ""})
        try:
            yield found
        finally:
            await found.close()

    return serving


def ask(replica: Replica, **body: Any) -> Any:
    call = make_call(CALL, json.dumps({"prompt": "def", "temperature": 0, **body}).encode())
    return replica.answer(call.scope, call.body)


async def whole(replica: Replica, **body: Any) -> dict[str, Any]:
    messages = [message async for several in ask(replica, **body) for message in several if message["type"] != BILL]
    assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
    return json.loads(messages[1]["body"])


async def test_the_answer_is_the_applications(serving):
    async with serving() as replica:
        answer = await whole(replica, max_tokens=4)
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("m", 4)
        assert "no_such" in (await whole(replica, no_such=1))["error"]["message"]


async def test_who_stops_reading_cancels_the_request(serving):
    async with serving() as replica:
        messages = ask(replica, max_tokens=1000, ignore_eos=True, stream=True)
        await anext(messages)
        await messages.aclose()
        assert replica._ready_pool.states()["m"].users == 0


async def test_other_bundles_take_over(serving, tiny_bundle, tmp_path):
    async with serving() as replica:

        def loads() -> int:
            return replica._ready_pool.states()["m"].loads

        other = str(shutil.copytree(tiny_bundle, tmp_path / "other"))
        await replica.reconfigure({"models": {"m": other}, "revision": ""})
        assert loads() == 2
        await replica.reconfigure({"models": {"m": other}, "revision": "nothing new"})
        assert loads() == 2
        Path(other).rename(tmp_path / "former")
        shutil.copytree(tiny_bundle, other)
        await replica.reconfigure({"models": {"m": other}, "revision": "built anew"})
        assert loads() == 3
        with pytest.raises(UsageError, check=about("models")):
            await replica.reconfigure({"models": {"n": other}, "revision": ""})


async def test_its_health_is_that_of_engine_and_gpu(serving):
    async with serving() as replica:
        await replica.check_health()
        pool = replica._ready_pool
        pool.lost = GpuError("the GPU fell off the bus", lost=True)
        with pytest.raises(GpuError, match="fell off"):
            await replica.check_health()
        pool.lost = None
        pool.models()["m"].close()
        with pytest.raises(EngineClosedError):
            await replica.check_health()


async def test_without_its_gpu_it_ends_before_it_answers_badly(serving, monkeypatch):
    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(module.os, "_exit", ended)

    async with serving() as replica:
        replica._ready_pool.lost = GpuError("the GPU was lost", lost=True)
        with pytest.raises(SystemExit):
            await whole(replica, max_tokens=1)
