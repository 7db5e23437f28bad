"""Bounds of what requests may ask for."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import CancelledError, QueueFullError
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import SHORT, Bill, Call, Client, room_beside
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.keys import Key
from llmc.runtime.server.models.service import Service, Workers

POOL: Any = None  # nothing here needs a model
BOUNDED = ServerConfig(max_request_tokens=50, request_deadline_s=5.0)


def bound(config: ServerConfig, sampling: dict[str, Any], key: Key | None = None, **named: Any) -> dict[str, Any]:
    return Service(config, POOL).bound_sampling(Call(Client(key)), sampling, **named)


def test_a_request_may_ask_for_so_many_tokens_of_all_its_outputs():
    assert bound(BOUNDED, {"n": 2, "max_tokens": 25})["max_tokens"] == 25
    assert bound(BOUNDED, {"n": 3})["max_tokens"] == 16
    assert bound(BOUNDED, {"n": 3}, prompts=2)["max_tokens"] == 8
    assert bound(BOUNDED, {"max_tokens": 0})["max_tokens"] == 0  # which the engine refuses by name


@pytest.mark.parametrize(("asked", "param"), [({"max_tokens": 51}, "max_tokens"), ({"n": 51}, "n")])
def test_more_is_refused_by_the_name_of_what_is_too_much(asked, param):
    with pytest.raises(ApiError) as refused:
        bound(BOUNDED, asked)
    assert refused.value.status == 400 and refused.value.param == param


def test_a_deadline_may_be_shorter_and_not_longer():
    assert bound(BOUNDED, {"deadline_s": 1.0})["deadline_s"] == 1.0
    assert bound(BOUNDED, {"deadline_s": 9.0})["deadline_s"] == 5.0


@pytest.mark.parametrize(("scope", "expected"), [("key", "ann"), ("shared", None)])
def test_prefixes_are_shared_where_a_setting_says_so(scope, expected):
    assert bound(ServerConfig(prefix_cache_scope=scope), {}, Key("ann", b""))["prefix_scope"] == expected


async def test_prompts_whose_turn_does_not_come_in_time_all_cost_nothing():
    client = Client()
    waiting: list[Any] = [
        SimpleNamespace(done=False, prompt_tokens=7, most_tokens=9, generated=int, is_waiting=lambda: True)
        for _ in range(2)
    ]
    for handle in waiting:
        handle.result, handle.cancel = _raise_cancelled, lambda it=handle: setattr(it, "done", True)
        client.charge(handle)
    with pytest.raises(QueueFullError, match=r"waited 0[.]1 s for its turn"):
        await Service(ServerConfig(max_queue_s=0.1), POOL).wait_turn(client, waiting)
    assert all(handle.done for handle in waiting) and client.bill == Bill()


def _raise_cancelled(timeout: float) -> Any:
    raise CancelledError("it was cancelled")


def ended(**more: Any) -> Any:
    """A handle of a request that has ended."""
    return SimpleNamespace(done=True, result=_raise_cancelled, prompt_tokens=0, generated=int, **more)


def took(prompt: Any, **arguments: Any) -> bool:
    """True if such a request is submitted on the event loop's own thread."""

    def start() -> Any:
        return ended(thread=threading.get_ident())

    async def main() -> bool:
        handle: Any = await Service(ServerConfig(), POOL).submit(Client(), prompt, arguments, start)
        return bool(handle.thread == threading.get_ident())

    return asyncio.run(main())


HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
SEEN = [{"role": "user", "content": [{"type": "image", "image": b""}]}]


def test_a_short_request_is_submitted_without_a_thread():
    assert took(HELLO, max_tokens=4, tools=None, temperature=0.0)
    assert took("Hello", stop=["a", "b"])


@pytest.mark.parametrize(
    ("prompt", "arguments"),
    [
        ([{"role": "user", "content": "x" * SHORT}], {}),
        (HELLO * SHORT, {}),
        ([1] * (SHORT + 1), {}),
        (HELLO, {"logit_bias": dict.fromkeys(range(SHORT + 1), 1.0)}),
        (HELLO, {"tools": [TOOL]}),
        (HELLO, {"grammar": 'root ::= "a"'}),
        (SEEN, {}),
    ],
)
def test_what_may_take_long_to_submit_is_submitted_in_a_thread(prompt, arguments):
    assert not took(prompt, **arguments)


GUIDED = {"grammar": 'root ::= "a"'}


