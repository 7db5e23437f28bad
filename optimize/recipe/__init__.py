"""Recipes: how weights are to be compiled, from the command line or from a TOML file, parsed strictly."""

import difflib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import llmc
from llmc.bundle import MOST_ADAPTERS, MOST_RANK, TWO_OF_FOUR, Budget, Geometry, Limits, Recipe, version
from llmc.bundle.model.kinds import allows, kinds_of, refuse, takes_whole_texts
from llmc.bundle.model.names import SENSITIVE
from llmc.errors import UsageError, format_name, format_value, printable
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import Capabilities
from llmc.runtime.bench.phases import LARGEST_BATCH
from llmc.runtime.sessions.onnxruntime.cpu import import_onnxruntime
from llmc.strict import parse_toml, read_bytes

# Plain rounding needs blocks of 32, with 8 bits to lose no more than llama.cpp's Q8_0, with 4 bits to make sense. With
# 8 bits a rotated stream loses as little in blocks of 64, which take a tenth less time, and so do 4 bits by GPTQ.
PLAIN_BLOCK, WIDER_BLOCK = 32, 64
BLOCKS = (32, 64, 128, 256)
# The KL of prompts is the same from 0.5 to 0.7, and half as much again at 0.85 (SmolLM2-135M, unrotated).
DEFAULT_SMOOTHING = 0.6
# Positions of a rotary table are the only cost of a long context before it is used.
DEFAULT_CONTEXT = 32768
# TensorRT's cache is allocated whole: 32,768 positions of 8 rows would be many gigabytes that nobody asked for.
ENGINE_CONTEXT = 4096
# The W8A8 graph takes hardly longer for 8 rows than for one, and unused ones cost nothing.
DEFAULT_BATCH = 8
DEFAULT_RANK = 16  # the most common one of adapters
# Default where a text is one call: attention scores it against itself, which takes the square of the context.
WHOLE_CONTEXT = 2048
BITS = {"int8": 8, "int4": 4}
# Float precisions and what they compute in, where the target can choose.
COMPUTED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MOST_RECIPE = 1 << 20  # bytes of a recipe file; those that come with llmc have a thousand
LARGEST_NUMBER = 1 << 53  # whole numbers beyond are no exact floats
SCHEMES = ("rtn", "gptq")
PRUNINGS = ("magnitude", "wanda")
# A share beyond leaves no model; of 2:4 half is zero.
LARGEST_SPARSITY = 0.9

