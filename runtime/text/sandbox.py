"""A sandbox for chat templates: they see plain data only, and what they do is counted and bounded.

Templates are programs from strangers. jinja's own sandbox keeps them from Python's insides; this one also keeps them
from running for ever and from taking all memory. Every round of a loop, every call, and every character or item that
is read or made counts as work, before it is done; what cannot be counted (``wordwrap``, ``str.translate``, ...) is
refused. So the bound depends on the template and the messages alone, never on the machine or its load.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.tests
import jinja2.utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

# Work that a template may do whatever it is given, and for each character and item given to it. Those in use need up
# to a dozen for each, and some tens of thousands for tools and dates; 4,000,000 take about a tenth of a second.
BASE_WORK, WORK_PER_ITEM = 4_000_000, 64
# Work of a rendering for which a thread's other tasks wait: ten milliseconds at most. Templates in use stay below it
# where a conversation is short.
QUICK_WORK = 25_000
# However much it is given: what is made of it is held in memory, with up to 4 bytes for a unit of work.
MOST_WORK = 256_000_000
# A round of a loop, and a call, in the same unit; a character or item is 1. They take 0.1 to 1 us, and 10 to 50 us.
STEP, CALL = 8, 256
# Lists in lists: JSON schemas of tools stay below 20, and Python's own recursion ends at some hundreds.
DEEPEST = 100
# Numbers beyond what a float holds are no business of a prompt; multiplying them is slow.
LARGEST_BITS = 1024
# Characters; templates in use have up to some 30,000, and compiling takes up to 0.1 ms for each.
LONGEST_SOURCE = 100_000
# Characters of an attribute that a filter takes of each item, such as function.parameters.
LONGEST_ATTRIBUTE = 200
# A date's form.
LONGEST_FORM = 200

_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class ExcessError(SecurityError):
    """A template did more than it may."""


class SlowError(Exception):
    """A rendering takes longer than the present thread has for it; it may be done on another one."""


_QUICK: ContextVar[bool] = ContextVar("llmc_quick_rendering", default=False)


@contextmanager
def quickly() -> Iterator[None]:
    """Renderings of the block do no more work than :data:`QUICK_WORK`.

    Raises:
        SlowError: one would take more.
    """
    token = _QUICK.set(True)
    try:
        yield
    finally:
        _QUICK.reset(token)


def weight(value: Any) -> int:
    """Characters and items of ``value`` as its text repeats them: a list that lies twice in another one counts twice.

    Raises:
        ExcessError: it is nested more than :data:`DEEPEST` deep.
    """
    return _measure(value, {}, 0)[0]


def _measure(value: Any, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Weight and height of ``value``, which lies ``depth`` deep; ``known`` are those of lists by their ids."""
    if isinstance(value, str):
        return len(value) + 1, 0
    if isinstance(value, (dict, *_VIEWS)):
        pairs: Any = getattr(value, "mapping", value)  # a view's
        items: Iterable[Any] = chain(pairs, pairs.values())
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        return 1, 0
    if (found := known.get(id(value))) is not None:
        return found
    if depth == DEEPEST:
        raise ExcessError(f"it nests values more than {DEEPEST} deep")
    size = height = 1
    for item in items:
        if type(item) is str:
            size += len(item) + 1
        else:
            inner = _measure(item, known, depth + 1)
            size, height = size + inner[0], max(height, inner[1] + 1)
    known[id(value)] = size, height
    return size, height


