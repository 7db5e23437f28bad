"""What each target can do. Lowering asks this record, never a name."""

from dataclasses import dataclass

from llmc.errors import UsageError


@dataclass(frozen=True)
class Capabilities:
    """Facts about one engine on one kind of processor.

    ``caches``: types that the KV cache may have, and the oldest engine that knows each.
    ``multi_row_prefill``: attention takes more than one new token in several rows at once.
    ``w8a8_features``: CPU features without which the engine's uint8 x int8 product saturates, by machine.
    """

    name: str
    engine: str
    engine_minimum: str
    opset: int
    ir_version: int
    precisions: tuple[str, ...]
    caches: dict[str, str]
    multi_row_prefill: bool
    w8a8_features: dict[str, tuple[str, ...]]


TARGETS = {
    "cpu": Capabilities(
        name="cpu",
        engine="onnxruntime",
        engine_minimum="1.23",  # the first with 8-bit MatMulNBits and row gather; the last one for Python 3.10
        opset=21,
        ir_version=10,
        precisions=("fp32", "fp16", "int8", "int4"),
        # The oldest version that was tried with each; 1.23 refuses an int8 cache.
        caches={"float32": "1.23", "int8": "1.31", "int8-channel": "1.31"},
        multi_row_prefill=False,
        # vpmaddubsw saturates at 16 bits; vpdpbusd accumulates in 32. Arm's dot products accumulate in 32 bits always.
        w8a8_features={"x86_64": ("vnni",), "aarch64": ()},
    ),
}


def capabilities(target: str) -> Capabilities:
    """The record of ``target``.

    Raises:
        UsageError: no such target.
    """
    if target not in TARGETS:
        raise UsageError(f"target {target!r} is unknown; expected one of {', '.join(TARGETS)}")
    return TARGETS[target]
