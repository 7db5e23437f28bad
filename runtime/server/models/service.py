"""The service behind every dialect: models for requests, held while they are answered, and bounds of what is asked."""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from anyio import CapacityLimiter, move_on_after, sleep, to_thread
from fastapi import Depends
from starlette.requests import Request

from llmc.errors import QueueFullError, format_value
from llmc.runtime import Handle, Model
from llmc.runtime.api.request import MOST_PRIORITY
from llmc.runtime.server.http.accounts import (
    allows_model,
    charge,
    check_model,
    key_name,
    lets_write_special,
    lowest_priority,
    spend,
)
from llmc.runtime.server.http.aside import SHORT, aside, room_beside
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.ignored import ignore
from llmc.runtime.server.http.logs import watch
from llmc.runtime.server.models.response_store import ResponseStore

if TYPE_CHECKING:
    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.models.pool import ModelPool

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

    async def run(self, work: Callable[[], T]) -> T:
        """The result of the present client's work. Raises QueueFullError: as many wait already as may."""
        name = key_name()
        own = self._all if name is None else self._keys.setdefault(name, CapacityLimiter(self._of_key))
        if (waiting := own.statistics().tasks_waiting) >= self._waiting:
            raise QueueFullError(f"{waiting} requests with {self._kind} wait already; try again later")
        if own is self._all:
            return await to_thread.run_sync(work, limiter=own)
        async with own:
            return await to_thread.run_sync(work, limiter=self._all)