V = TypeVar("V")
R = TypeVar("R", bound="Request")
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Expected:
    """Results that a recipe file states for the small model of the source tree; a test holds them."""

    prefill_mean_kl: float
    decode_mean_kl: float
    decode_top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe as written: None means the default of target and model."""

    description: str | None = None  # one sentence for people
    # fp32, fp16 (on CPUs stored so and computed in float32), int8 (default), int4 (default of tensorrt); for TensorRT
    # also bf16; source (default of quantized checkpoints) keeps their integers
    precision: str | None = None
    # rtn (round to nearest with a clip search) or gptq, for 4 bits and for the W8A8 graph of a rotated model; default:
    # gptq for these if the build can calibrate, else rtn
    scheme: str | None = None
    # inputs that share a weight scale: 32 (default), 64 (default on CPUs of a rotated decode graph in 8 bits and of 4
    # bits by gptq), 128 (default of TensorRT) or 256; TensorRT's int8 has one scale per output
    block_size: int | None = None
    # 4 bits without zero points; default: false on CPUs, true on GPUs. TensorRT has no zero points, cuda no fast
    # kernels for them
    symmetric: bool | None = None
    # int8, int4, fp16 or fp32 for lm_head and a tied embedding; default: like ``precision``, but int8 with int4, and
    # fp16 for tensorrt, where embeddings stay floats
    head: str | None = None
    # shared (one graph), split (a W8A8 graph for prefill and a weight-only one for decode: twice the weights) or single
    # (one engine; the only choice of TensorRT). Default on CPUs: shared for int8 if the model can be rotated or the
    # build can calibrate, and for experts; else split
    phases: str | None = None
    # of a W8A8 graph: per-token; of one graph: per-token (default of int8) or none; for TensorRT: none (default) or
    # static, one calibrated scale per tensor, with int8
    activations: str | None = None
    # SmoothQuant's alpha, 0 to 1; 0 is off. Default 0.6 for per-token activations of a model that cannot be rotated, if
    # the build can calibrate; else 0
    smoothing: float | None = None
    # prune the layers' linears: "2:4", or the fraction of each row that becomes zero, such as 0.5; default: no pruning
    sparsity: str | float | None = None
    # which weights are pruned: wanda (least magnitude times norm of the input; default if the build can calibrate) or
    # magnitude
    pruning: str | None = None
    # type of the KV cache: float16, float32, int8 (a scale per tensor) or int8-channel (a scale per channel). Default:
    # float16 for integer weights if every attention has groups of query heads and neither windows nor sinks, else
    # float32; on GPUs like ``compute``
    cache: str | None = None
    compute: str | None = None  # type of activations on GPUs: float16 (default), bfloat16 or float32
    # precision by pattern of module names (``*.mlp.down_proj``); the last match wins. ``sensitive`` names what loses
    # most; default: that in int8 for 4 bits by rtn on CPUs
    layers: dict[str, str] | None = None
    max_context: int | None = None  # longest sequence in tokens; default: the checkpoint's, at most 32,768
    max_batch: int | None = None  # requests that may run at once; default 8. Rows take memory only when used
    # prompt tokens per call; default 256, for cuda 2,048, for TensorRT 1,024 if built where the GPU has over 16 GiB
    prefill_chunk: int | None = None
    adapters: int | None = None  # LoRA adapters that may be loaded at a time, on CPUs; default 0
    rank: int | None = None  # largest rank of these adapters; default 16
    budget: Budget | None = None  # quality that the bundle must keep, or the build fails
    engine: EngineRequest | None = None  # how a TensorRT engine is compiled
    expected: Expected | None = None  # results on the small model, for tests and readers; builds do not use it

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of the GPU that an engine is for: 0 where that is another machine's; None for the one here."""
        return 0 if self.engine is not None and self.engine.deferred else None

    def over(self: R, other: "Request") -> R:
        """This request with what it leaves open taken from ``other``; tables are taken key by key."""
        given, taken = _collect_values(self), _collect_values(other)
        for table in ("budget", "engine"):
            if table in given and table in taken:
                taken[table] = replace(taken[table], **_collect_values(given[table]))
                del given[table]
        return replace(self, **taken | given)

    def features(self, target: Capabilities) -> list[str]:
        """The features that the request asks for, as keys of :data:`llmc.bundle.model.kinds.FEATURES`."""
        cache = self.cache or ""
        given = {
            "gpu": target.has_gpu,
            "adapters": self.adapters,
            "budget": self.budget,
            "sparsity": self.sparsity is not None,
            "pruning": self.pruning is not None,
            "scheme": self.scheme not in (None, "rtn"),
            "activations": self.activations is not None,
            "smoothing": self.smoothing,
            "phases": self.phases not in (None, "shared"),
            "cache": cache,
            "float16 cache": cache == "float16",
            "int8 cache": cache.startswith("int8"),
        }
        return [name for name, value in given.items() if value]


