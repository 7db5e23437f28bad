"""TensorRT's Python interface as it was recorded: what is not in the recording does not exist.

``RecordedLibrary()`` stands in for the module ``tensorrt``. Its classes
have the recorded members and no others, its methods take the recorded arguments and no others, and every call is
written down. What methods do is the little that a builder's caller notices: a parsed graph has layers, a built engine
has bytes.
"""

import enum
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

# Classes and their members, recorded from the version that JetPack 7.2 has.
SURFACE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tensorrt_api" / "10.16.json").read_text())
PLAN = b"a serialized engine"
TYPES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "int32": "INT32", "bool": "BOOL", "int8": "INT8"}
COUNTED = {"num_layers": "_layers", "num_inputs": "_inputs", "num_outputs": "_outputs", "num_errors": "_errors"}
LAYERS = {
    "TensorScatter": "KV_CACHE_UPDATE",
    "Attention": "ATTENTION_INPUT",
    "RotaryEmbedding": "ROTARY_EMBEDDING",
    "RMSNormalization": "NORMALIZATION",
}
NO_KERNEL = "Error Code 1: Myelin (Attention operation was not supported by a dedicated kernel.)"
# What timings begin with: those of this GPU, and of another one, which are refused.
TIMED, TIMED_ELSEWHERE = b"timed here: ", b"timed elsewhere: "


@dataclass(frozen=True)
class Call:
    """A method that was called, or an attribute that was set (its name ends in ``=``)."""

    owner: str
    name: str
    arguments: tuple[Any, ...]


