"""Find quantized tensors of safetensors files by name, and convert them to :mod:`llmc.export.sources.codes`.

Layouts for a linear P with a weight [N, K]; an int32 word holds 32 / bits codes, the first one lowest unless stated:

* AWQ (AutoAWQ's ``gemm``, arXiv 2306.00978): ``P.qweight`` [K, N / 8] and ``P.qzeros`` [K / group, N / 8] pack outputs,
  in the order 0, 2, 4, 6, 1, 3, 5, 7; ``P.scales`` [K / group, N].
* GPTQ (AutoGPTQ, GPTQModel, arXiv 2210.17323): ``P.qweight`` [K * bits / 32, N] packs inputs, ``P.qzeros``
  [K / group, N * bits / 32] packs outputs; ``P.scales`` [K / group, N]; ``P.g_idx`` [K] is the group of each input. The
  format ``gptq`` stores zero points minus one, ``gptq_v2`` unchanged.
* compressed-tensors: ``P.weight_packed`` [N, K * bits / 32] packs inputs, ``P.weight_zero_point`` [N * bits / 32,
  K / group] packs outputs, both plus 2^(bits-1); ``P.weight_scale`` [N, K / group]; ``P.weight_shape``, and with
  act-order ``P.weight_g_idx``. ``int-quantized`` stores codes unpacked as ``P.weight`` int8 [N, K].
* mxfp4, for the experts P of a layer: ``P_blocks`` uint8 [E, N, K / 32, 16], two 4-bit floats per byte, the first one
  low, and ``P_scales`` uint8 [E, N, K / 32], exponents of two plus 127. They are used in place.
* fp8: ``P.weight`` float8 (e4m3) [N, K], times ``P.weight_scale_inv`` [N / 128, K / 128], or ``P.weight_scale`` of a
  block, a row or all; stacks P of experts [E, N, K] times ``P_scale_inv`` [E, rows, columns], whose blocks may be
  smaller than the config says: gate and up have at least one each. Scales may be exponents (e8m0), also of 32 columns.
* 4-bit floats (E2M1): ``P.weight`` (modelopt) or ``P.weight_packed`` (compressed-tensors) uint8 [N, K / 2], the first
  of two low. NVFP4: ``P.weight_scale`` e4m3 [N, K / 16], times ``P.weight_scale_2`` or divided by
  ``P.weight_global_scale``. MXFP4: ``P.weight_scale`` uint8 [N, K / 32], exponents of two plus 127.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import CheckpointError
from llmc.export.sources.codes import MXFP4_BLOCK, Mxfp4Tensor, QuantizedTensor, Weight, pack_codes
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.quantization import Quantization
from llmc.export.sources.safetensors import FLOATS, StoredTensor
from llmc.ggml import E2M1

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Codes to unpack at a time, in multiples of eight rows.
PIECE = 1 << 22
# Twice the values of both codes of a byte, int8 [256, 2].
PAIRS = np.stack((np.tile(E2M1, 16), np.repeat(E2M1, 16)), -1)
# Tensors about rounding of activations or of the cache, which llmc ignores.
_LEFT_OUT = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".activation_scale", "_proj_activation_scale", "_proj_input_scale",
)  # fmt: skip
Words = NDArray[np.int32]
# Types of float8's scales, and the default blocks.
SCALES, BLOCK = (*FLOATS, "F8_E8M0"), (128, 128)


def unpack_weights(folder: Path, stored: dict[str, StoredTensor], how: Quantization | None) -> dict[str, Weight]:
    """Tensors by name; the tensors of a quantized linear become one weight."""
    if how is None:
        return {**stored}
    rest, weights = {name: item for name, item in stored.items() if not name.endswith(_LEFT_OUT)}, {}
    if how.method == "mxfp4":
        weights = _find_mxfp4(folder, rest)
    for name in list(rest):
        module, _, part = name.rpartition(".")
        if name not in rest:
            continue  # read together with the codes
        if part in ("qweight", "weight_packed") or (part == "weight" and rest[name].dtype in ("I8", "F8_E4M3", "U8")):
            weights[f"{module}.weight"] = _Parts(folder, module, rest, how).weight(part)
        elif rest[name].dtype == "F8_E4M3" and how.method == "fp8":
            weights[name] = _Parts(folder, name, rest, how).stack()
    for name in weights:
        if name in rest:
            raise CheckpointError(f"{folder}: {name} is stored twice, quantized and unquantized; remove one of them")
    return {**rest, **weights}


def _find_mxfp4(folder: Path, rest: dict[str, StoredTensor]) -> dict[str, Weight]:
    """Experts by name; their tensors are removed from ``rest``."""
    stacks: dict[str, Weight] = {}
    for name in [name for name in rest if name.endswith(("_blocks", "_scales"))]:
        module, _, part = name.rpartition("_")
        parts = [rest.pop(f"{module}_{each}", None) for each in ("blocks", "scales")] if module not in stacks else []
        if not parts:
            continue
        blocks, scales = parts
        if blocks is None or scales is None:
            missing = "blocks" if blocks is None else "scales"
            raise CheckpointError(f"{folder}: {module}_{missing} is missing beside its {part}; download it again")
        if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_BLOCK // 2:
            raise CheckpointError(
                f"{folder}: {module}_blocks is {blocks.dtype} {list(blocks.shape)}, expected U8 [experts, outputs, "
                f"inputs / {MXFP4_BLOCK}, {MXFP4_BLOCK // 2}]"
            )
        if (scales.dtype, scales.shape) != ("U8", blocks.shape[:3]):
            raise CheckpointError(
                f"{folder}: {module}_scales is {scales.dtype} {list(scales.shape)}, expected U8 "
                f"{list(blocks.shape[:3])}, one per block"
            )
        experts, outputs, groups, width = blocks.shape
        stacks[module] = Mxfp4Tensor(replace(blocks, shape=(experts, outputs, groups * width)), scales)
    return stacks


class _Parts:
    """The tensors of one quantized linear; ``rest`` holds the tensors not used yet."""

    def __init__(self, folder: Path, module: str, rest: dict[str, StoredTensor], how: Quantization) -> None:
        self.folder, self.module, self.rest, self.how = folder, module, rest, how

    def weight(self, part: str) -> Weight:
        """The linear's weight; ``part`` names its codes."""
        if self.module in self.how.ignored:
            raise self._error(f"is quantized ({part}), but quantization_config lists it as unquantized")
        makers = {
            ("awq", "qweight"): self._awq,
            ("gptq", "qweight"): self._gptq,
            ("compressed-tensors", "weight_packed"): self._read_packed,
            ("compressed-tensors", "weight"): self._plain,
            ("fp8", "weight"): self._plain,
            ("modelopt", "weight"): self._plain,
        }
        if (self.how.method, part) not in makers:
            raise self._error(f"is stored as {part}, which {self.how.method} checkpoints do not have")
        return makers[self.how.method, part]()

    def stack(self) -> Weight:
        """Weights of all experts in float8, stored as one tensor with the module's name."""
        codes = self.rest.pop(self.module)
        if len(codes.shape) != 3 or 0 in codes.shape:
            raise self._error(f"is {codes.dtype} {list(codes.shape)}, expected float8 of experts, outputs and inputs")
        experts, outputs, inputs = codes.shape
        name = "_scale_inv" if f"{self.module}_scale_inv" in self.rest else "_scale"
        scales = self.rest.pop(f"{self.module}{name}", None)
        grid = () if scales is None or scales.dtype not in SCALES else scales.shape
        if scales is None or len(grid) != 3 or grid[0] != experts or 0 in grid:
            actual = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise self._error(f"needs {self.module}{name} [{experts}, rows, columns], which is {actual}")
        rows, columns = (
            self._fit(size, count, block)
            for size, count, block in zip((outputs, inputs), grid[1:], self.how.block, strict=True)
        )

        def pieces() -> Iterator[NDArray[Any]]:
            for expert in range(experts):
                factors = self._read(scales, expert, expert + 1)[0].astype(np.float32)
                factors = np.repeat(np.repeat(factors, rows, axis=0)[:outputs], columns, axis=1)[:, :inputs]
                yield (self._read(codes, expert, expert + 1)[0].astype(np.float32) * factors)[None]

        return MadeTensor("F32", codes.shape, pieces)

    def _fit(self, size: int, count: int, block: int) -> int:
        """Number of values that share a scale, if ``count`` scales cover ``size`` values."""
        if block and -(-size // block) == count:
            return block
        if size % count:
            raise self._error(f"has {count} scales for {size} values, expected blocks of {block or size}")
        return size // count

    # ------------------------------------------------------------------------------------------------- methods

    def _awq(self) -> Weight:
        words = self._take("qweight", ("I32",), None)
        inputs, columns = words.shape
        outputs = 8 * columns
        groups = self._groups(self._peek("scales", (None, outputs)).shape[0], inputs, 4)
        scales = self._take("scales", FLOATS, (groups, outputs))
        zeros = self._take("qzeros", ("I32",), (groups, columns))

        def pieces() -> Iterator[NDArray[np.uint8]]:
            stored = self._read(words)
            for start, stop in _spans(outputs, inputs):
                yield pack_codes(_awq_outputs(stored[:, start // 8 : stop // 8]))

        codes = MadeTensor("I4", (outputs, inputs), pieces)
        return self._make_quantized(codes, inputs // groups, scales, lambda: _awq_outputs(self._read(zeros)))

    def _gptq(self) -> Weight:
        words = self._take("qweight", ("I32",), None)
        grid = self.how.grids[0]
        inputs, outputs = words.shape[0] * 32 // grid.bits, words.shape[1]
        groups = self._groups(self._peek("scales", (None, outputs)).shape[0], inputs, grid.bits)
        scales = self._take("scales", FLOATS, (groups, outputs))
        zeros = self._take("qzeros", ("I32",), (groups, -(-outputs * grid.bits // 32)))
        order = self._order("g_idx", inputs, groups)

        def pieces() -> Iterator[NDArray[Any]]:
            stored = self._read(words)
            for start, stop in _spans(outputs, inputs):
                yield _by_row(np.ascontiguousarray(stored[:, start:stop].T), grid.bits, order)

        def zero_points() -> NDArray[np.int8]:
            levels = _fields(self._read(zeros), grid.bits)[:, :outputs].astype(np.int16) + self.how.zero_offset
            if int(levels.max()) >> grid.bits:
                raise self._error(
                    f"has a zero point of {int(levels.max())}, beyond its {grid.bits} bits: the format gptq cannot "
                    "store zero points of 0; quantize it again with gptq_v2"
                )
            return _center(levels.T, grid.bits)

        codes = MadeTensor(f"I{grid.bits}", (outputs, inputs), pieces)
        return self._make_quantized(codes, inputs // groups, scales, zero_points, order)

    def _read_packed(self) -> Weight:
        words = self._take("weight_packed", ("I32", "U8"), None)
        if words.dtype == "U8":
            return self._float4(words)
        outputs = words.shape[0]
        shape = self._read(self._take("weight_shape", ("I64", "I32"), (2,))).tolist()
        bits = next((grid.bits for grid in self.how.grids if words.shape[1] * 32 == shape[1] * grid.bits), 0)
        if shape[0] != outputs or not bits:
            known = " or ".join(str(grid.bits) for grid in self.how.grids)
            raise self._error(f"has weight_packed {list(words.shape)}, no {shape} of {known} bits in whole words")
        inputs = shape[1]
        groups = self._groups(self._peek("weight_scale", (outputs, None)).shape[1], inputs, bits)
        scales = self._take("weight_scale", FLOATS, (outputs, groups))
        stored_zeros = self._optional("weight_zero_point", ("I32",), (-(-outputs * bits // 32), groups))
        order = self._order("weight_g_idx", inputs, groups)

        def pieces() -> Iterator[NDArray[Any]]:
            for start, stop in _spans(outputs, inputs):
                yield _by_row(self._read(words, start, stop), bits, order)

        def zero_points() -> NDArray[np.int8]:
            assert stored_zeros is not None
            levels = _fields(np.ascontiguousarray(self._read(stored_zeros).T), bits)[:, :outputs].T
            return _center(levels, bits)

        codes = MadeTensor(f"I{bits}", (outputs, inputs), pieces)
        return self._make_quantized(
            codes, inputs // groups, scales, zero_points if stored_zeros else None, order, False
        )

    def _plain(self) -> Weight:
        codes = self._take("weight", ("I8", "F8_E4M3", "U8"), None)
        if codes.dtype != "I8":
            return self._float8(codes) if codes.dtype == "F8_E4M3" else self._float4(codes)
        outputs, inputs = codes.shape
        shape = self._peek("weight_scale", None).shape
        per_row = shape in ((1,), (), (outputs,))  # one scale for all, or one per row
        groups = 1 if per_row else self._groups(shape[-1], inputs, 8)
        scales = self._take("weight_scale", FLOATS, shape if per_row else (outputs, groups))
        zeros = self._optional("weight_zero_point", ("I8",), scales.shape)

        def per_block(stored: StoredTensor, dtype: Any) -> NDArray[Any]:
            return np.ascontiguousarray(
                np.broadcast_to(self._read(stored).astype(dtype).reshape(-1, groups), (outputs, groups))
            )

        made = QuantizedTensor(codes, inputs // groups, partial(per_block, scales, np.float32))
        if zeros is None:
            return made
        return _with_zeros(made, partial(per_block, zeros, np.int8))

    def _float8(self, codes: StoredTensor) -> Weight:
        outputs, inputs = codes.shape
        name = "weight_scale_inv" if f"{self.module}.weight_scale_inv" in self.rest else "weight_scale"
        shape = self._peek(name, None).shape
        block = self.how.block if len(shape) < 2 or shape == (outputs, 1) or 0 not in self.how.block else BLOCK
        block = (1, MXFP4_BLOCK) if self._peek(name, None).dtype == "U8" else block
        rows, columns = block if 0 not in block else (1 if shape[:1] == (outputs,) else outputs, inputs)
        blocks = (-(-outputs // rows), -(-inputs // columns))
        if shape != blocks and (0 not in self.how.block or shape not in ((1,), (), (outputs,))):
            raise self._error(f"has {name} {list(shape)}, but blocks of {rows} x {columns} need {list(blocks)}")
        scales = self._take(name, (*SCALES, "U8"), shape)

        def pieces() -> Iterator[NDArray[Any]]:
            factors = np.broadcast_to(self._read_scales(scales).reshape(-1, blocks[1]), blocks)
            for start, stop in _spans(outputs, inputs):
                values = self._read(codes, start, stop).astype(np.float32)
                values *= np.repeat(factors[np.arange(start, stop) // rows], columns, axis=1)[:, :inputs]
                yield values

        return MadeTensor("F32", (outputs, inputs), pieces)  # 16 bits would round the product again

    def _float4(self, packed: StoredTensor) -> Weight:
        """4-bit floats as integers of 8 bits: twice their values, with half their scales."""
        outputs, inputs = packed.shape[0], 2 * packed.shape[1]
        block = 16 if self._peek("weight_scale", None).dtype == "F8_E4M3" else MXFP4_BLOCK
        if inputs % block:
            raise self._error(f"has {inputs} inputs, expected whole blocks of {block}")
        scales = self._take("weight_scale", ("F8_E4M3", "F8_E8M0", "U8"), (outputs, inputs // block))
        part = "weight_scale_2" if self.how.method == "modelopt" else "weight_global_scale"
        common = None
        if block == 16:
            shape = self._peek(part, None).shape
            common = self._take(part, ("F32",), (1,) if shape else ())

        def pieces() -> Iterator[NDArray[np.int8]]:
            for start, stop in _spans(outputs, inputs):
                yield PAIRS[self._read(packed, start, stop)].reshape(stop - start, inputs)

        def halves() -> NDArray[np.float32]:
            values: NDArray[np.float32] = self._read_scales(scales) * np.float32(0.5)
            if common is not None:
                factor = self._read(common).reshape(())
                values = values * factor if part == "weight_scale_2" else values / factor
            return values

        return QuantizedTensor(MadeTensor("I8", (outputs, inputs), pieces), block, halves)

    # --------------------------------------------------------------------------------------------------- parts

    def _make_quantized(
        self,
        codes: MadeTensor,
        block: int,
        scales: StoredTensor,
        zero_points: Any,
        order: NDArray[np.int32] | None = None,
        by_input: bool = True,
    ) -> QuantizedTensor:
        """The matrix; ``by_input``: scales are stored [K / block, N]."""

        def turned() -> NDArray[np.float32]:
            scale_values = self._read(scales).astype(np.float32)
            return np.ascontiguousarray(scale_values.T) if by_input else scale_values

        made = QuantizedTensor(codes, block, turned, order=order)
        return made if zero_points is None else _with_zeros(made, zero_points)

    def _groups(self, groups: int, inputs: int, bits: int) -> int:
        expected = {grid.group for grid in self.how.grids if grid.bits == bits}
        width = inputs // groups if groups and inputs % groups == 0 else 0
        if not width or not ({width, None} & expected or (groups == 1 and 0 in expected)):
            named = sorted(group or -1 for group in expected if group is not None)
            wanted = " or ".join(map(str, named)) or "any number"
            raise self._error(
                f"has {groups} scales for {inputs} inputs, but quantization_config says group_size={wanted}, expected "
                "as many whole groups"
            )
        return groups

    def _order(self, name: str, inputs: int, groups: int) -> NDArray[np.int32] | None:
        """For each input its column after sorting by group; None if inputs are already sorted."""
        stored = self._optional(name, ("I32",), (inputs,))
        if stored is None:
            return None
        group_of = self._read(stored)
        width = inputs // groups
        if (group_of == -1).all():  # compressed-tensors writes this without act-order
            return None
        if not np.array_equal(np.sort(group_of), np.arange(inputs) // width):
            raise self._error(f"has a {name} that does not put {width} inputs into each of {groups} groups")
        order: NDArray[np.int32] = np.empty(inputs, np.int32)
        order[np.argsort(group_of, kind="stable")] = np.arange(inputs, dtype=np.int32)
        return None if np.array_equal(order, np.arange(inputs)) else order

    def _peek(self, part: str, shape: tuple[int | None, ...] | None) -> StoredTensor:
        tensor = self.rest.get(f"{self.module}.{part}")
        if tensor is None:
            raise self._error(f"is quantized, but its {part} is missing; download the checkpoint again")
        if shape is not None and (
            len(tensor.shape) != len(shape) or any(b not in (a, None) for a, b in zip(tensor.shape, shape, strict=True))
        ):
            wanted = ["any" if size is None else size for size in shape]
            raise self._error(f"has {part} {list(tensor.shape)}, expected {wanted}")
        return tensor

    def _take(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None) -> StoredTensor:
        tensor = self._peek(part, shape)
        if tensor.dtype not in dtypes or (shape is None and (len(tensor.shape) != 2 or 0 in tensor.shape)):
            raise self._error(
                f"has {part} {list(tensor.shape)} of type {tensor.dtype}, expected {' or '.join(dtypes)}"
                f"{'' if shape is not None else ' with rows and columns'}"
            )
        return self.rest.pop(f"{self.module}.{part}")

    def _optional(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> StoredTensor | None:
        return self._take(part, dtypes, shape) if f"{self.module}.{part}" in self.rest else None

    def _read(self, tensor: StoredTensor, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        return read_rows(self.folder, tensor, start, stop)

    def _read_scales(self, scales: StoredTensor) -> NDArray[np.float32]:
        """Scales as float32; uint8 are exponents of two plus 127."""
        stored = self._read(scales)
        floats: NDArray[np.float32] = stored.view(
            array_type("F8_E8M0") if scales.dtype == "U8" else stored.dtype
        ).astype(np.float32)
        return floats

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {self.module} {problem}")


def _with_zeros(made: QuantizedTensor, zero_points: Callable[[], NDArray[np.int8]]) -> QuantizedTensor:
    """Add its zero points, unless all are in the middle of the range, which is 0."""
    return replace(made, zero_points=zero_points) if zero_points().any() else made


def read_rows(folder: Path, tensor: StoredTensor, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    dtype = array_type(tensor.dtype)
    rows = tensor.shape[0] if tensor.shape else 1
    stop = rows if stop is None else stop
    row = tensor.length // rows
    try:
        with (folder / tensor.file).open("rb") as file:
            file.seek(tensor.offset + start * row)
            data = file.read((stop - start) * row)
    except OSError as error:
        raise CheckpointError(f"{folder / tensor.file}: cannot be read ({error.strerror})") from error
    if len(data) != (stop - start) * row:
        raise CheckpointError(f"{folder / tensor.file}: ends early; the file is truncated, copy it again")
    return np.frombuffer(data, dtype).reshape((stop - start, *tensor.shape[1:]) if tensor.shape else ())


def _spans(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about :data:`PIECE` codes; all except the last are multiples of eight rows."""
    step = max(8, PIECE // inputs // 8 * 8)
    return ((start, min(start + step, outputs)) for start in range(0, outputs, step))


def _fields(words: Words, bits: int) -> NDArray[np.uint8]:
    """Unpack words [R, C] along their rows to [R, C * 32 / bits], lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return octets
    nibbles: NDArray[np.uint8] = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = octets & np.uint8(15), octets >> np.uint8(4)
    return nibbles


def _by_row(words: Words, bits: int, order: NDArray[np.int32] | None) -> NDArray[Any]:
    """Convert rows of words that pack inputs: make codes signed, and sort them by group."""
    if order is not None:
        codes = _center(np.take(_fields(words, bits), np.argsort(order), axis=1), bits)
        return pack_codes(codes) if bits == 4 else codes
    # Bytes of little-endian words are in code order; flipping each code's highest bit makes it signed.
    octets = words.view(np.uint8).reshape(len(words), -1) ^ np.uint8(0x88 if bits == 4 else 0x80)
    signed: NDArray[Any] = octets if bits == 4 else octets.view(np.int8)
    return signed


def _center(levels: NDArray[Any], bits: int) -> NDArray[np.int8]:
    signed: NDArray[np.int8] = (levels.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
    return signed


def _awq_outputs(words: Words) -> NDArray[np.int8]:
    """Words [K, N / 8] in AWQ's order to codes [N, K], signed."""
    fields = _fields(words, 4).reshape(len(words), -1, 8)
    levels = np.empty_like(fields)
    levels[:, :, AWQ_ORDER] = fields
    turned = np.ascontiguousarray(levels.reshape(len(words), -1).T)
    return _center(turned, 4)