class Budget:
    """The work that one rendering may still do. Compiled templates call its methods.

    Args:
        size: :func:`weight` of all that the template is given.
    """

    def __init__(self, size: int) -> None:
        self._limit = min(BASE_WORK + WORK_PER_ITEM * size, MOST_WORK)
        self._is_quick = _QUICK.get()
        self._left = QUICK_WORK if self._is_quick else self._limit

    def charge(self, work: int) -> None:
        """Count ``work`` that is about to be done; below zero is zero.

        Raises:
            ExcessError: it is more than is left.
            SlowError: it is, of what may be done quickly.
        """
        if work > 0:
            self._left -= work
            if self._left < 0:
                if self._is_quick:
                    raise SlowError
                raise ExcessError(f"it takes more than {self._limit:,} steps, characters and items for these messages")

    def steps(self, iterable: Any) -> Any:
        """The same rounds for a loop, counted."""
        try:
            count = len(iterable)
        except TypeError:
            return self._each(iterable)
        self.charge(STEP * count)
        return iterable

    def _each(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.charge(STEP)
            yield item

    def read(self, value: Any) -> Any:
        """``value``, counted with all that it holds: it is compared, or becomes text."""
        self.charge(len(value) if type(value) is str else weight(value))
        return value

    def made(self, value: Any) -> Any:
        """``value``, counted by its length: it was just made of parts that existed."""
        if isinstance(value, str | list | tuple | dict):
            self.charge(len(value))
        elif isinstance(value, GeneratorType):
            return self._each(value)
        return value


class _Context(Context):
    """A rendering's variables, and its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> "_Context":  # noqa: A002 (jinja's name)
        derived = super().derived(locals)
        assert isinstance(derived, _Context)
        derived.budget = self.budget
        return derived


class _CountingGenerator(CodeGenerator):
    """jinja's compiler, which hands values to the budget where they are looped over, compared, joined or made."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._counted: dict[int, str] = {}  # methods of the budget, by id of the expression

    def visit(self, node: jinja2.nodes.Node, *args: Any, **named: Any) -> Any:
        method = self._counted.pop(id(node), None)
        if method is None:
            return super().visit(node, *args, **named)
        self.write(f"context.budget.{method}(")
        super().visit(node, *args, **named)
        self.write(")")
        return None

    def visit_For(self, node: jinja2.nodes.For, frame: Frame) -> None:  # noqa: N802 (jinja's names, from here on)
        self._counted[id(node.iter)] = "steps"
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._counted |= {id(part): "read" for part in node.nodes}
        super().visit_Concat(node, frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self._counted |= {id(part): "read" for part in (node.expr, *(operand.expr for operand in node.ops))}
        super().visit_Compare(node, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._counted |= {id(item.key): "read" for item in node.items}  # it is hashed
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _made(self, visit: Callable[[Any, Frame], None], node: jinja2.nodes.Node, frame: Frame) -> None:
        self.write("context.budget.made(")
        visit(node, frame)
        self.write(")")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"context.budget.read({super()._output_const_repr(group)})"


# -------------------------------------------------------------------------------------------------- what things cost


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + ((text.count(old) if old else len(text) + 1) * len(new))


def _percent(form: Any, *values: Any, **named: Any) -> int:
    """Of ``form % values``: each place takes any of the values, as wide as it likes."""
    places = re.findall(r"%(?:\([^)]*\))?([-+ #0-9.*]*)", str(form))
    return _formatted(str(form), places, "*", (values, named))


def _braces(form: str, *values: Any, **named: Any) -> int:
    """Of ``form.format(*values)``, or of ``format_map``."""
    places = re.findall(r"\{([^{}]*\{?)", form.replace("{{", ""))
    return _formatted(form, places, "{", (values, named))


def _formatted(form: str, places: list[str], borrowed: str, values: Any) -> int:
    if any(borrowed in place for place in places):
        raise ExcessError("it takes the width of a format from a value")
    widths = [int(digits[:9]) for place in places for digits in re.findall(r"\d+", place)]
    return len(form) + len(places) * (max(widths, default=0) + weight(values))


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    columns: int = width if isinstance(width, int) else len(width)
    return (str(text).count("\n") + 1) * columns


def _json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *_: Any, **__: Any) -> int:
    if indent is None and separators is None:
        return 0
    width = indent if isinstance(indent, int) else len(indent or "")
    size, height = _measure(value, {}, 0)
    return size * (height * width + weight(separators))


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise ExcessError("it sums what is no number")
    return 0


def _integer(value: Any, *_: Any, **__: Any) -> int:
    return len(value) ** 2 // LARGEST_BITS if isinstance(value, str) else 0  # so long does Python take


def _searched(text: str, needle: Any) -> int:
    return len(text) * len(needle) if isinstance(needle, str) else 0


def _sought(text: str, needle: Any = None, *more: Any, **named: Any) -> int:
    return _searched(text, needle) + _searched(text, named.get("sep")) + weight((needle, more, named))


def _check_attribute(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse an attribute of any length, in a filter that takes one."""
    at = _ATTRIBUTES.get(name)
    positional = args[at] if at is not None and len(args) > at else None
    for attribute in (positional, named.get("attribute")):
        if isinstance(attribute, str) and len(attribute) > LONGEST_ATTRIBUTE:
            raise ExcessError(f"it takes an attribute of {len(attribute):,} characters")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN_METHODS = _words(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
# Filters whose work does not follow from the length of what they take and give, and methods likewise.
_FILTERS: dict[str, Callable[..., int]] = {
    "attr": lambda value, name: weight(name),
    "batch": lambda value, linecount, *_, **__: linecount,
    "center": lambda value, width=80: width,
    "format": _percent,
    "indent": _indented,
    "int": _integer,
    "join": lambda value, d="", *_, **__: len(value) * weight(d),
    "replace": _replaced,
    "round": lambda value, precision=0, *_, **__: abs(precision),
    "slice": lambda value, slices, *_, **__: slices,
    "sum": _summed,
    "tojson": _json,
    "trim": lambda value, chars=None: _searched(str(value), chars),
}
_METHODS: dict[str, Callable[..., int]] = {
    "center": lambda text, width, *_: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "format": _braces,
    "format_map": _braces,
    "join": lambda text, items: len(text) * len(items) + weight(items),
    "ljust": lambda text, width, *_: width,
    "replace": _replaced,
    "rjust": lambda text, width, *_: width,
    "zfill": lambda text, width: width,
}
_METHODS |= {name: lambda text, *arguments, **named: weight(arguments) for name in _PLAIN_METHODS}
# From the right Python searches with every part of the needle at every place, and each character is looked up in those
# to strip.
_METHODS |= dict.fromkeys(_words("rfind rindex rpartition rsplit lstrip rstrip strip"), _sought)
# Position of the attribute that a filter takes of each item: every part of it costs a step for each of them.
_ATTRIBUTES = {"groupby": 0, "map": None, "max": 1, "min": 1, "rejectattr": 0, "selectattr": 0, "sort": 2, "sum": 0}
_ATTRIBUTES |= {"unique": 1}
# Methods of other values: by whether all that the value holds is compared.
_OTHER_METHODS = {"get": False, "items": False, "keys": False, "values": False, "copy": False, "is_integer": False}
_OTHER_METHODS |= {"count": True, "index": True}
# Filters that do not look into what they are given, and those that are left out: slow, random, or about HTML.
_SHALLOW = _words(
    "abs attr batch count d default first float int items last length list map random reject rejectattr reverse "
    "round select selectattr slice"
)
_LEFT_OUT = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
# Tests that look into what they are given.
_COMPARING = _words("== != < <= > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a filter that counts."""
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    growth = _FILTERS.get(name)
    shallow = name in _SHALLOW

    @jinja2.pass_context
    def bounded(context: _Context, value: Any, *args: Any, **named: Any) -> Any:
        budget = context.budget
        if isinstance(value, GeneratorType) and not shallow:
            value = list(value)  # counted as it is made
        budget.charge(STEP + (len(value) if shallow and hasattr(value, "__len__") else weight(value)))
        if args or named:
            budget.charge(weight((args, named)) if not shallow else len(args) + len(named))
        _check_attribute(name, args, named)
        if growth is not None:
            budget.charge(growth(value, *args, **named))
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        return budget.made(function(*first.get(kind, ()), value, *args, **named))

    return bounded


def _bounded_test(function: Any) -> Callable[..., Any]:
    @jinja2.pass_context
    def bounded(context: _Context, value: Any, *args: Any) -> Any:
        context.budget.charge(STEP + weight((value, args)))
        return function(value, *args)

    return bounded


# ------------------------------------------------------------------------------------------------------- environment


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates: with what transformers gives them, and with bounds.

    Args:
        mark: what becomes of the texts that templates are written in.

    Raises:
        jinja2.TemplateError: a template is not valid.
    """

    code_generator_class = _CountingGenerator
    context_class = _Context
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, mark: Callable[[str], str] = str) -> None:
        self._mark = mark
        # Not optimized: constants would be computed while the template is compiled, when nothing counts.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,
            finalize=jinja2.pass_context(lambda context, value: context.budget.read(value)),
        )
        self.globals = {
            **{name: value for name, value in self.globals.items() if name != "lipsum"},
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _dict,
            "namespace": _Namespace,
        }
        filters = {**jinja2.filters.FILTERS, "tojson": to_json}
        self.filters = {name: _bounded_filter(name, each) for name, each in filters.items() if name not in _LEFT_OUT}
        self.tests |= {name: _bounded_test(self.tests[name]) for name in _COMPARING}

    def render(self, template: jinja2.Template, values: dict[str, Any], size: int) -> str:
        """The text of ``template``, which may do the work that ``values`` of that :func:`weight` allow."""
        context = template.new_context(values)
        assert isinstance(context, _Context)
        context.budget = Budget(size)
        return "".join(template.root_render_func(context))

    def from_string(self, source: Any, *args: Any, **named: Any) -> jinja2.Template:
        """Compile a template of at most :data:`LONGEST_SOURCE` characters."""
        if len(source) > LONGEST_SOURCE:
            raise ExcessError(f"it has {len(source):,} characters, at most {LONGEST_SOURCE:,} are expected")
        return super().from_string(source, *args, **named)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for data in tree.find_all(jinja2.nodes.TemplateData):
            data.data = self._mark(data.data)
        for constant in tree.find_all(jinja2.nodes.Const):
            constant.value = self._mark(constant.value) if isinstance(constant.value, str) else constant.value
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``, counted before it is done."""
        assert isinstance(context, _Context)
        if operator == "+" and type(left) is type(right) is str:  # nearly all of them
            context.budget.charge(len(left) + len(right))
            return left + right
        context.budget.charge(_binop_work(operator, left, right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > LARGEST_BITS:
            raise _large()
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``; no key is a tuple, for hashing nested ones may take for ever."""
        return (
            self.undefined(obj=obj, name="a tuple") if isinstance(argument, tuple) else super().getitem(obj, argument)
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805 (as jinja's)
        """Call a macro, a function or a method, counted before it is done."""
        assert isinstance(__context, _Context)
        budget = __context.budget
        given = {name: value for name, value in named.items() if name not in ("caller", "_loop_vars", "_block_vars")}
        budget.charge(CALL + len(args) + len(given))
        args = tuple(list(each) if isinstance(each, GeneratorType) else each for each in args)  # counted as it is made
        if isinstance(__obj, LoopContext):
            budget.charge(sum(STEP * len(each) for each in (*args, *given.values())))
        elif __obj is _dict or __obj is _Namespace:
            budget.charge(weight(args))  # keys are hashed
        else:
            budget.charge(_method_work(__obj, args, given))
        return budget.made(super().call(__context, __obj, *args, **named))


def _binop_work(operator: str, left: Any, right: Any) -> int:
    sides = (left, right)
    if operator == "%" and isinstance(left, str):
        return _percent(left, right)
    if operator == "*":
        times = next((side for side in sides if isinstance(side, int)), 0)
        lengths = [len(side) * times for side in sides if isinstance(side, str | list | tuple)]
        if not lengths and all(isinstance(side, int) for side in sides):
            lengths = [0 if left.bit_length() + right.bit_length() <= 2 * LARGEST_BITS else MOST_WORK + 1]
        return max(lengths, default=0)
    if operator == "**" and all(isinstance(side, int) for side in sides) and left.bit_length() * right > LARGEST_BITS:
        raise _large()
    # Escaped text escapes what is added to it.
    factor = 6 if any(isinstance(side, Markup) for side in sides) else 1
    return sum(len(side) * factor for side in sides if isinstance(side, str | list | tuple))


def _large() -> ExcessError:
    return ExcessError(f"it computes a number of more than {LARGEST_BITS} bits")


def _method_work(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Of a method of a value; of anything else nothing.

    Raises:
        SecurityError: templates have no use for the method.
    """
    if not isinstance(name := getattr(function, "__name__", None), str):
        return 0  # a macro
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # str.format comes wrapped
    if isinstance(owner, str) and name in _METHODS:
        return len(owner) + _METHODS[name](owner, *args, **named)
    if isinstance(owner, LoopContext):
        return weight(args)
    if isinstance(owner, (list, tuple, dict, int, float, *_VIEWS)) and name in _OTHER_METHODS:
        return weight(owner) + weight(args) if _OTHER_METHODS[name] else weight(args[:1])
    if isinstance(owner, (str, list, tuple, dict, int, float, GeneratorType, *_VIEWS)):
        raise SecurityError(f"templates may not call {name} of a {type(owner).__name__}")
    return 0


@jinja2.pass_context
def _raise_exception(context: _Context, message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(context.budget.read(message))[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > LONGEST_FORM:
        raise ExcessError(f"it gives a date a form of more than {LONGEST_FORM} characters")
    return datetime.now().strftime(form)


def _dict(*items: Any, **named: Any) -> dict[Any, Any]:
    """The type itself would hand out its methods."""
    return dict(*items, **named)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the type jinja declares)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace, without names that could pose as Python internals."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a template may set a name "self"
        attributes = dict(*args[1:], **named)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __repr__(self) -> str:  # not with what it holds, which nothing would count
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: it begins with an underscore")
