"""The service as a process: where it listens, when it is ready, and how it ends."""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from llmc.errors import GpuError, LlmcError, UsageError
from llmc.runtime.observe.logs import event
from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects.socket import Sockets
from llmc.runtime.server.http.guarded import Guarded, uvicorn_options
from llmc.runtime.server.http.logs import RequestLog, log_to_stderr
from llmc.runtime.server.models.pool import Pool
from llmc.runtime.server.supervisor import describe_reload, inherit_sockets, notify, watchdog_s

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the kernel accepts before we do
# After drain_s requests are told that the engine was closed; so long their answers may take to go out.
FAREWELL_S = 5
# Seconds to close models after that: a load under way in a library cannot be interrupted.
CLOSE_S = 10.0
WATCH_S = 1.0  # between two looks whether the models' GPU is still there
SOCKET_MODE = 0o660  # owner and group; whoever may write to a Unix socket may use the service


def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish for ``drain_s`` seconds; a second signal ends at
    once. SIGHUP reads keys and certificate anew, and swaps each model whose folder holds another bundle.

    Raises:
        UsageError: the address, certificate or keys cannot be used.
        BundleError, ResourceError: a model cannot be loaded, or not all of them fit.
        GpuError: the GPU was lost, and only another process can use it again.
    """
    with log_to_stderr(config.log_format):
        options, formats = config.load_options, config.tool_formats
        pool = Pool(config.models, memory=config.memory, load_options=options, tool_formats=formats)
        run(config, pool, Guarded(make_app(config, pool), config))


class Models(Protocol):
    """The holder of the models: a :class:`Pool`, which says what its methods do, or a fleet."""

    lost: GpuError | None

    @property
    def names(self) -> tuple[str, ...]: ...

    async def warm(self, *names: str) -> None: ...

    async def refresh(self) -> dict[str, Exception | None]: ...

    async def close(self, drain: bool = True) -> None: ...


def run(config: ServerConfig, models: Models, app: Guarded) -> None:
    """Serve an application until a signal ends it; see :func:`serve`.

    Raises:
        what :func:`serve` raises.
    """
    logged = RequestLog(app, bodies=config.log_prompts)
    options = _uvicorn_config(config, Sockets(logged, config))
    with open_sockets(config) as sockets:
        server = Server(options, models, config, app.reload)
        for address in map(_url(config), sockets):
            event(log, "listening", address=address)
        server.run(sockets)
    if server.failure is not None:
        raise server.failure
    event(log, "stopped")


def _uvicorn_config(config: ServerConfig, app: Sockets) -> uvicorn.Config:
    own: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "backlog": BACKLOG}
    drain: Any = config.drain_s + FAREWELL_S
    made = uvicorn.Config(app, timeout_graceful_shutdown=drain, **own, **uvicorn_options(config))
    try:
        made.load()
    except OSError as error:  # ssl's errors are of this kind too
        raise UsageError(
            "tls_cert",
            f"{config.tls_cert} and tls_key {config.tls_key} cannot be used ({error}), expected a certificate chain "
            "and its private key, in PEM",
        ) from error
    return made


class Server(uvicorn.Server):
    """uvicorn's server with the models' life around it: warm, watched, drained, closed.

    Attributes:
        failure: why it stopped by itself; None where it was told to.
    """

    def __init__(
        self, options: uvicorn.Config, pool: Models, config: ServerConfig, reload_keys: Callable[[], None]
    ) -> None:
        super().__init__(options)
        self.failure: LlmcError | None = None
        self._pool = pool
        self._settings = config
        self._reload_keys = reload_keys
        self._tasks: set[asyncio.Task[None]] = set()
        self._reload_asked = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at once, and say ready when what is loaded at the start is; at the end close all models."""
        # The collector stops all threads and would look at every object of every module: 0.3 s for a body of many.
        gc.freeze()
        self._start_task(self._warm())
        self._start_task(self._watch())
        self._start_task(self._reload_when_asked())
        try:
            await super().serve(sockets)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self._close()

    # ------------------------------------------------------------------------------------------ while it runs

    async def _warm(self) -> None:
        try:
            await self._pool.warm(*self._settings.warm)
        except LlmcError as error:
            self._fail(error)
            return
        if not self.should_exit:
            notify("READY=1")
            event(log, "ready", model=", ".join(self._settings.warm or self._pool.names[:1]))

    async def _watch(self) -> None:
        """Tell the supervisor that we are alive, as long as the models are."""
        pause = min(WATCH_S, watchdog_s() or WATCH_S)
        while self._pool.lost is None:
            notify("WATCHDOG=1")
            await asyncio.sleep(pause)
        self._fail(GpuError(f"{self._pool.lost}; start the service again"))

    async def _reload_when_asked(self) -> None:
        """Reload once for all that ask before it begins, and once more for those that ask while it runs."""
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Do as SIGHUP asks; whatever fails is logged, and what was there before goes on."""
        notify(describe_reload())
        try:
            self._reload_all()
        except (LlmcError, OSError) as error:
            log.error("keys and certificate stay as they are: %s", error)
        await self._pool.refresh()
        notify("READY=1")
        event(log, "reloaded")

    def _reload_all(self) -> None:
        """Take keys and certificate as their files say now: all of them, or none."""
        fresh, listening_with = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.config.ssl
        if self._settings.tls_cert is not None:  # the one that listens would keep half of a pair that does not match
            fresh.load_cert_chain(self._settings.tls_cert, self._settings.tls_key, password="")  # nobody to ask for one
        self._reload_keys()
        if listening_with is not None:
            listening_with.sni_callback = lambda connection, _name, _own: setattr(connection, "context", fresh)

    def _fail(self, error: LlmcError) -> None:
        self.failure = error
        self.should_exit = True

    def _start_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------ the end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals as messages to the loop; none is raised again, for a service that was told to stop has not failed."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._stop, signal.SIGINT)
        loop.add_signal_handler(signal.SIGHUP, self._reload_asked.set)
        try:
            yield
        finally:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.should_exit:
            log.warning("%s again: the service ends at once", number.name)
            logging.shutdown()
            os._exit(128 + number)
        event(log, "stopping", signal=number.name, drain_s=self._settings.drain_s)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and let running requests finish; those that take too long are told so."""
        notify("STOPPING=1")
        self._start_task(self._end_requests())
        await super().shutdown(sockets)

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._settings.drain_s)
        await self._pool.close(drain=False)

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(self._pool.close(drain=False), CLOSE_S)
        except asyncio.TimeoutError:
            log.warning("a model could not be closed within %g s; the process ends without", CLOSE_S)
            if self.failure is not None:
                log.error("%s", self.failure)
            logging.shutdown()
            os._exit(0 if self.failure is None else self.failure.exit_code)


