"""The service behind every dialect: its models, its threads, and the bounds of what a request may ask for."""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from anyio import CapacityLimiter, move_on_after, sleep, to_thread
from fastapi import Depends
from starlette.requests import Request

from llmc.errors import QueueFullError, format_value
from llmc.runtime import Handle, Model
from llmc.runtime.api.request import MOST_PRIORITY
from llmc.runtime.server.http.call import SHORT, Call, Client, room_beside
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.models.response_store import ResponseStore

if TYPE_CHECKING:
    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.models.pool import Pool

H = TypeVar("H", bound=Handle)
T = TypeVar("T")
GUIDES = ("json_schema", "regex", "grammar", "choice", "tools")  # arguments of which grammars are made
_PREFIXED = re.compile("(?:call|toolu)_(?=[A-Za-z0-9]{9}$)")
TURN_POLL_S = 0.01
# Models' work by the kind of their results; None is that of models that generate.
WORK = {None: "generates text", "embeddings": "embeds texts", "scores": "ranks documents"}
# Requests for vectors or scores that are computed at once: a model's calls take turns, and a second one tokenizes.
ENCODING_THREADS = 2


class Workers:
    """Threads for one kind of slow work, of which each key has some at most, so that no key holds up the others.

    Args:
        kind: the requests with this work, for errors.
        threads: for all keys together, and for requests without keys.
        of_key: for each key.
        waiting: requests of a key that may wait; one more is refused.
    """

    def __init__(self, kind: str, threads: int, of_key: int, waiting: int) -> None:
        self._kind, self._of_key, self._waiting = kind, of_key, waiting
        self._all = CapacityLimiter(threads)
        self._keys: dict[str, CapacityLimiter] = {}

    async def run(self, client: Client, work: Callable[[], T]) -> T:
        """Run a client's work. Raises QueueFullError: as many of its requests wait already as may."""
        name = client.name
        own = self._all if name is None else self._keys.setdefault(name, CapacityLimiter(self._of_key))
        if (waiting := own.statistics().tasks_waiting) >= self._waiting:
            raise QueueFullError(f"{waiting} requests with {self._kind} wait already; try again later")
        if own is self._all:
            return await to_thread.run_sync(work, limiter=own)
        async with own:
            return await to_thread.run_sync(work, limiter=self._all)


