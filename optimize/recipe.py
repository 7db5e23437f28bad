"""Recipes: how weights are to be compiled, from the command line or from a TOML file, parsed strictly."""

import difflib
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from llmc.bundle import Limits, Recipe
from llmc.errors import UsageError
from llmc.optimize.lower.plan import Float32, Form, PerToken, WeightOnly
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.targets import Capabilities

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Blocks of 128 read a quarter fewer scale bytes than 32 and decode 1.5 times as fast; quality is measured, not assumed.
DEFAULT_BLOCK = 128
BLOCKS = (32, 64, 128, 256)
# Positions of a rotary table are the only cost of a long context before it is used.
DEFAULT_CONTEXT = 32768
# Attention costs the square of a chunk, and activations of 512 tokens outgrow the caches: 256 is 5 % faster than 512
# at a prompt of 512, equal at 2,048, and takes half the workspace.
DEFAULT_CHUNK = 256
BITS = {"int8": 8, "int4": 4}

V = TypeVar("V")


@dataclass(frozen=True)
class Request:
    """A recipe as written: None means the default of target and model.

    Attributes:
        precision: fp32, int8 (default) or int4.
        block_size: inputs that share a weight scale: 32, 64, 128 (default) or 256.
        head: int8 or int4, of the head and a tied embedding; default: as ``precision``.
        phases: split (a W8A8 graph for prefill beside the weight-only one, default) or shared (one graph, less memory).
        max_context: longest sequence; default: the checkpoint's, at most 32,768.
        max_batch: rows of the cache that may be asked for; default 1.
        prefill_chunk: prompt tokens per call; default 256.
    """

    precision: str | None = None
    block_size: int | None = None
    head: str | None = None
    phases: str | None = None
    max_context: int | None = None
    max_batch: int | None = None
    prefill_chunk: int | None = None

    def over(self, other: "Request") -> "Request":
        """This request with what it leaves open taken from ``other``."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(other, **given)


def read_recipe(path: Path) -> Request:
    """Parse a recipe file.

    Raises:
        UsageError: unreadable, not TOML, an unknown key or a value of the wrong type.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not a readable TOML recipe ({error})") from error
    known = {f.name: str if f.name in ("precision", "head", "phases") else int for f in fields(Request)}
    for key, value in data.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; expected some of {', '.join(known)}"
            raise UsageError(f"{path}: unknown key {key!r}{hint}")
        if type(value) is not known[key]:
            raise UsageError(
                f"{path}: {key} is {value!r}, expected {'text' if known[key] is str else 'a whole number'}"
            )
    return Request(**data)


def resolve(request: Request, target: Capabilities, max_positions: int, name: str) -> tuple[Recipe, Limits]:
    """Fill in the defaults and refuse what the target or the model cannot do.

    Raises:
        UsageError: a value is out of range or not supported by the target.
    """
    precision = _one_of("precision", _or(request.precision, "int8"), target.precisions)
    split = precision != "fp32"
    phases = _one_of(
        "phases", _or(request.phases, "split" if split else "shared"), ("split", "shared") if split else ("shared",)
    )
    block = _one_of("block_size", _or(request.block_size, DEFAULT_BLOCK), BLOCKS) if split else 0
    if not split and request.block_size is not None:
        raise UsageError("block_size is for int8 and int4, the precision is fp32; leave it out")
    head = _one_of("head", _or(request.head, precision), tuple(BITS) if split else (precision,))
    context = _between("max_context", _or(request.max_context, min(max_positions, DEFAULT_CONTEXT)), 2, max_positions)
    limits = Limits(
        max_context=context,
        max_batch=_between("max_batch", _or(request.max_batch, 1), 1, 1024),
        prefill_chunk=min(context, _between("prefill_chunk", _or(request.prefill_chunk, DEFAULT_CHUNK), 1, 65536)),
    )
    return Recipe(name=name, precision=precision, block_size=block, head=head, phases=phases), limits


def forms(recipe: Recipe) -> dict[str, tuple[Form, Form]]:
    """The graphs to make: for each phase the form of the body's linears and of the head (and a tied embedding)."""
    if recipe.precision == "fp32":
        return {"shared": (Float32(), Float32())}
    weights = WeightOnly(Grid(BITS[recipe.precision], recipe.block_size))
    head = WeightOnly(Grid(BITS[recipe.head], recipe.block_size))
    if recipe.phases == "shared":
        return {"shared": (weights, head)}
    return {"prefill": (PerToken(), head), "decode": (weights, head)}


def _or(value: V | None, default: V) -> V:
    """Only None leaves the choice to us: 0 and "" are values, and wrong ones."""
    return default if value is None else value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(map(str, allowed))}")
    return value


def _between(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UsageError(f"{name} is {value}, expected {low} ... {high}")
    return value