class Service:
    """The part that all routes share."""

    def __init__(self, config: "ServerConfig", pool: "ModelPool") -> None:
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
        """True once the server goes down: what runs is finished, and balancers are to send nobody."""

    @property
    def warm(self) -> tuple[str, ...]:
        """Names of the models that are loaded at the start."""
        return self.config.warm or self.pool.names[:1]

    @property
    def is_ready(self) -> bool:
        """True if requests may come: what is loaded at the start was, the GPU is there, and the server stays."""
        states = self.pool.states()
        loaded = all(states[name].loads > 0 and states[name].phase != "failed" for name in self.warm)
        return not self.draining and self.pool.lost is None and loaded

    def name(self, asked: str | None, *, adapters: bool = True) -> str:
        """The name of the model, or adapter, asked for; the first one of the client's where none was.

        Args:
            adapters: False where a model alone will do.

        Raises:
            ApiError: 404, there is no such model; 403, the client's key is not for it.
        """
        served = (*self.pool.names, *self.pool.adapters) if adapters else self.pool.names
        known = tuple(filter(allows_model, served))
        if asked is None and not known:
            raise ApiError(403, "the key is for none of the models here; use another one", code="model_not_allowed")
        asked = known[0] if asked is None else asked
        if asked not in served:
            said = f"the model {asked[:100]!r} is not here, expected {', '.join(known) or 'another key'}"
            raise ApiError(404, said, param="model", code="model_not_found")
        check_model(asked)
        return asked

    @property
    def names(self) -> tuple[str, ...]:
        """Models that the present client's key is for, and adapters after them."""
        return tuple(filter(allows_model, (*self.pool.names, *self.pool.adapters)))

    def adapter(self, asked: str | None) -> dict[str, str]:
        """The argument of a request to the model that names the adapter asked for; none where none was."""
        name = self.name(asked)
        return {"adapter": name} if name in self.pool.adapters else {}

    def check_work(self, asked: str | None, wanted: str | None) -> None:
        """Refuse a model that does something else, without loading it.
        ``wanted``: a key of :data:`WORK`. Raises ApiError: 400, naming it."""
        name = self.name(asked)
        encoder = self.pool.manifest(name).geometry.encoder
        found = encoder.result if encoder else None
        if found != wanted:
            said = f"the model {name!r} {WORK[found]}, expected one that {WORK[wanted]}"
            raise ApiError(400, f"{said}; GET /v1/models lists what there is", param="model")

    def model(self, asked: str | None) -> AbstractAsyncContextManager[Any]:
        """The model, loaded, and kept while the block runs."""
        return self.pool.lease(self.name(asked))

    def echo_name(self, asked: str | None) -> str:
        """The name that an answer tells: the one asked for, whose adapter may have been unloaded by now."""
        return self.name(None) if asked is None else asked

    def head(self, prefix: str, kind: str, model: Model, asked: str | None) -> dict[str, Any]:
        """The members with which an answer in OpenAI's older dialects, and each of its pieces, begins."""
        return {
            "id": new_id(f"{prefix}-"),
            "object": kind,
            "created": int(time.time()),
            "model": self.echo_name(asked),
            "system_fingerprint": f"fp_{model.manifest.source.fingerprint[:12]}",
        }

    def generator(self, asked: str | None) -> AbstractAsyncContextManager[Model]:
        """:meth:`model` for routes that generate. Raises ApiError: 400, the model does something else."""
        self.check_work(asked, None)
        return self.model(asked)

    async def count_tokens(
        self, asked: str | None, names: Mapping[str, str], tokenize: Callable[[Model], list[int]]
    ) -> int:
        """The tokens of a prompt, which are made in one of few threads, and charged as a prompt's are.
        ``names``: as of :meth:`submit`."""
        async with self.generator(asked) as model:
            with name_parameters(names):
                count = await self.tokenizing.run(lambda: len(tokenize(model)))
        spend(tokens=count)
        return count

    def bound_sampling(self, sampling: dict[str, Any], prompts: int = 1, *, raw: bool = False) -> dict[str, Any]:
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
        allowed = self.config.allow_special or (raw and self.config.raw_special and lets_write_special())
        if sampling.get("parse_special") and not allowed:
            raise ApiError(400, "parse_special is true, which this server does not allow", param="parse_special")
        if raw:
            sampling = {"parse_special": allowed, **sampling}
        most, longest = self.config.max_request_tokens, self.config.request_deadline_s
        if most is not None:
            outputs = prompts * max(sampling.get(name) or 1 for name in ("n", "best_of", "num_beams"))
            if outputs > most:
                said = f"{format_value(outputs)} outputs are asked for, of which this server allows {most} tokens"
                raise ApiError(400, f"{said}; ask for fewer", param="n" if prompts == 1 else "prompt")
            asked = sampling.get("max_tokens", most // outputs)
            if asked * outputs > most:
                said = f"{format_value(asked)} tokens of {outputs} outputs" if outputs > 1 else format_value(asked)
                raise ApiError(
                    400, f"max_tokens is {said}, this server allows {most}; ask for less", param="max_tokens"
                )
            sampling = {**sampling, "max_tokens": asked}
        if longest is not None:
            sampling = {**sampling, "deadline_s": min(sampling.get("deadline_s", longest), longest)}
        if -MOST_PRIORITY <= sampling.get("priority", 0) < lowest_priority():
            ignore("priority")
            sampling = {**sampling, "priority": lowest_priority()}
        if prompts > 1:
            spend(requests=prompts - 1)
        return {**sampling, "prefix_scope": None if self.config.prefix_cache_scope == "shared" else key_name()}

    async def submit(
        self, held: AsyncExitStack, asked: str | None, names: Mapping[str, str], make: Callable[[Model], partial[H]]
    ) -> tuple[Model, H]:
        """The model asked for and a request submitted to it, which are held until ``held`` is closed.

        Args:
            names: the dialect's own names of parameters; see :func:`llmc.runtime.server.http.errors.name_parameters`.
            make: makes the call that submits the request.
        """
        model = await held.enter_async_context(self.generator(asked))
        with name_parameters(names):
            call = partial(await aside(partial(make, model)), **self.adapter(asked))
            handle = await self.submit_promptly(call)
        held.callback(handle.cancel)
        await self.wait_turn(handle)
        return model, handle

    async def submit_promptly(self, submit: Callable[[], H]) -> H:
        """A request submitted: at once where it is short, for a thread's waking takes as long as its work, and else in
        a thread, as tokenizing a prompt, a chat template's work and compiling a grammar may take long.

        Those with a grammar and those with images have threads of their own, so that any number of slow ones keeps
        no other waiting.

        Args:
            submit: submits it; all that the client gave is among its arguments, or in a mapping there.

        Raises:
            QueueFullError: too many wait for these threads already.
        """
        given = [*submit.args, submit.keywords] if isinstance(submit, partial) else []
        if any(map(_hold_image, given)):
            handle = await self.images.run(submit)
        elif any(one.get(name) is not None for one in given if isinstance(one, Mapping) for name in GUIDES):
            handle = await self.compilers.run(submit)
        elif given and room_beside(given, SHORT) >= 0:
            handle = submit()
        else:
            handle = await to_thread.run_sync(submit)
        charge(handle)
        watch(handle)
        return handle

    async def wait_turn(self, *handles: Handle) -> None:
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
            spend(tokens=-handle.prompt_tokens)
        raise QueueFullError(f"the request waited {most:g} s for its turn, as long as it may; try again later")


def _hold_image(messages: object) -> bool:
    """True for messages of which one has parts: texts alone are one."""
    return isinstance(messages, list) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages
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
