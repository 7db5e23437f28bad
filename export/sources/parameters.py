"""Map a checkpoint's tensors to the decoder's parameters: rename, unpack rows, reorder.

Tensors that need no conversion remain references to the files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.names import EMBEDDED_NORM
from llmc.bundle.model.recurrent import Recurrent
from llmc.errors import CheckpointError
from llmc.export.config import FINAL_NORM, DecoderConfig
from llmc.export.parts.experts import STEEP
from llmc.export.parts.recurrent import RecurrentConfig
from llmc.export.sources.codes import GgmlTensor, Mxfp4Tensor, QuantizedTensor, Weight, join_stacks, rows_of
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.safetensors import FLOATS, StoredTensor

Tensors = dict[str, Weight]
Array = NDArray[Any]
Indices = NDArray[np.int64]
T = TypeVar("T")

# Values to convert at a time.
PIECE = 1 << 20


def decoder_tensors(folder: Path, config: DecoderConfig, renamed: Tensors) -> Tensors:
    """All tensors by parameter name (unknown ones by their own), from the result of :func:`rename_tensors`.

    Quantized weights are always stored as [outputs, inputs].
    """
    tensors = _stack_experts(folder, config, renamed)
    shapes, parameters = config.parameter_shapes, Tensors(tensors)
    for packed, names in config.packed_parameters.items():
        if packed in tensors and names[0] in shapes:  # a layer may lack this part
            del parameters[packed]
            parts = {name: shapes[name] for name in names}
            unpacked = _unpack_parameters(folder, config, packed, tensors[packed], parts)
            parameters |= dict(zip(names, unpacked, strict=True))
    for name in _list_transposed_stacks(config, renamed):
        shape = tensors[name].shape
        turn = partial(np.swapaxes, axis1=1, axis2=2)
        parameters[name] = make_view(folder, tensors[name], turn, (*shape[:1], *shape[:0:-1]))
    for name in list_offset_norms(config) & tensors.keys():
        parameters[name] = make_view(folder, tensors[name], plus_one, tensors[name].shape, "F32")
    for item in config.geometry.recurrents:
        parameters |= _convert_recurrent(folder, config, item, tensors)
        _join_convolutions(folder, item, shapes, parameters)
    for attention in config.geometry.attentions:
        _convert_head_norms(folder, attention, shapes, parameters)
    parameters |= _widen_scalars(tensors, shapes)
    for name in _list_norms_of_ones(config, shapes):
        parameters[name] = MadeTensor("F32", shapes[name], partial(filled, 1.0, shapes[name]))
    plain = {name for name, tensor in tensors.items() if not isinstance(tensor, QuantizedTensor)}
    transposed = {f"{linear.name}.weight" for linear in config.geometry.linears[:-1]} if config.transposed else set()
    for name in transposed & plain:
        parameters[name] = make_view(folder, tensors[name], np.transpose, tensors[name].shape[::-1])
    return parameters


def _convert_recurrent(folder: Path, config: DecoderConfig, item: Recurrent, tensors: Tensors) -> Tensors:
    """The weights of a grouped norm, applied after it, and a convolution with scaled channels."""
    mixer, converted = config.layers[item.layer].recurrent, Tensors()
    assert mixer is not None
    if mixer.scaled_apart and (name := f"{item.name}.norm.weight") in tensors:
        converted[f"{item.name}.norm_scale"] = tensors[name]
    if set(mixer.scales[1:4]) != {1.0} and (name := f"{item.name}.conv.weight") in tensors:
        view = partial(_scale_channels, mixer)
        converted[name] = make_view(folder, tensors[name], view, tensors[name].shape, "F32")
    return converted


def _list_norms_of_ones(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Norms whose weight is one, because none is stored, or because the stored one differs by head or group."""
    values = [f"{item.name}.v_norm.weight" for item in config.geometry.attentions]
    values += [f"{EMBEDDED_NORM}.weight"] if config.embedding_normed else []
    for index, layer in enumerate(config.layers):
        if layer.attention is not None and layer.attention.qk_norm == "unweighted_head":
            values += [f"model.layers.{index}.self_attn.{part}_norm.weight" for part in "qk"]
    values += [
        f"{it.name}.{p}_norm.weight"
        for it in config.geometry.attentions
        for p in "qk"
        if f"{it.name}.{p}_scale" in shapes
    ]
    grouped = [f"{item.name}.norm.weight" for item in config.geometry.recurrents if f"{item.name}.norm_scale" in shapes]
    return [name for name in (*values, *grouped) if name in shapes]