@dataclass(frozen=True)
class BuildRequest(Request):
    """A build as a caller asks for it: keys of a recipe, which override those of ``recipe``, and these fields."""

    source: Path  # folder written by ``llmc export``
    output: Path = Path()  # bundle folder to write; a plan has none
    target: str = "cpu"  # cpu, cuda, tensorrt or tensorrt-rtx
    recipe: Path | Request | None = None  # TOML file, or its contents
    # opens the unquantized decoder of an export on a device, for calibration; the command line passes
    # ``llmc.export.streaming.StreamedDecoder``. None: nothing is calibrated
    decoder: Callable[[Path, str], Any] | None = None
    calibration: Path | None = None  # plain text, or chats as JSONL; default: the text that comes with llmc
    samples: int | None = None  # windows of that text, at most; default 16
    length: int | None = None  # tokens of each window; default 512, or the model's context if that is shorter
    draft_head: Path | None = None  # export of the draft head that the bundle gives its hidden states to
    stages: tuple[int, ...] | None = None  # bytes of the box of each stage that the model is cut into, or zeros
    text: Path | None = None  # plain text, or chats as JSONL, that quality is judged on; default: one of llmc's
    # write quality.html into the bundle: figures by phase, layer and position; the text is the command line that the
    # page names, and may be empty
    report: str | None = None
    memory: int | None = None  # bytes that building may take; default: what is available
    force: bool = False  # replace an existing bundle

    @property
    def name(self) -> str:
        """The recipe's name: its file's, or default."""
        return printable(self.recipe.stem) if isinstance(self.recipe, Path) else "default"

    @property
    def can_calibrate(self) -> bool:
        """True if there is a decoder, and torch or a wish that takes it."""
        return self.decoder is not None and (self.calibration_option is not None or find_spec("torch") is not None)

    @property
    def calibration_option(self) -> str | None:
        """The first option of calibration that is given, or None."""
        return next((name for name in ("calibration", "samples", "length") if getattr(self, name) is not None), None)

    @property
    def judged(self) -> bool:
        """True if quality is judged on a text."""
        return self.text is not None or self.report is not None or bool(self.budget)

    def filled(self) -> "BuildRequest":
        """This request with what it leaves open taken from its recipe.
        Raises UsageError: the recipe's file is broken."""
        if self.recipe is None:
            return self
        return self.over(read_recipe(self.recipe) if isinstance(self.recipe, Path) else self.recipe)

    def features(self, target: Capabilities) -> list[str]:
        options = ("calibration", "samples", "length", "draft_head", "stages", "text", "report")
        return [*super().features(target), *(name for name in options if getattr(self, name) not in (None, ()))]


def _collect_values(values: Any) -> dict[str, Any]:
    return {f.name: getattr(values, f.name) for f in fields(values) if getattr(values, f.name) is not None}


def find_recipe(name: str | None) -> Path | None:
    """The recipe file called ``name``: a path, or one of those that come with llmc, without its suffix.
    Raises UsageError: there is none."""
    if name is None or Path(name).is_file():
        return None if name is None else Path(name)
    shipped = {path.stem: path for path in (Path(llmc.__path__[0]) / "recipes").glob("*.toml")}
    if name not in shipped:
        raise UsageError("recipe", f"is {name!r}, expected a file or one of {', '.join(sorted(shipped)) or 'none'}")
    return shipped[name]


def read_recipe(path: Path) -> Request:
    """Parse a recipe file. Raises UsageError: unreadable, not TOML, an unknown key or a value of the wrong type."""
    try:
        data = parse_toml(read_bytes(path, MOST_RECIPE))
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, absurd numbers, absurd depth
        raise UsageError("recipe", f"is {path}, which is no readable TOML ({str(error)[:200]})") from error
    request: Request = _read_table(Request, data, path)
    return request


def _read_table(kind: type, data: dict[str, Any], path: Path, table: str = "") -> Any:
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected some of {', '.join(hints)}"
            raise UsageError(f"{table}{format_name(key)}", "is no key of a recipe", hint, path=path)
    missing = [f.name for f in fields(kind) if f.name not in data and hints[f.name] in (int, float, str, bool)]
    if missing:
        raise UsageError(f"{table}{missing[0]}", "is missing", "give it", path=path)
    return kind(**{key: _read_value(hints[key], value, path, f"{table}{key}") for key, value in data.items()})


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _read_value(hint: Any, value: Any, path: Path, key: str) -> Any:
    given = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [kind for kind in given if kind is not types.NoneType]
    kind, expected = kinds[0], " or ".join(_WORDS.get(kind, "a table") for kind in kinds)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _read_table(kind, value, path, f"{key}.")
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return {name: _read_value(str, item, path, f"{key}.{name}") for name, item in value.items()}
    if type(value) is int and abs(value) >= LARGEST_NUMBER:
        raise UsageError(key, f"is {format_value(value)}, expected {expected} below {LARGEST_NUMBER}", path=path)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in _WORDS and type(value) in kinds:
        return value
    raise UsageError(key, f"is {format_value(value)}, expected {expected}", path=path)


