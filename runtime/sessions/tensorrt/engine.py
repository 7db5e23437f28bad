"""A serialized engine becomes one that runs: checked against this machine, loaded, and given contexts to run in.

One path for TensorRT from 10.15 on and for TensorRT-RTX. Not run on a GPU yet.
"""

import mmap
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.bundle import EngineConfig, Manifest, version
from llmc.errors import BundleError, GpuError, RequestError
from llmc.runtime.host.cuda import DeviceInfo
from llmc.runtime.sessions.cuda.blocks import Shape
from llmc.runtime.sessions.tensorrt.kernels import Kernels
from llmc.runtime.sessions.tensorrt.library import library_version, lists_gpu, logger, make_object, nameable_gpus
from llmc.strict import open_regular

DECODE, PREFILL = 0, 1  # numbers of the profiles


def require_config(folder: Path, manifest: Manifest) -> EngineConfig:
    """The config of the bundle's engine, which must have been built."""
    config = manifest.engine
    if config is None or not config.file:
        raise BundleError("its engine has not been built", f"build it on this machine: {_remedy(folder)}", path=folder)
    return config


def check_machine(folder: Path, manifest: Manifest, config: EngineConfig, library: Any, device: DeviceInfo) -> None:
    """Refuse, before it is loaded, an engine that was built for something else than this."""
    installed, found = library_version(library), f"{device.name} has {device.compute_capability}"
    if not lists_gpu(library, device.compute_capability):
        raise GpuError(
            f"{manifest.target.engine} {installed} runs on compute capability "
            f"{', '.join(nameable_gpus(library))} and newer, {found}",
            "build for the target tensorrt or cuda",
            path=folder,
        )
    built, here = config.platform, platform_name()
    if built != here:
        raise BundleError(f"its engine was built for {built}, this is {here}", _remedy(folder), path=folder)
    name, built = manifest.target.engine, manifest.target.engine_version
    if version(installed) != version(built):
        raise BundleError(f"its engine was built by {name} {built}, here is {installed}", _remedy(folder), path=folder)
    if not config.fits_gpu(device.compute_capability):
        raise BundleError(
            f"its engine was built for compute capability {config.gpus}, {found}", _remedy(folder), path=folder
        )


def platform_name() -> str:
    """Operating system and processor that engines are bound to, as linux-x86_64."""
    return f"{platform.system().lower()}-{platform.machine()}"


def _remedy(folder: Path) -> str:
    return f"llmc build --rebuild {folder}"


class Engine:
    """A loaded engine. Raises BundleError: the library refuses the engine; GpuError: the library cannot start."""

    def __init__(self, library: Any, file: Path, folder: Path) -> None:
        self.library = library
        self.log = logger(library)
        self._folder = folder
        self._runtime = make_object(library, library.Runtime)
        with self.log.collect_messages() as messages, map_file(file) as content:
            native = self._runtime.deserialize_cuda_engine(content)
        if native is None:
            said = last_error(messages) or "it said nothing"
            name = f"{library.__name__} {library_version(library)}"
            raise BundleError(f"{name} refuses {file.name} ({said})", _remedy(folder), path=folder)
        self.native = native
        self._kernels: Kernels | None = None

    @property
    def compiles_kernels(self) -> bool:
        """True where kernels are compiled while it runs."""
        return self._kernels is not None

    def keep_kernels(self, file: Path) -> None:
        """Use kernels that were compiled before, and keep those of this run when :meth:`save_kernels` or :meth:`close`
        is called."""
        self._kernels = Kernels(self.library, self.native, file)

    def save_kernels(self) -> None:
        """Keep the kernels that were compiled until now."""
        if self._kernels is not None:
            self._kernels.save()

    def context_settings(self, repeats: bool) -> Any:
        """Settings of a context that works in memory which it is given; ``repeats`` tells that its calls have few
        shapes, which come again."""
        strategy = self.library.ExecutionContextAllocationStrategy.USER_MANAGED
        return strategy if self._kernels is None else self._kernels.configure_context(strategy, repeats)

    def memory(self) -> int:
        """Bytes that a context of any profile works in."""
        profiles = range(self.native.num_optimization_profiles)
        each = [self.native.get_device_memory_size_for_profile_v2(i) for i in profiles]
        return int(max(self.native.device_memory_size_v2, *each))

    def check_aliases(self, presents: list[str]) -> None:
        """Ask the engine if it updates its cache in place; that is not assumed.
        Raises BundleError: some tensor is not, or in another's place."""
        for name in presents:
            source = self.native.get_aliased_input_tensor(name) or ""
            if source != name.replace("present", "past_key_values", 1):
                raise BundleError(
                    f"{name} is updated in place of {source or 'nothing'}", _remedy(self._folder), path=self._folder
                )

    def close(self) -> None:
        """Let the library free it; its contexts must be gone."""
        self.save_kernels()
        self._kernels = None
        self.native = self._runtime = None


class Context:
    """An execution context for calls of one profile of an engine. Shapes and addresses stay as they were last set.

    ``memory``, ``size``: device memory to work in, which contexts that never run at the same time may share.
    """

    def __init__(self, engine: Engine, profile: int, stream: int, memory: int, size: int) -> None:
        self._log = engine.log
        self._library = engine.library
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        settings = engine.context_settings(repeats=profile == DECODE)
        self._native = self._ask("making a context", engine.native.create_execution_context, settings)
        self._ask("choosing a profile", self._native.set_optimization_profile_async, profile, stream)
        if size:
            self._native.set_device_memory(memory, size)

    def can_be_recorded(self, stream: int) -> bool:
        """True if the library allows it; only TensorRT-RTX can be asked."""
        ask = getattr(self._native, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))

    def prepare(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set what differs from the last run."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._shapes.pop(name, None)
                with self._log.collect_messages() as messages:
                    if not self._native.set_input_shape(name, shape):
                        said = last_error(messages) or "no reason given"
                        raise RequestError(f"{name} of shape {list(shape)} is not in the engine's profile ({said})")
                self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                self._ask(f"setting the address of {name}", self._native.set_tensor_address, name, address)
                self._addresses[name] = address

    def run(self, stream: int) -> None:
        """Queue a run. Raises GpuError: the engine refuses, with what the library logged."""
        self._ask("running the engine", self._native.execute_async_v3, stream)

    def _ask(self, doing: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        with self._log.collect_messages() as messages:
            answer = ask(*arguments)
        if answer is None or answer is False:
            said = last_error(messages) or "no reason given"
            raise GpuError(f"{doing} failed in {self._library.__name__} ({said}); see llmc doctor")
        return answer

    def close(self) -> None:
        """Let the library free it."""
        self._native = None


def last_error(messages: list[Any]) -> str:
    """The last error that a library logged, in one line; empty if none."""
    errors = [message.text for message in messages if message.is_error]
    return " ".join(errors[-1].split())[:300] if errors else ""


@contextmanager
def map_file(file: Path) -> Iterator[Any]:
    """A file's bytes without a copy of them in memory. Raises BundleError: it cannot be read, or is empty."""
    try:
        with open_regular(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} cannot be read ({error}); build the bundle again") from error