class RecordedLibrary:
    """A module ``tensorrt``.

    Args:
        log: what the builder logs while it builds, as (severity, text).
        builds: whether the builder succeeds.
        fuses: whether it has a kernel for every attention.
        parser_log: what the parser logs.
        gpu: compute capability of the GPU that it builds on; on Thor the compiler wants its flags.
    """

    def __init__(
        self,
        *,
        log: tuple[tuple[str, str], ...] = (),
        builds: bool = True,
        fuses: bool = True,
        parser_log: tuple[tuple[str, str], ...] = (),
        gpu: str = "",
    ) -> None:
        self.__name__ = "tensorrt"
        self.__version__ = SURFACE["__version__"]
        self.log, self.builds, self.fuses = log, builds, fuses
        self.parser_log, self.gpu = parser_log, gpu
        self.calls: list[Call] = []
        self.native_logger: Any = None
        for name, spec in SURFACE.items():
            if name != "__version__":
                setattr(self, name, self._class(name, spec))

    def names(self, owner: str) -> list[str]:
        """What was called on objects of one class, in order."""
        return [call.name for call in self.calls if call.owner == owner]

    def arguments(self, owner: str, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of one method."""
        return [call.arguments for call in self.calls if (call.owner, call.name) == (owner, name)]

    def make(self, owner: str, /, **values: Any) -> Any:
        """An object of a recorded class with some of its attributes set, behind the caller's back."""
        cls = getattr(self, owner)
        made = cls.__new__(cls)
        made.__dict__.update(values)
        return made

    def _class(self, name: str, spec: dict[str, Any]) -> Any:
        if "enum" in spec:
            return enum.IntEnum(name, spec["enum"])
        members = {
            member: self._class(member, kind)
            if isinstance(kind, dict)
            else _attribute(self, name, member)
            if kind is None
            else _method(self, name, member, kind)
            for member, kind in spec["members"].items()
        }
        return type(name, (_Strict,), {**members, "__module__": "tensorrt"})


class _Strict:
    """Base of the recorded classes: nothing may be set, overridden or read that was not recorded."""

    def __init_subclass__(cls) -> None:
        recorded = next((base for base in cls.__mro__[1:] if base.__module__ == "tensorrt"), None)
        if recorded is not None and cls.__module__ != "tensorrt":
            unknown = [name for name in vars(cls) if name[0] != "_" and not hasattr(recorded, name)]
            assert not unknown, f"{recorded.__name__} has no {unknown}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] != "_" and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        object.__setattr__(self, name, value)


def _attribute(library: RecordedLibrary, owner: str, name: str) -> property:
    def read(self: Any) -> Any:
        return len(self.__dict__.get(COUNTED[name], ())) if name in COUNTED else self.__dict__.get(name)

    def write(self: Any, value: Any) -> None:
        library.calls.append(Call(owner, f"{name}=", (value,)))
        self.__dict__[name] = value

    return property(read, write)


def _method(library: RecordedLibrary, owner: str, name: str, overloads: list[list[str]]) -> Callable[..., Any]:
    behaviour = BEHAVIOURS.get((owner, name)) or BEHAVIOURS.get(("", name))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = next((found for names in overloads if (found := _bound(names, args, kwargs)) is not None), None)
        if given is None:
            raise TypeError(f"{owner}.{name}{args}{kwargs}: incompatible arguments, expected {overloads}")
        library.calls.append(Call(owner, name, given))
        return behaviour(library, self, *given) if behaviour else None

    return call


def _bound(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments in order, or None if they do not fit these names; a name with ``=`` may be left out."""
    if names == ["*"]:
        return args
    plain = [name.rstrip("=") for name in names]
    if len(args) > len(names) or set(kwargs) - set(plain[len(args) :]):
        return None
    found = dict(zip(plain, args, strict=False)) | kwargs
    if any(name not in found and not names[i].endswith("=") for i, name in enumerate(plain)):
        return None
    return tuple(found[name] for name in plain if name in found)


def new(name: str, **values: Any) -> Callable[..., Any]:
    """A behaviour that returns an object of a class; it keeps the arguments it was made with."""
    return lambda library, self, *args: library.make(name, **{key: make() for key, make in values.items()})


def start(library: RecordedLibrary, self: Any, native_logger: Any) -> None:
    library.native_logger = native_logger
    told = os.environ.get("__LUNOWUD", "")
    if library.gpu == "11.0":
        assert "-peep:fc_h_fusion=off" in told, "products of one row that share an input would be merged wrongly"


def create_network(library: RecordedLibrary, self: Any, flags: int = 0) -> Any:
    return library.make("INetworkDefinition", _inputs=[], _outputs=[], _layers=[])


def create_parser(library: RecordedLibrary, self: Any, network: Any, native_logger: Any) -> None:
    self.__dict__.update(_network=network, _errors=[])


def load_model(library: RecordedLibrary, self: Any, model: bytes, path: str | None = None) -> bool:
    self.__dict__["_model"] = bytes(model)
    return True


def load_initializer(library: RecordedLibrary, self: Any, name: str, data: int, size: int) -> bool:
    return any(t.name == name for t in onnx.load_from_string(self._model).graph.initializer)


def parse_loaded(library: RecordedLibrary, self: Any) -> bool:
    for severity, text in library.parser_log:
        library.native_logger.log(library.ILogger.Severity[severity], text)
    _import(library, self._network, onnx.load_from_string(self._model).graph)
    return True


def get_error(library: RecordedLibrary, self: Any, index: int) -> Any:
    error = library.make("ParserError")
    error.__dict__["_error"] = self._errors[index]
    return error


def _import(library: RecordedLibrary, network: Any, graph: Any) -> None:
    """A layer for each node: enough of one for who walks through the network."""
    tensors = {value.name: _tensor(library, value.name, value) for value in (*graph.input, *graph.output)}

    def tensor(name: str) -> Any:
        return tensors.setdefault(name, _tensor(library, name))

    network._inputs.extend(tensors[value.name] for value in graph.input)
    network._outputs.extend(tensors[value.name] for value in graph.output)
    for node in graph.node:
        read = [name for name in node.input if name]
        kind = LAYERS.get(node.op_type, "ELEMENTWISE")
        between = [tensor(f"{node.name}.attention")] if kind == "ATTENTION_INPUT" else None
        made = [tensor(name) for name in node.output]
        given = list(map(tensor, read))
        if between:  # query and keys times the root of the scale, even of 1
            for index in (0, 1):
                scaled = tensor(f"{node.name}.scaled.{index}")
                network._layers.append(
                    _layer(library, scaled.name, "ELEMENTWISE", [given[index], tensor("scale")], [scaled])
                )
                given[index] = scaled
        network._layers.append(_layer(library, node.name, kind, given, between or made))
        if between:
            network._layers[-1].__dict__["attention"] = library.make(
                "IAttention", name=node.name, _inputs=given, _outputs=made
            )
            network._layers.append(_layer(library, f"{node.name}.out", "ATTENTION_OUTPUT", between, made))


def _tensor(library: RecordedLibrary, name: str, value: Any = None) -> Any:
    kind, shape = "float16", ()
    if value is not None:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)
    return library.make("ITensor", name=name, shape=shape, dtype=library.DataType[TYPES[kind]])


def _layer(library: RecordedLibrary, name: str, kind: str, inputs: list[Any], outputs: list[Any]) -> Any:
    return library.make("ILayer", name=name, type=library.LayerType[kind], _inputs=inputs, _outputs=outputs)


def set_input(library: RecordedLibrary, self: Any, index: int, tensor: Any) -> None:
    self._inputs[index] = tensor  # the list is its layer's, too


def build_in_pieces(library: RecordedLibrary, self: Any, network: Any, config: Any, writer: Any) -> bool:
    for layer in network._layers:
        if layer.type.name == "ATTENTION_INPUT":
            assert ".scaled." not in layer._inputs[1].name, "all keys are multiplied by a scale at every step"
            if not (library.fuses or layer.attention.decomposable):
                library.native_logger.log(library.ILogger.Severity.ERROR, NO_KERNEL)
                return True
    for severity, text in library.log:
        library.native_logger.log(library.ILogger.Severity[severity], text)
    if (timings := config.__dict__.get("_timings")) is not None:
        timings.__dict__["_content"] += b"."
    if not _steps(config) or not library.builds:
        return True  # as the real one does
    return all(writer.write(PLAN[i : i + 4]) == len(PLAN[i : i + 4]) for i in range(0, len(PLAN), 4))


def _steps(config: Any) -> bool:
    """Two phases of two steps, one within the other; whether the monitor let them end."""
    monitor = config.progress_monitor
    if monitor is None:
        return True
    monitor.phase_start("build", None, 2)
    monitor.phase_start("tactics", "build", 2)
    going = all(monitor.step_complete(name, step) for name, step in (("tactics", 0), ("tactics", 1), ("build", 0)))
    monitor.phase_finish("tactics")
    return going and monitor.step_complete("build", 1)


def create_timings(library: RecordedLibrary, self: Any, content: bytes) -> Any:
    """The real one makes an empty one of what it cannot read, and says so."""
    if content and not content.startswith((TIMED, TIMED_ELSEWHERE)):
        library.native_logger.log(library.ILogger.Severity.WARNING, "Failed to deserialize timing cache.")
        content = b""
    return library.make("ITimingCache", _content=content or TIMED)


def set_timings(library: RecordedLibrary, self: Any, timings: Any, ignore_mismatch: bool) -> bool:
    fits = timings._content.startswith(TIMED) or ignore_mismatch
    self.__dict__["_timings"] = timings if fits else None
    return fits


def item(field: str) -> Callable[..., Any]:
    return lambda library, self, index: getattr(self, field)[index]


def part(index: int) -> Callable[..., Any]:
    return lambda library, self: self._error[index]


def refuse(library: RecordedLibrary, self: Any, *args: Any) -> bool:
    return False


def accept(library: RecordedLibrary, self: Any, *args: Any) -> bool:
    return True


BEHAVIOURS: dict[tuple[str, str], Callable[..., Any]] = {
    ("Builder", "__init__"): start,
    ("Builder", "create_network"): create_network,
    ("Builder", "create_builder_config"): new("IBuilderConfig"),
    ("Builder", "create_optimization_profile"): new("IOptimizationProfile"),
    ("Builder", "build_serialized_network_to_stream"): build_in_pieces,
    ("OnnxParser", "__init__"): create_parser,
    ("OnnxParser", "load_model_proto"): load_model,
    ("OnnxParser", "load_initializer"): load_initializer,
    ("OnnxParser", "parse_model_proto"): parse_loaded,
    ("OnnxParser", "get_error"): get_error,
    ("ParserError", "node_name"): part(0),
    ("ParserError", "node_operator"): part(1),
    ("ParserError", "desc"): part(2),
    ("INetworkDefinition", "get_layer"): item("_layers"),
    ("INetworkDefinition", "get_input"): item("_inputs"),
    ("INetworkDefinition", "get_output"): item("_outputs"),
    ("IAttention", "set_input"): set_input,
    ("", "get_input"): item("_inputs"),
    ("", "get_output"): item("_outputs"),
    ("IBuilderConfig", "add_optimization_profile"): lambda library, self, profile: 0,
    ("IBuilderConfig", "create_timing_cache"): create_timings,
    ("IBuilderConfig", "set_timing_cache"): set_timings,
    ("ITimingCache", "serialize"): lambda library, self: self._content,
}


def replaced(monkeypatch: Any, owner: str, name: str, behaviour: Callable[..., Any]) -> None:
    """Let a method of libraries made from now on behave otherwise."""
    monkeypatch.setitem(BEHAVIOURS, (owner, name), partial(behaviour))