def settle(request: BuildRequest, geometry: Geometry, target: Capabilities) -> tuple[Recipe, Limits]:
    """:func:`resolve` a filled request for a model.
    Raises UsageError: as there, or the request does not go with the model."""
    refuse(geometry, *request.features(target))
    kinds = kinds_of(geometry)
    if takes_whole_texts(geometry):
        context = either(request.max_context, min(geometry.max_positions, WHOLE_CONTEXT))
        chunk = context if allows(geometry, "cache") else request.prefill_chunk
        request = replace(request, max_context=context, prefill_chunk=chunk)
    if any(kind.one_graph for kind in kinds):
        request = replace(request, phases=either(request.phases, "shared"))
    recipe, limits = resolve(
        *(request, target, geometry.max_positions, request.name),
        calibrated=request.can_calibrate and allows(geometry, "calibration"),
        coded=bool(geometry.coded),
        rotates=geometry.rotates,
        mixes=geometry.mixes,
        one_graph=any(kind.float_activations for kind in kinds),
    )
    if request.cache is None and _halves_cache(recipe, geometry, target):
        recipe = replace(recipe, cache="float16")
    chunk = max(limits.prefill_chunk, geometry.least_chunk)
    return recipe, replace(limits, prefill_chunk=min(limits.max_context, chunk))


def _halves_cache(recipe: Recipe, geometry: Geometry, target: Capabilities) -> bool:
    """True if the cache is float16 unless the request says otherwise.

    It halves the cache everywhere, and steps that fold their heads take less time on every CPU that was tried, with
    AVX-512 and without; a lone query of a head takes more. So it follows from the model, not from the CPU that builds.
    """
    rounds = recipe.precision in (*BITS, "source")
    steps = not any(kind.float32_cache for kind in kinds_of(geometry))
    folds = steps and bool(geometry.attentions) and all(it.folds for it in geometry.attentions)
    if target.has_gpu or not (rounds and folds):
        return False
    if find_spec("onnxruntime") is None:  # to plan, nothing need be installed
        return True
    return version(import_onnxruntime("0").__version__) >= version(target.caches["float16"])


def resolve(
    request: Request,
    target: Capabilities,
    max_positions: int,
    name: str,
    calibrated: bool = False,
    coded: bool = False,
    rotates: bool = True,
    mixes: bool = False,
    one_graph: bool = False,
) -> tuple[Recipe, Limits]:
    """Fill in the defaults and refuse what the target or the model cannot do.

    ``calibrated`` tells that the build can calibrate, ``coded`` that the checkpoint stores integers, ``rotates`` that
    the model's residual stream can be rotated, ``mixes`` that inputs of linears are mixed instead, ``one_graph`` that
    one graph leaves activations in floats.

    Raises:
        UsageError: a value is out of range, contradicts another one or is not supported by the target.
    """
    precision = either(request.precision, "source" if coded else target.precision)
    if precision == "source":
        _check_source(request, coded)
    else:
        _one_of("precision", precision, (*target.precisions, "source"))
    rest = target.head if precision == "source" else precision
    head = _one_of("head", either(request.head, target.head if rest == "int4" else rest), target.precisions)
    layers = {key: _one_of(f"layers.{key}", value, target.precisions) for key, value in (request.layers or {}).items()}
    stored = {rest, head, *layers.values()}
    _refuse_integer_keys(request, precision, stored)
    # One graph multiplies 8-bit activations in decode too, which loses little where their outliers are spread.
    spread = precision == "int8" and stored == {"int8"} and (mixes or ((rotates or calibrated) and not one_graph))
    phases = _phases(request.phases, target, integers=rest in BITS, one=one_graph or spread)
    compute = _compute(request.compute, precision, target)
    activations = _activations(request.activations, phases, stored, target, spread)
    # For W8A8 of a smoothed stream a text chooses nothing that is better than the nearest.
    gains = "int4" in stored or (activations == "per-token" and rotates)
    can_choose = calibrated and gains and precision != "source"
    scheme = _one_of("scheme", either(request.scheme, "gptq" if can_choose else "rtn"), SCHEMES)
    if scheme == "gptq" and not gains:
        raise UsageError(
            "scheme",
            f"is 'gptq', which is for int4 and for prompts of a rotated stream, "
            f"the precision is {precision} without one",
            "leave it out",
        )
    if request.layers is None and precision == "int4" and scheme == "rtn" and not target.has_gpu:
        layers = {SENSITIVE: "int8"}
    eight = precision == "int8" and (scheme == "rtn" or "int4" not in stored)
    rotated = _list_rotated(phases, activations, eight) if rotates and not target.has_gpu else ()
    smooths = calibrated and not rotates and activations == "per-token" and precision != "source"
    if request.engine is not None and _collect_values(request.engine) and not target.makes_engine:
        raise UsageError("engine", f"is for TensorRT, the target is {target.name}", "leave it out")
    longest = min(max_positions, ENGINE_CONTEXT if target.makes_engine else DEFAULT_CONTEXT)
    context = either(request.max_context, longest)
    check_context(context, max_positions, "change it, or max_context in the recipe")
    limits = Limits(
        max_context=context,
        max_batch=check_between("max_batch", either(request.max_batch, DEFAULT_BATCH), 1, LARGEST_BATCH),
        prefill_chunk=min(
            context, check_between("prefill_chunk", either(request.prefill_chunk, target.chunk), 1, 65536)
        ),
        **_room_for_adapters(request),
    )
    recipe = Recipe(
        name=name,
        precision=precision,
        scheme=scheme,
        block_size=_block_size(request.block_size, stored, scheme, target, rotated),
        symmetric=_symmetric(request.symmetric, stored, target),
        head=head,
        phases=phases,
        activations=activations,
        smoothing=check_between(
            "smoothing", either(request.smoothing, DEFAULT_SMOOTHING if smooths else 0.0), 0.0, 1.0
        ),
        cache=_one_of("cache", either(request.cache, compute), (compute,) if target.has_gpu else (*target.caches,)),
        layers=layers,
        budget=_budget(request.budget or Budget()),
        calibration=None,
        compute=compute,
        rotated=rotated,
        **_sparsity(request, calibrated),
    )
    return recipe, limits


