"""Bounds of what requests may ask for."""

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import CapacityLimiter

from llmc.errors import CancelledError, QueueFullError
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.accounts import CLIENT, Bill, Client
from llmc.runtime.server.http.aside import SHORT, room_beside
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.keys import Key
from llmc.runtime.server.models import service
from llmc.runtime.server.models.service import Service, submit_promptly

POOL: Any = None  # nothing here needs a model
BOUNDED = Service(ServerConfig(max_request_tokens=50, request_deadline_s=5.0), POOL)


def test_a_request_may_ask_for_so_many_tokens_of_all_its_outputs():
    assert BOUNDED.bound_sampling({"n": 2, "max_tokens": 25})["max_tokens"] == 25
    assert BOUNDED.bound_sampling({"n": 3})["max_tokens"] == 16
    assert BOUNDED.bound_sampling({"n": 3}, prompts=2)["max_tokens"] == 8
    assert BOUNDED.bound_sampling({"max_tokens": 0})["max_tokens"] == 0  # which the engine refuses by name


@pytest.mark.parametrize(("asked", "param"), [({"max_tokens": 51}, "max_tokens"), ({"n": 51}, "n")])
def test_more_is_refused_by_the_name_of_what_is_too_much(asked: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        BOUNDED.bound_sampling(asked)
    assert refused.value.status == 400 and refused.value.param == param


def test_a_deadline_may_be_shorter_and_not_longer():
    assert BOUNDED.bound_sampling({"deadline_s": 1.0})["deadline_s"] == 1.0
    assert BOUNDED.bound_sampling({"deadline_s": 9.0})["deadline_s"] == 5.0


@pytest.mark.parametrize(("scope", "expected"), [("key", "ann"), ("shared", None)])
async def test_prefixes_are_shared_where_a_setting_says_so(scope: Any, expected: str | None):
    CLIENT.set(Client(Key("ann", b""), lambda bill: None))
    assert Service(ServerConfig(prefix_cache_scope=scope), POOL).bound_sampling({})["prefix_scope"] == expected


async def test_prompts_whose_turn_does_not_come_in_time_all_cost_nothing():
    CLIENT.set(client := Client(None, lambda bill: None))
    waiting: list[Any] = [
        SimpleNamespace(done=False, prompt_tokens=7, most_tokens=9, generated=int, is_waiting=lambda: True)
        for _ in range(2)
    ]
    for handle in waiting:
        handle.result, handle.cancel = _raise_cancelled, lambda it=handle: setattr(it, "done", True)
        client.charge(handle)
    with pytest.raises(QueueFullError, match=r"waited 0[.]1 s for its turn"):
        await Service(ServerConfig(max_queue_s=0.1), POOL).wait_turn(*waiting)
    assert all(handle.done for handle in waiting) and client.bill == Bill()


def _raise_cancelled(timeout: float) -> Any:
    raise CancelledError("it was cancelled")


def took(*given: Any, **named: Any) -> bool:
    """True if what has these arguments is submitted on the event loop's own thread."""

    def submit(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(thread=threading.get_ident(), done=True)

    async def main() -> bool:
        handle: Any = await submit_promptly(partial(submit, *given, **named), CapacityLimiter(1))
        return bool(handle.thread == threading.get_ident())

    return asyncio.run(main())


HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
SEEN = [{"role": "user", "content": [{"type": "image", "image": b""}]}]


def test_a_short_request_is_submitted_without_a_thread():
    assert took(HELLO, max_tokens=4, tools=None, temperature=0.0)
    assert took("Hello", stop=["a", "b"])
    assert took(object(), HELLO, {"max_tokens": 4, "tools": None})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (([{"role": "user", "content": "x" * SHORT}],), {}),
        ((HELLO * SHORT,), {}),
        (([1] * (SHORT + 1),), {}),
        ((HELLO,), {"logit_bias": dict.fromkeys(range(SHORT + 1), 1.0)}),
        ((HELLO,), {"tools": [TOOL]}),
        ((HELLO,), {"grammar": 'root ::= "a"'}),
        ((object(), HELLO, {"tools": [TOOL]}), {}),
        ((SEEN,), {}),
    ],
)
def test_what_may_take_long_to_submit_is_submitted_in_a_thread(given: tuple[Any, ...], named: dict[str, Any]):
    assert not took(*given, **named)


async def test_more_than_may_wait_for_these_threads_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "MOST_WAITING", 2)
    begun, go_on = threading.Event(), threading.Event()

    def submit(*_: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return SimpleNamespace(done=True)

    threads = CapacityLimiter(1)
    asked = [asyncio.create_task(submit_promptly(partial(submit, SEEN), threads)) for _ in range(3)]
    while not begun.is_set() or threads.statistics().tasks_waiting < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(QueueFullError, match="2 requests with grammars or images wait already"):
        await submit_promptly(partial(submit, SEEN), threads)
    assert (await submit_promptly(partial(took_at_once, HELLO), threads)).done  # others go on
    go_on.set()
    assert len(await asyncio.gather(*asked)) == 3


def took_at_once(_: Any) -> Any:
    return SimpleNamespace(done=True)


def test_values_take_room_by_their_characters_and_items():
    assert room_beside({"a": "xyz", "b": [1, None]}, 10) == 10 - (2 + 3 + 2 + 2)
    assert room_beside([["x" * 50]] * 1000, 60) < 0  # and the rest is not looked at


@pytest.mark.parametrize(
    ("settings", "key", "asked", "wanted"),
    [
        ({}, {}, None, True),
        ({}, {}, False, False),
        ({}, {"raw_special": False}, None, False),
        ({}, {"raw_special": False}, True, None),
        ({"raw_special": False}, {}, None, False),
        ({"raw_special": False}, {}, True, None),
        ({"raw_special": False, "allow_special": True}, {}, None, True),
    ],
)
def test_raw_prompts_spell_control_tokens_unless_settings_or_the_key_say_otherwise(
    settings: dict[str, Any], key: dict[str, Any], asked: bool | None, wanted: bool | None
):
    bound = Service(ServerConfig(**settings), POOL).bound_sampling
    sampling = {} if asked is None else {"parse_special": asked}
    token = CLIENT.set(Client(Key("ann", b"", **key), lambda _: None))
    try:
        if wanted is None:
            with pytest.raises(ApiError, match="parse_special is true"):
                bound(sampling, raw=True)
            return
        assert bound(sampling, raw=True)["parse_special"] is wanted
        assert "parse_special" not in bound({})
    finally:
        CLIENT.reset(token)