class Service:
    """The part that all routes share."""

    def __init__(self, config: "ServerConfig", pool: "Pool") -> None:
        self.config = config
        self.pool = pool
        self.started = int(time.time())
        self.encoding = CapacityLimiter(ENCODING_THREADS)
        """Threads of requests for vectors and scores, which have no queue of an engine."""
        # A text takes a hundred times its memory while it is tokenized.
        self.tokenizing = Workers("prompts to count", threads=2, of_key=1, waiting=256)
        # Two grammars are tried at once, and each may take seconds; as many wait as wait for rows by default.
        self.compilers = Workers("grammars", threads=8, of_key=4, waiting=256)
        # Images are decoded one at a time, and computed one of each model; those that wait hold their bodies.
        self.images = Workers("images", threads=4, of_key=2, waiting=64)
        self.responses = ResponseStore(config.response_store_bytes)
        self.draining = False
        """True once the server goes down: running requests finish, and balancers are to send no more."""

    @property
    def warm(self) -> tuple[str, ...]:
        """Names of the models that are loaded at the start."""
        return self.config.warm or self.pool.names[:1]

    @property
    def is_ready(self) -> bool:
        """True if requests may come: the models of the start are loaded, the GPU is there, and the server stays."""
        states = self.pool.states()
        loaded = all(states[name].loads > 0 and states[name].phase != "failed" for name in self.warm)
        return not self.draining and self.pool.lost is None and loaded

    def names(self, client: Client) -> tuple[str, ...]:
        """Models that the client's key is for, and adapters after them."""
        return tuple(filter(client.allows, (*self.pool.names, *self.pool.adapters)))

    def find(self, client: Client, asked: str | None, *, adapters: bool = True) -> str:
        """The name of the model or adapter asked for; the client's first one if none was.

        Args:
            adapters: False to accept models only.

        Raises:
            ApiError: 404, there is no such model; 403, the client's key is not for it.
        """
        served = (*self.pool.names, *self.pool.adapters) if adapters else self.pool.names
        if asked in served:
            client.check_model(asked)
            return asked
        known = tuple(filter(client.allows, served))
        if asked is not None:
            message = f"the model {asked[:100]!r} is not here, expected {', '.join(known) or 'another key'}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if not known:
            raise ApiError(403, "the key is for none of the models here; use another one", code="model_not_allowed")
        return known[0]

    def find_for(self, call: Call, asked: str | None, wanted: str | None) -> str:
        """:meth:`find` a model that does this work, without loading it, and log its name.

        Args:
            wanted: a key of :data:`WORK`.

        Raises:
            ApiError: as :meth:`find`; 400, the model does something else.
        """
        name = self.find(call.client, asked)
        encoder = self.pool.manifest(name).geometry.encoder
        result = encoder.result if encoder else None
        if result != wanted:
            message = f"the model {name!r} {WORK[result]}, expected one that {WORK[wanted]}"
            raise ApiError(400, f"{message}; GET /v1/models lists what there is", param="model")
        call.note(model=name)
        return name

    async def count_tokens(
        self, call: Call, asked: str | None, names: Mapping[str, str], tokenize: Callable[[Model], list[int]]
    ) -> int:
        """Count the tokens of a prompt in one of few threads; they are charged as a prompt's.
        ``names``: the dialect's own names of parameters."""
        async with self.pool.lease(self.find_for(call, asked, None)) as model:
            with name_parameters(names):
                count = await self.tokenizing.run(call.client, lambda: len(tokenize(model)))
        call.client.spend(tokens=count)
        return count

    def bound_sampling(
        self, call: Call, sampling: dict[str, Any], prompts: int = 1, *, raw: bool = False
    ) -> dict[str, Any]:
        """Sampling arguments within what this server lets a request ask for, and the scope of its cached prefixes. A
        priority before the key's is set to the key's.

        Args:
            raw: the prompt goes to the model without a chat template; special tokens that it spells are special tokens
                unless the request, the settings or the key say otherwise.

        Raises:
            ApiError: 400, more new tokens, of all outputs to all prompts, than ``max_request_tokens``, or special
                tokens that a text spells, where the server does not allow it; 429, each prompt is a request, and the
                key's rate has no room for them.
        """
        client, key = call.client, call.client.key
        allowed = self.config.allow_special or (raw and self.config.raw_special and (key is None or key.raw_special))
        if sampling.get("parse_special") and not allowed:
            raise ApiError(400, "parse_special is true, which this server does not allow", param="parse_special")
        if raw:
            sampling = {"parse_special": allowed, **sampling}
        most, longest = self.config.max_request_tokens, self.config.request_deadline_s
        if most is not None:
            sampling = {**sampling, "max_tokens": _bound_tokens(most, sampling, prompts)}
        if longest is not None:
            sampling = {**sampling, "deadline_s": min(sampling.get("deadline_s", longest), longest)}
        lowest = key.lowest_priority if key else 0
        if -MOST_PRIORITY <= sampling.get("priority", 0) < lowest:
            call.ignore("priority")
            sampling = {**sampling, "priority": lowest}
        if prompts > 1:
            client.spend(requests=prompts - 1)
        return {**sampling, "prefix_scope": None if self.config.prefix_cache_scope == "shared" else client.name}

    async def submit(self, client: Client, prompt: Any, arguments: Mapping[str, Any], start: Callable[[], H]) -> H:
        """Submit a request, inline if it is short: waking a thread takes as long as a short prompt's work, while
        tokenizing, a chat template or a grammar may take long.

        Requests with a grammar and those with images have threads of their own, so that any number of slow ones keeps
        no other waiting.

        Args:
            prompt: what the model reads: messages, text or tokens.
            start: submits it.

        Raises:
            QueueFullError: too many wait for these threads already.
        """
        if _holds_image(prompt):
            handle = await self.images.run(client, start)
        elif any(arguments.get(name) is not None for name in GUIDES):
            handle = await self.compilers.run(client, start)
        elif room_beside([prompt, arguments], SHORT) >= 0:
            handle = start()
        else:
            handle = await to_thread.run_sync(start)
        client.charge(handle)
        return handle

    async def wait_turn(self, client: Client, handles: Sequence[Handle]) -> None:
        """Wait for the turn of the first part of a request where the settings bound that wait.
        Raises QueueFullError: it did not come in time; all are cancelled, and cost nothing."""
        most = self.config.max_queue_s
        if most is None:
            return
        with move_on_after(most):
            while handles[0].is_waiting() and not handles[0].done:
                await sleep(TURN_POLL_S)
            return
        for handle in handles:
            handle.cancel()
            client.spend(tokens=-handle.prompt_tokens)
        raise QueueFullError(f"the request waited {most:g} s for its turn, as long as it may; try again later")


def _bound_tokens(most: int, sampling: Mapping[str, Any], prompts: int) -> int:
    """New tokens of each output. Raises ApiError: 400, all outputs together have more than ``most``."""
    outputs = prompts * max(sampling.get(name) or 1 for name in ("n", "best_of", "num_beams"))
    if outputs > most:
        message = f"{format_value(outputs)} outputs are asked for, of which this server allows {most} tokens"
        raise ApiError(400, f"{message}; ask for fewer", param="n" if prompts == 1 else "prompt")
    asked: int = sampling.get("max_tokens", most // outputs)
    if asked * outputs > most:
        given = f"{format_value(asked)} tokens of {outputs} outputs" if outputs > 1 else format_value(asked)
        message = f"max_tokens is {given}, this server allows {most}; ask for less"
        raise ApiError(400, message, param="max_tokens")
    return asked


def _holds_image(prompt: object) -> bool:
    """True for messages of which one has parts: texts alone are one."""
    return isinstance(prompt, list) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in prompt
    )


async def service_of(request: Request) -> Service:
    """The service that answers a request; FastAPI would call a dependency that is not async in a thread."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(service_of)]


def new_id(prefix: str) -> str:
    """A name for an answer or a part of one, as ``resp_...``."""
    return prefix + secrets.token_hex(12)


def plain_id(call: str) -> str:
    """Strip the prefix that a dialect gave a call's id: some templates take only nine letters and digits."""
    return _PREFIXED.sub("", call)