def _room_for_adapters(request: Request) -> dict[str, int]:
    count = check_between("adapters", either(request.adapters, 0), 0, MOST_ADAPTERS)
    if not count and request.rank is not None:
        raise UsageError("rank", f"is {request.rank}, and there is no room for adapters", "give --adapters, too")
    return {
        "adapters": count,
        "rank": check_between("rank", either(request.rank, DEFAULT_RANK), 1, MOST_RANK) * (count > 0),
    }


def _sparsity(request: Request, calibrated: bool) -> dict[str, str]:
    asked = request.sparsity
    if asked is None:
        if request.pruning is not None:
            raise UsageError("pruning", f"is {request.pruning!r}, but sparsity is missing", "give sparsity, too")
        return {}
    if asked != TWO_OF_FOUR:
        share = asked if isinstance(asked, float | int) else 0.0
        if not 0 < share <= LARGEST_SPARSITY:
            expected = f'expected "{TWO_OF_FOUR}" or a share above 0, {LARGEST_SPARSITY} at most'
            raise UsageError("sparsity", f"is {format_value(asked)}, {expected}")
    rule = either(request.pruning, "wanda" if calibrated else "magnitude")
    return {"sparsity": str(asked), "pruning": _one_of("pruning", rule, PRUNINGS)}


def _check_source(request: Request, coded: bool) -> None:
    """Integers that are kept leave nothing to choose."""
    if not coded:
        raise UsageError("precision", "is 'source', but the checkpoint is not quantized", "name another precision")
    for key, plain in (("scheme", "rtn"), ("smoothing", 0.0), ("sparsity", None)):
        if getattr(request, key) not in (None, plain):
            raise UsageError(
                key,
                f"is {getattr(request, key)!r}, but the precision is source, which keeps the checkpoint's own integers",
                "leave it out, or build with int8 or int4, which choose them anew",
            )


def check_context(context: int, max_positions: int, advice: str = "") -> None:
    """Refuse a context that the model does not have. Raises UsageError: with the bounds."""
    if not 2 <= context <= max_positions:
        raise UsageError(
            "max_context",
            f"is {context}, expected 2 ... {max_positions}, the max_position_embeddings of the checkpoint",
            advice,
        )


def _phases(asked: str | None, target: Capabilities, *, integers: bool, one: bool) -> str:
    allowed = target.phases if integers or "shared" not in target.phases else ("shared",)
    if asked is not None and asked not in allowed and target.has_gpu:
        raise UsageError("phases", f"is {asked!r}, the target {target.name} has {allowed[0]!r} only", "leave it out")
    return str(_one_of("phases", either(asked, "shared" if one and "shared" in allowed else allowed[0]), allowed))