# ---------------------------------------------------------------------------------------------------- where it listens


@contextmanager
def open_sockets(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """Sockets that listen: systemd's if it gave any, the Unix socket, or host and port."""
    found = inherit_sockets()
    made = None
    try:
        if not found:
            made = config.unix_socket
            found = [_unix_socket(made) if made is not None else _tcp_socket(config.host, config.port)]
    except OSError as error:
        option, place = ("unix_socket", made) if made else ("host", f"{config.host}:{config.port}")
        raise UsageError(
            option, f"{place} cannot be listened on ({error.strerror or error})", "choose another"
        ) from error
    mine = None if made is None else made.stat().st_ino
    try:
        yield found
    finally:
        for one in found:
            one.close()
        with suppress(OSError):  # another process may have its own there by now
            if made is not None and made.stat().st_ino == mine:
                made.unlink()


def _tcp_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _unix_socket(path: Path) -> socket.socket:
    """A socket in the place of one that a killed process left."""
    if path.exists():
        _refuse_in_use(path)
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        made.bind(str(path))
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


def _refuse_in_use(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise UsageError("unix_socket", f"is {path}, which is there and no socket", "choose another place")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise UsageError("unix_socket", f"is {path}, where another process listens", "stop it, or choose another place")


def _url(config: ServerConfig) -> Callable[[socket.socket], str]:
    def written(one: socket.socket) -> str:
        address = one.getsockname()
        if one.family == socket.AF_UNIX:
            return f"unix:{address}"
        host = f"[{address[0]}]" if one.family == socket.AF_INET6 else address[0]
        return f"{'https' if config.tls_cert else 'http'}://{host}:{address[1]}"

    return written
