"""TensorRT and TensorRT-RTX as libraries: imported on first use, with one logger each.

Both have the same Python interface. TensorRT keeps one logger per process (a second one is ignored), so messages go to
one object whose listeners come and go.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from llmc.bundle import version
from llmc.errors import GpuError, MissingExtraError, UsageError, install_command, require, text_of

log = logging.getLogger(__name__)
INFO = "INFO"


@dataclass(frozen=True)
class _Library:
    module: str
    minimum: tuple[int, int]
    install: Callable[[], str]


_INSTALL = (
    "on a Jetson it comes with JetPack 7.2 (apt install python3-libnvinfer, and a virtual environment made with "
    "--system-site-packages); elsewhere pip install --extra-index-url https://pypi.nvidia.com tensorrt-cu13"
)
LIBRARIES = {
    "tensorrt": _Library("tensorrt", (10, 15), lambda: _INSTALL),  # the first with native caches and attention
    "tensorrt-rtx": _Library("tensorrt_rtx", (1, 7), partial(install_command, "tensorrt-rtx")),
}
_DRIVER = "install NVIDIA's driver, or free the GPU if it is out of memory; llmc doctor tells what is there"


@dataclass(frozen=True)
class Message:
    """A message that a library logged; ``severity``: INTERNAL_ERROR, ERROR, WARNING, or INFO for what was expected."""

    severity: str
    text: str

    @property
    def is_error(self) -> bool:
        """True of what the library calls an error."""
        return self.severity in ("INTERNAL_ERROR", "ERROR")


class Log:
    """The logger that a library is given, once per process: ``native`` is the library's own object."""

    def __init__(self, library: Any) -> None:
        def receive(_: Any, severity: Any, text: str) -> None:
            self.receive(severity.name, text)

        self._listeners: list[list[Message]] = []
        self.native = type("Log", (library.ILogger,), {"log": receive})()

    def receive(self, severity: str, text: str) -> None:
        """Hand a message on, to whoever collects and to Python's logging; what is less than a warning is for debugging.

        The library calls this from threads of its own, so it must not raise.
        """
        if severity not in ("INTERNAL_ERROR", "ERROR", "WARNING"):
            log.debug("%s", text)
            return
        for listener in self._listeners:
            listener.append(Message(severity, text))
        log.info("%s: %s", severity.lower(), text)

    @contextmanager
    def collect_messages(self) -> Iterator[list[Message]]:
        """A list that receives every warning and error until the block ends, in order."""
        messages: list[Message] = []
        self._listeners.append(messages)
        try:
            yield messages
        finally:
            self._listeners[:] = [each for each in self._listeners if each is not messages]


@cache
def logger(library: Any) -> Log:
    """The library's logger, the same one at every call."""
    return Log(library)


def library_version(library: Any) -> str:
    """Version of the installed library, for example 10.16.1.11."""
    return str(library.__version__)


def nameable_gpus(library: Any) -> tuple[str, ...]:
    """Compute capabilities, as 8.6, that the library's engines can be built for without such a GPU (TensorRT-RTX); none
    of a library that is bound to the GPU that it runs on."""
    names = dir(library.ComputeCapability) if hasattr(library, "ComputeCapability") else []
    numbers = sorted(int(name[2:]) for name in names if name.startswith("SM"))
    return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def lists_gpu(library: Any, capability: str) -> bool:
    """True if the library says of itself that it runs on a GPU of this compute capability: it names it, or all that it
    names are older. One that names none is for every GPU that it can be built on."""
    known = nameable_gpus(library)
    return not known or capability in known or version(capability) > max(map(version, known))


def load_library(engine: str) -> Any:
    """Import the library of an engine, tensorrt or tensorrt-rtx. No GPU is touched.

    Raises:
        UsageError: the engine is none of those.
        MissingExtraError: the library is not installed.
        GpuError: it is too old, or cannot be imported.
    """
    if engine not in LIBRARIES:
        raise UsageError("engine", f"is {engine!r}, expected {' or '.join(LIBRARIES)}")
    wanted = LIBRARIES[engine]
    library = _import_library(wanted, engine)
    found = library_version(library)
    if version(found)[:2] < wanted.minimum:
        needed = ".".join(map(str, wanted.minimum))
        raise GpuError(
            f"{wanted.module} {found} is installed, llmc needs {needed} or later: {wanted.install()}; or build for the "
            "target cpu, or cuda (not on a Jetson)"
        )
    return library


def _import_library(wanted: _Library, engine: str) -> Any:
    try:
        return require(wanted.module, engine)
    except MissingExtraError as error:
        raise MissingExtraError(
            f"{wanted.module} is not installed: {wanted.install()}; without it llmc verify, run and eval --emulate "
            "compute on the CPU, and llmc build of an export --deferred leaves the engine to a machine that has it"
        ) from error
    except Exception as error:  # a broken installation raises anything
        raise GpuError(
            f"{wanted.module} is installed and cannot be loaded ({text_of(error)}): uninstall all packages of that "
            f"library, remove the folder {wanted.module} if one is left, then install it: {wanted.install()}"
        ) from error


def make_object(library: Any, make: Any) -> Any:
    """``make`` a builder of engines, or a runtime to load them with: the library's Builder or Runtime.

    TensorRT needs a GPU for both, TensorRT-RTX for a runtime alone.

    Raises:
        GpuError: the library cannot start, mostly for want of a driver; with what it logged.
    """
    native = logger(library)
    with native.collect_messages() as messages:
        try:
            return make(native.native)
        except (TypeError, RuntimeError) as error:  # the binding turns a null pointer into a TypeError
            said = "; ".join(dict.fromkeys(message.text for message in messages)) or str(error)
            name = f"{library.__name__} {library_version(library)}"
            raise GpuError(f"{name} cannot use a GPU here ({said}); {_DRIVER}") from error