def _compute(asked: str | None, precision: str, target: Capabilities) -> str:
    """Type that activations are computed in: as the weights, where those are floats and the target has a choice."""
    follows = COMPUTED.get(precision) if len(target.computes) > 1 else None
    if asked is not None and follows is not None and asked != follows:
        raise UsageError("compute", f"is {asked!r}, but {precision} computes in {follows}", "leave one of them out")
    return str(_one_of("compute", either(asked, follows or target.computes[0]), target.computes))


def _list_rotated(phases: str, activations: str, eight: bool) -> tuple[str, ...]:
    """The phases whose graph rotates the residual stream: W8A8's, and both where decode has ``eight`` bits, to which
    weights are rounded without a text."""
    of_prompts = eight if phases == "shared" else activations == "per-token"
    return (("prefill",) if of_prompts else ()) + (("decode",) if eight else ())


def _block_size(
    asked: int | None, stored: set[str], scheme: str, target: Capabilities, rotated: tuple[str, ...]
) -> int:
    """The block of integer weights, 0 where there is none: TensorRT's int8 has a scale per output."""
    blocked = {"int4"} if target.makes_engine else BITS.keys()
    if blocked.isdisjoint(stored):
        if asked is not None:
            raise UsageError("block_size", f"is {asked}, but nothing here is stored in blocks", "leave it out")
        return 0
    usual = WIDER_BLOCK if ("int4" in stored and scheme == "gptq") or "decode" in rotated else PLAIN_BLOCK
    return int(_one_of("block_size", either(asked, target.block or usual), BLOCKS))


def _symmetric(asked: bool | None, stored: set[str], target: Capabilities) -> bool:
    """True if 4 bits have no zero points. On CPUs these cost no time: kernels multiply a sum per block anyway."""
    if asked is False and not target.asymmetric:
        raise UsageError("symmetric", f"is false, but {target.engine} has no zero points", "leave it out")
    return either(asked, "int4" not in stored or target.block > 0)


def needs_calibration(recipe: Recipe) -> str | None:
    """The key of the recipe whose value wants to see activations, or None."""
    wishes = {
        "scheme": recipe.scheme != "rtn",
        "smoothing": recipe.smoothing > 0,
        "cache": recipe.cache.startswith("int8"),
        "activations": recipe.activations == "static",
        "pruning": recipe.pruning == "wanda",
    }
    return next((wish for wish, holds in wishes.items() if holds), None)


def _refuse_integer_keys(request: Request, precision: str, stored: set[str]) -> None:
    """Keys that say how integers are chosen mean nothing where there are none."""
    meaningless = ("block_size", "scheme", "activations", "smoothing") if stored.isdisjoint(BITS) else ()
    for key in meaningless:
        if getattr(request, key) is not None:
            raise UsageError(key, f"is for int8 and int4, the precision is {precision}", "leave it out")
    if request.symmetric is not None and "int4" not in stored:
        raise UsageError("symmetric", f"is for int4, the precision is {precision}", "leave it out")


def _activations(asked: str | None, phases: str, stored: set[str], target: Capabilities, spread: bool) -> str:
    """``spread`` says that a shared graph is W8A8 unless the request says otherwise."""
    if phases == "shared":
        takes = ("none",) if "int4" in stored or target.has_gpu else ("none", "per-token")
        if asked not in (None, *takes):
            raise UsageError(
                "activations",
                f"is {asked!r}, but one graph for both phases takes 'none', or 'per-token' beside 8-bit weights on cpu",
                "leave it out",
            )
        return either(asked, takes[spread and len(takes) - 1])
    chosen = str(_one_of("activations", either(asked, target.activations[0]), target.activations))
    if phases == "single" and chosen == "static" and "int8" not in stored:
        raise UsageError("activations", "is 'static', which goes with int8 weights, and there are none")
    return chosen


def _budget(budget: Budget) -> Budget:
    for name, limit in _collect_values(budget).items():
        check_between(f"budget.{name}", limit, 0.0, 1.0 if name == "min_agreement" else 1000.0)
    return budget


def either(value: V | None, default: V) -> V:
    """Only None leaves the choice to us: 0 and "" are values, and wrong ones."""
    return default if value is None else value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise UsageError(name, f"is {value!r}, expected one of {', '.join(map(str, allowed))}")
    return value


def check_between(name: str, value: N, low: N, high: N) -> N:
    """The value called ``name``. Raises UsageError: it is out of range."""
    if not low <= value <= high:
        raise UsageError(name, f"is {value}, expected {low} ... {high}")
    return value