def _widen_scalars(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Stored scalars as vectors of one value, where the decoder has such a vector."""
    scalars = {name: it for name, it in tensors.items() if isinstance(it, StoredTensor) and it.shape == ()}
    return {name: replace(it, shape=(1,)) for name, it in scalars.items() if shapes.get(name) == (1,)}


def filled(value: float, shape: tuple[int, ...]) -> Iterator[Array]:
    yield np.full(shape, value, np.float32)


def _convert_head_norms(
    folder: Path, item: Attention, shapes: Mapping[str, tuple[int, ...]], parameters: Tensors
) -> None:
    """Weights of per-head norms, [heads, head_dim] or one tensor per head, are applied after norms without biases."""
    for part, heads in (("q", item.heads), ("k", item.kv_heads)):
        norm, scale = f"{item.name}.{part}_norm", f"{item.name}.{part}_scale"
        if scale not in shapes:
            continue
        per_head = [f"{norm}.{head}.weight" for head in range(heads)]
        names, shape = (
            (per_head, (item.head_dim,)) if per_head[0] in parameters else ([f"{norm}.weight"], (heads, item.head_dim))
        )
        for name in names:
            if name not in parameters:
                raise CheckpointError(f"{folder}: tensor {name} is missing; download the checkpoint again")
            if parameters[name].shape != shape:
                raise CheckpointError(f"{folder}: {explain_shape(name, parameters[name].shape, shape)}")
        stored = [parameters.pop(name) for name in names]
        parameters[scale] = MadeTensor("F32", shapes[scale], partial(_read_flat, folder, stored))
        if f"{norm}.bias" in shapes:
            parameters[f"{norm}.bias"] = MadeTensor(
                "F32", shapes[f"{norm}.bias"], partial(filled, 0.0, (item.head_dim,))
            )


def _join_convolutions(
    folder: Path, item: Recurrent, shapes: Mapping[str, tuple[int, ...]], parameters: Tensors
) -> None:
    """One convolution of the three for queries, keys and values, where they are stored apart."""
    names = [f"{item.name}.{part}_conv.weight" for part in "qkv"]
    if any(name not in parameters for name in names):
        return
    name, stored = f"{item.name}.conv.weight", [parameters.pop(name) for name in names]
    found = (sum(tensor.shape[0] for tensor in stored), *stored[0].shape[1:])
    if found != shapes[name] or any(tensor.shape[1:] != found[1:] for tensor in stored):
        raise CheckpointError(f"{folder}: {explain_shape(name, found, shapes[name])}")
    parameters[name] = MadeTensor("F32", shapes[name], partial(_read_flat, folder, stored))


def _read_flat(folder: Path, tensors: Sequence[Weight]) -> Iterator[Array]:
    for tensor in tensors:
        assert isinstance(tensor, StoredTensor | MadeTensor)
        yield from (piece.astype(np.float32).ravel() for piece in read_pieces(folder, tensor))


def list_offset_norms(config: DecoderConfig) -> set[str]:
    plain = {
        f"{item.name}.norm" for item in config.geometry.recurrents
    }  # norms after a recurrence store their weights unchanged
    plain |= {FINAL_NORM} if config.norm.plain_end else set()
    listed = {norm.name for norm in config.geometry.norms} - plain
    return {f"{name}.weight" for name in listed} if config.norm.offset else set()


def _list_transposed_stacks(config: DecoderConfig, stored: Tensors) -> Iterator[str]:
    """Names of all experts' weights that the checkpoint stores as [experts, inputs, outputs]."""
    for item in config.geometry.mixtures:
        experts = config.layers[item.layer].experts
        assert experts is not None
        for part in item.parts if experts.transposed != "none" else ():
            stack, rows = stored.get(f"{part.name}.weight"), (item.count, part.outputs, part.inputs)
            if stack and not isinstance(stack, Mxfp4Tensor) and (experts.transposed == "all" or stack.shape != rows):
                yield f"{part.name}.weight"


def explain_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{name} has shape {list(shape)}, but config.json asks for {list(expected)}"


@cache
def make_renamer(renamed: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    """A function that replaces parts of a name, whole words between dots; the longest match wins."""
    names = dict(renamed)
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    words = re.compile(rf"(?<![^.])(?:{'|'.join(longest_first)})(?![^.])")
    return lambda own: words.sub(lambda match: names[match[0]], own) if names else own


def rename_tensors(folder: Path, config: DecoderConfig, stored: Mapping[str, T]) -> dict[str, T]:
    """A checkpoint's tensors by llmc's own names, without the parts that are left out."""
    rename, tensors = make_renamer(config.renamed), dict[str, T]()
    for stored_name, tensor in stored.items():
        if any(f".{part}." in f".{stored_name}." for part in config.left_out):
            continue
        name = rename(stored_name)
        if name in tensors:
            raise CheckpointError(
                f"{folder}: {stored_name} is stored twice, the second time as {name}; remove one of them"
            )
        tensors[name] = tensor
    return tensors


def _stack_experts(folder: Path, config: DecoderConfig, tensors: Tensors) -> Tensors:
    """Stack the weights of a layer's experts into one tensor, if experts, or gate and up, are stored separately."""
    stacked = Tensors(tensors)
    for item in config.geometry.mixtures:
        experts = config.layers[item.layer].experts
        assert experts is not None
        halves = [f"{item.name}.{part}_proj.weight" for part in ("gate", "up")]
        if experts.squared and halves[1] in tensors:
            stacked[halves[0]] = _steepen(folder, tensors[halves[1]])
        if stacked.keys() >= {*halves}:
            name, shape = f"{item.name}.gate_up_proj.weight", (item.count, 2 * item.inner, item.width)
            stacked[name] = _join(folder, stacked.pop(halves[0]), stacked.pop(halves[1]), shape)
            continue
        first = ("up_proj", "up_proj") if experts.squared else ("gate_proj", "up_proj")
        for part, names in zip(item.parts, (first, ("down_proj",)), strict=True):
            rows = (part.outputs // len(names), part.inputs)
            expert_names = [f"{item.name}.{e}.{name}.weight" for e in range(item.count) for name in names]
            if f"{part.name}.weight" in tensors or expert_names[0] not in tensors:
                continue
            parts = [_find_expert(folder, name, tensors.get(name), rows, item.count) for name in expert_names]
            if (
                len({(weight.dtype, weight.block if isinstance(weight, QuantizedTensor) else 0) for weight in parts})
                > 1
            ):
                raise CheckpointError(f"{folder}: the experts of {item.name} have several dtypes; expected one for all")
            coded = [weight for weight in parts if isinstance(weight, QuantizedTensor)]
            if names == first and experts.squared:
                coded[::2] = [_steepen_codes(gate) for gate in coded[::2]]
            floats = [weight for weight in parts if isinstance(weight, StoredTensor | MadeTensor)]
            stacked = {name: tensor for name, tensor in stacked.items() if name not in expert_names}
            shape = (item.count, part.outputs, part.inputs)
            stacked[f"{part.name}.weight"] = (
                _stack_codes(folder, coded, item.count)
                if coded
                else MadeTensor(parts[0].dtype, shape, partial(_read_all, folder, floats, names))
            )
    return stacked


def _join(folder: Path, gate: Weight, up: Weight, shape: tuple[int, ...]) -> Weight:
    """For each expert, the rows of gate, then the rows of up."""
    half = (shape[0], shape[1] // 2, shape[2])
    if gate.dtype != up.dtype:
        raise CheckpointError(f"{folder}: gate and up of experts are {gate.dtype} and {up.dtype}; expected one type")
    if not gate.shape == up.shape == half:
        raise CheckpointError(f"{folder}: {explain_shape('gate or up of experts', gate.shape, half)}")
    if isinstance(gate, GgmlTensor) and isinstance(up, GgmlTensor):
        return join_stacks(gate, up)
    if isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
        return _join_codes(folder, gate, up)
    assert isinstance(gate, StoredTensor | MadeTensor) and isinstance(up, StoredTensor | MadeTensor)

    def pieces() -> Iterator[Array]:
        for both in zip(_read_rows(folder, gate), _read_rows(folder, up), strict=True):
            yield np.concatenate(both)[None]

    return MadeTensor(gate.dtype, shape, pieces)


def _join_codes(folder: Path, gate: QuantizedTensor, up: QuantizedTensor) -> QuantizedTensor:
    """As :func:`_join`, of codes that come an expert at a time."""
    rows, columns = gate.codes.shape

    def pieces() -> Iterator[Array]:
        for both in zip(read_pieces(folder, gate.codes), read_pieces(folder, up.codes), strict=True):
            yield np.concatenate(both)

    def joined(parts: Sequence[Callable[[], NDArray[np.float32]]]) -> NDArray[np.float32]:
        both = [read().reshape(gate.stacked, rows // gate.stacked, -1) for read in parts]
        return np.concatenate(both, 1).reshape(2 * rows, -1)

    offsets = [it.offsets for it in (gate, up) if it.offsets is not None]
    codes = MadeTensor(gate.dtype, (2 * rows, columns), pieces)
    scales = partial(joined, [it.scales for it in (gate, up)])
    return replace(gate, codes=codes, scales=scales, offsets=partial(joined, offsets) if offsets else None)


def _read_rows(folder: Path, tensor: StoredTensor | MadeTensor) -> Iterator[Array]:
    return (row for piece in read_pieces(folder, tensor) for row in piece)


def read_pieces(folder: Path, tensor: StoredTensor | MadeTensor) -> Iterator[Array]:
    files = folder if folder.is_dir() else folder.parent  # a model in one file
    return tensor.pieces() if isinstance(tensor, MadeTensor) else _read_all(files, [tensor])


def copy_tensor(folder: Path, tensor: StoredTensor | MadeTensor) -> MadeTensor:
    """A copy of a tensor of ``folder``, for an export that does not link its file."""
    return MadeTensor(tensor.dtype, tensor.shape, partial(read_pieces, folder, tensor))


def _stack_codes(folder: Path, parts: Sequence[QuantizedTensor], count: int) -> QuantizedTensor:
    (rows, columns), block = parts[0].codes.shape, parts[0].block
    groups = (rows, columns // block)

    def zero_points() -> Array:
        return np.concatenate([it.zero_points() if it.zero_points else np.zeros(groups, np.int8) for it in parts])

    return QuantizedTensor(
        MadeTensor(
            parts[0].dtype,
            (len(parts) * rows, columns),
            lambda: (piece for it in parts for piece in read_pieces(folder, it.codes)),
        ),
        block,
        lambda: np.concatenate([it.scales() for it in parts]),
        zero_points if any(it.zero_points for it in parts) else None,
        stacked=count,
    )


def _find_expert(
    folder: Path, name: str, tensor: Weight | None, shape: tuple[int, ...], count: int
) -> StoredTensor | MadeTensor | QuantizedTensor:
    if tensor is None:
        raise CheckpointError(
            f"{folder}: tensor {name} is missing; config.json asks for {count} experts in each of these layers: "
            "download the checkpoint again"
        )
    if tensor.shape != shape:
        raise CheckpointError(f"{folder}: {explain_shape(name, tensor.shape, shape)}")
    assert not isinstance(tensor, GgmlTensor), "GGUF files store experts as stacks"
    if isinstance(tensor, Mxfp4Tensor) or getattr(tensor, "order", None) is not None:
        raise CheckpointError(
            f"{folder}: {name} has act-order, which llmc does not read for experts; export the checkpoint that it was "
            "made from"
        )
    return tensor


def _read_all(
    folder: Path, tensors: Sequence[StoredTensor | MadeTensor], names: tuple[str, ...] = ()
) -> Iterator[Array]:
    for number, tensor in enumerate(tensors):
        is_gate = names == ("up_proj", "up_proj") and number % 2 == 0
        for matrix in [_map(folder, tensor)] if isinstance(tensor, StoredTensor) else tensor.pieces():
            yield (matrix * STEEP).astype(matrix.dtype) if is_gate else matrix


def _steepen(folder: Path, tensor: Weight) -> Weight:
    """Experts' weights times STEEP, of the same type."""
    if isinstance(tensor, QuantizedTensor):
        return _steepen_codes(tensor)
    dtype = array_type(tensor.dtype)
    return make_view(folder, tensor, lambda whole: (whole * STEEP).astype(dtype), tensor.shape)


def _steepen_codes(tensor: QuantizedTensor) -> QuantizedTensor:
    def times(read: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.asarray(read() * np.float32(STEEP), np.float32)

    offsets = None if tensor.offsets is None else partial(times, tensor.offsets)
    return replace(tensor, scales=partial(times, tensor.scales), offsets=offsets)


def _map(folder: Path, tensor: StoredTensor) -> Array:
    return np.memmap(folder / tensor.file, array_type(tensor.dtype), "r", tensor.offset, tensor.shape)


def _unpack_parameters(
    folder: Path, config: DecoderConfig, name: str, tensor: Weight, parts: Mapping[str, tuple[int, ...]]
) -> Iterator[Weight]:
    rows = [0, *accumulate(shape[0] for shape in parts.values())]
    whole = (rows[-1], *next(iter(parts.values()))[1:])
    turned = config.transposed and len(whole) > 1 and not isinstance(tensor, QuantizedTensor)
    if tensor.shape != (whole[::-1] if turned else whole):
        raise CheckpointError(f"{folder}: {explain_shape(name, tensor.shape, whole[::-1] if turned else whole)}")
    if config.packed_groups:
        yield from (_take_rows(folder, tensor, each) for each in _list_rows(config, parts))
        return
    for (start, stop), shape in zip(pairwise(rows), parts.values(), strict=True):
        if turned:
            yield make_view(folder, tensor, partial(_columns, start, stop), shape)
        else:
            yield rows_of(tensor, start, stop)


def _list_rows(config: DecoderConfig, parts: Mapping[str, tuple[int, ...]]) -> Iterator[Indices]:
    """The rows of each parameter in a tensor whose groups have rows of all parameters."""
    sections = list[tuple[int, ...]]()
    for name, shape in parts.items():
        mixer = config.layers[int(name.split(".")[2])].recurrent
        sections.append(mixer.sections if mixer and name.endswith(".in_proj.weight") else (shape[0],))
    ends = np.cumsum([size // config.packed_groups for size in chain(*sections)])
    numbers = np.arange(ends[-1] * config.packed_groups).reshape(config.packed_groups, -1)
    columns = iter(np.split(numbers, ends[:-1], axis=1))
    return (np.concatenate([next(columns).ravel() for _ in own]) for own in sections)


def _take_rows(folder: Path, tensor: Weight, rows: Indices) -> Weight:
    """These rows of a matrix or a bias, in this order."""
    if isinstance(tensor, QuantizedTensor):
        zeros, offsets = tensor.zero_points, tensor.offsets
        return replace(
            tensor,
            codes=make_view(folder, tensor.codes, lambda whole: whole[rows], (len(rows), *tensor.codes.shape[1:])),
            scales=lambda: tensor.scales()[rows],
            zero_points=None if zeros is None else lambda: zeros()[rows],
            offsets=None if offsets is None else lambda: offsets()[rows],
        )
    return make_view(folder, tensor, lambda whole: whole[rows], (len(rows), *tensor.shape[1:]))


def _columns(start: int, stop: int, whole: Array) -> Array:
    turned: Array = whole.T[start:stop]
    return turned


def plus_one(weight: Array) -> Array:
    gain: Array = weight.astype(np.float32) + np.float32(1)
    return gain


def _scale_channels(mixer: RecurrentConfig, weight: Array) -> Array:
    """The weight of a convolution with its channels (values, keys and queries) scaled."""
    keys = mixer.key_heads * mixer.key_dim
    scales = np.repeat(np.array(mixer.scales[1:4], np.float32), (mixer.inner, keys, keys))
    scaled: Array = weight.astype(np.float32) * scales[:, None, None]
    return scaled


def make_view(
    folder: Path, tensor: Weight, view: Callable[[Array], Array], shape: tuple[int, ...], dtype: str = ""
) -> MadeTensor:
    if not isinstance(tensor, StoredTensor | MadeTensor):
        raise CheckpointError(
            f"{folder}: a quantized tensor {list(tensor.shape)} packs parameters in an order that llmc cannot "
            "read from codes; export the checkpoint that it was made from"
        )

    def pieces() -> Iterator[Array]:
        whole = list(read_pieces(folder, tensor))
        rows = view(np.concatenate(whole) if len(whole) > 1 else whole[0])
        step = max(1, PIECE * len(rows) // rows.size)
        for start in range(0, len(rows), step):
            yield rows[start : start + step]

    return MadeTensor(dtype if dtype and tensor.dtype in FLOATS else tensor.dtype, shape, pieces)