class Held:
    """Submits what waits until it is let go; ``begun`` counts."""

    def __init__(self) -> None:
        self.begun, self._go_on = 0, threading.Event()

    def submit(self) -> Any:
        self.begun += 1
        assert self._go_on.wait(60)
        return ended()

    async def ask(self, service: Service, key: str | None, prompt: Any, **arguments: Any) -> asyncio.Task[Any]:
        """A request of a key that is submitted as far as it can be."""
        client = Client(Key(key, b"") if key else None)
        task = asyncio.create_task(service.submit(client, prompt, arguments, self.submit))
        await asyncio.sleep(0.05)
        return task

    async def let_go(self, *tasks: asyncio.Task[Any]) -> None:
        self._go_on.set()
        await asyncio.gather(*tasks)


@pytest.mark.threat("image-cost")
async def test_more_than_may_wait_for_these_threads_are_refused():
    held, service = Held(), Service(ServerConfig(), POOL)
    service.images = Workers("images", threads=1, of_key=1, waiting=2)
    asked = [await held.ask(service, None, SEEN) for _ in range(3)]
    with pytest.raises(QueueFullError, match="2 requests with images wait already"):
        await (await held.ask(service, None, SEEN))
    assert (await service.submit(Client(), HELLO, {}, ended)).done  # others go on
    await held.let_go(*asked)


@pytest.mark.threat("image-cost")
@pytest.mark.parametrize(("prompt", "arguments"), [(SEEN, {}), (HELLO, GUIDED)], ids=["images", "grammars"])
async def test_one_key_leaves_threads_and_places_to_the_others(prompt, arguments):
    held, service = Held(), Service(ServerConfig(), POOL)
    service.images = service.compilers = Workers("work", threads=3, of_key=2, waiting=4)
    asked = [await held.ask(service, "ann", prompt, **arguments) for _ in range(6)]
    assert held.begun == 2
    with pytest.raises(QueueFullError):
        await (await held.ask(service, "ann", prompt, **arguments))
    asked.append(await held.ask(service, "bob", prompt, **arguments))
    assert held.begun == 3
    await held.let_go(*asked)


@pytest.mark.threat("image-cost")
async def test_images_hold_up_no_grammars():
    held, service = Held(), Service(ServerConfig(), POOL)
    asked = [await held.ask(service, None, SEEN) for _ in range(20)]
    begun = held.begun
    asked.append(await held.ask(service, None, HELLO, **GUIDED))
    assert held.begun == begun + 1
    await held.let_go(*asked)


@pytest.mark.threat("key-rights")
@pytest.mark.parametrize(
    ("key", "asked", "granted"),
    [
        (None, -1000, 0),
        (Key("ann", b""), -1, 0),
        (Key("ann", b"", lowest_priority=-10), -1000, -10),
        (Key("ann", b"", lowest_priority=5), 0, 5),
        (None, 7, 7),
        (None, -1001, -1001),
    ],
)
def test_a_priority_is_at_least_the_keys(key, asked, granted):
    """Beyond any range it stays as it is, for the engine to refuse by name."""
    assert bound(ServerConfig(), {"priority": asked}, key)["priority"] == granted


def test_the_log_names_the_adapter_that_was_asked_for():
    manifest = SimpleNamespace(geometry=SimpleNamespace(encoder=None))
    pool: Any = SimpleNamespace(names=("a",), adapters={"sql": "a"}, manifest=lambda name: manifest)
    call = Call()
    assert Service(ServerConfig(), pool).find_for(call, "sql", None) == "sql" == call.fields["model"]


def test_values_take_room_by_their_characters_and_items():
    assert room_beside({"a": "xyz", "b": [1, None]}, 10) == 10 - (2 + 3 + 2 + 2)
    assert room_beside([["x" * 50]] * 1000, 60) < 0  # and the rest is not looked at


@pytest.mark.threat("forged-tokens")
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
def test_raw_prompts_spell_control_tokens_unless_settings_or_the_key_say_otherwise(settings, key, asked, wanted):
    config, ann = ServerConfig(**settings), Key("ann", b"", **key)
    sampling = {} if asked is None else {"parse_special": asked}
    if wanted is None:
        with pytest.raises(ApiError, match="parse_special is true"):
            bound(config, sampling, ann, raw=True)
        return
    assert bound(config, sampling, ann, raw=True)["parse_special"] is wanted
    assert "parse_special" not in bound(config, {}, ann)
