"""Bodies that do not fit, in one sentence that names the parameter."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from llmc.errors import format_value, printable
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.params import PARAMETERS
from llmc.runtime.server.http.arrival import PARSED, value_of
from llmc.runtime.server.http.call import Call, call_of
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.multipart import parse_form

M = TypeVar("M", bound=BaseModel)
LONGEST_PARAM = 200  # characters of a place; clients invent names of any length
NO_OBJECT = "the body is no JSON object; send one, with the header content-type: application/json"
Place = tuple[str | int, ...]
# Parameters of addresses that clients send by themselves, and that change nothing: Anthropic's of its beta resources.
_ALLOWED = {"/v1/messages": ("beta",), "/v1/messages/count_tokens": ("beta",)}
# The expected value by kind of pydantic's error, whose own sentences speak of Python.
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "string_type": lambda of: "a text",
    "int_type": lambda of: "an integer",
    "int_from_float": lambda of: "an integer",
    "int_parsing": lambda of: "an integer",
    "int_parsing_size": lambda of: "an integer of fewer digits",
    "float_type": lambda of: "a number",
    "float_parsing": lambda of: "a number",
    "finite_number": lambda of: "a finite number",
    "bool_type": lambda of: "true or false",
    "list_type": lambda of: "a list",
    "tuple_type": lambda of: "a list",
    "dict_type": lambda of: "an object",
    "model_type": lambda of: "an object",
    "model_attributes_type": lambda of: "an object",
    "none_required": lambda of: "null, or nothing at all",
    "literal_error": lambda of: str(of["expected"]).replace("True", "true").replace("False", "false"),
    "greater_than_equal": lambda of: f"{of['ge']} or more",
    "less_than_equal": lambda of: f"{of['le']} or less",
    "string_pattern_mismatch": lambda of: f"a text like {of['pattern']}",
    "string_too_long": lambda of: f"at most {of['max_length']} characters",
}


def api_error(found: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """The refusal of a request, by the deepest of the faults that pydantic found; of a value that may be of several
    kinds this is the fault of the kind that it is. The place of each begins with a part of the request, as ``body``."""
    places = [_place(fault, body) for fault in found]

    def depth(number: int) -> tuple[int, bool, int, bool]:
        one = found[number]  # that a value is of another kind, or missing, says less than what is wrong with one
        return len(places[number]), not one["type"].endswith("_type"), len(one["loc"]), one["type"] != "missing"

    deepest = max(range(len(found)), key=depth)
    fault, param = found[deepest], _format_place(places[deepest])
    if fault["type"] == "extra_forbidden":
        ours = neighbour(param or "", PARAMETERS)
        hint = "" if ours in (None, param) else f", or did you mean {ours}?"
        return ApiError(400, f"{param} is not a parameter of this route; leave it out{hint}", param=param)
    return ApiError(400, f"{param} {_describe_fault(fault, found, places, deepest)}", param=param)


def _describe_fault(
    fault: Mapping[str, Any], found: Sequence[Mapping[str, Any]], places: Sequence[Place], at: int
) -> str:
    kind, about, value = fault["type"], fault.get("ctx", {}), fault.get("input")
    if kind == "missing":
        return "is missing; give it"
    if kind == "union_tag_not_found":
        return f"names no {_discriminator(about)}, by which its kind is known; give it"
    if kind == "union_tag_invalid":
        tags = str(about["expected_tags"])
        return (
            f"has the {_discriminator(about)} {_show_value(about['tag'])}, expected {'one of ' * (',' in tags)}{tags}"
        )
    if kind in ("too_short", "too_long"):
        bound = f"{about['min_length']} or more" if kind == "too_short" else f"at most {about['max_length']}"
        count = about.get("actual_length")
        if count == 0:
            return f"is empty, expected {bound} items"
        return f"holds {'other' if count is None else count} items, expected {bound}"
    # A value that fits no member of a union: list what each member expects.
    kinds = [
        _EXPECTED[other["type"]](other.get("ctx", {}))
        for other, place in zip(found, places, strict=True)
        if place == places[at] and other["type"] in _EXPECTED
    ]
    if kinds:
        return f"is {_show_value(value)}, expected {' or '.join(dict.fromkeys(kinds))}"
    return f"does not fit: {fault['msg'][:1].lower()}{fault['msg'][1:]}"


def _discriminator(about: Mapping[str, Any]) -> str:
    """The field that tells kinds of values apart; where a function does, it reads ``type``."""
    name = str(about["discriminator"])
    return "type" if name.endswith("()") else name.strip("'")


def _show_value(value: Any) -> str:
    """A value as its client wrote it, or what it is, where it is long."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    return json.dumps(value) if value is None or isinstance(value, bool | float) else format_value(value)


def _format_place(place: Place) -> str | None:
    """A place as OpenAI writes it: ``messages[0].content``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return printable(text[:LONGEST_PARAM])[:LONGEST_PARAM] or None


def _place(fault: Mapping[str, Any], body: Any) -> Place:
    """The place of a fault in what the client sent: pydantic names kinds of values among it, too."""
    where, *parts = fault["loc"]
    if where != "body":
        return tuple(map(str, parts))
    absent = fault["type"] == "missing" and parts
    found, _ = _trace_place(tuple(parts[:-1] if absent else parts), body)
    if not absent:
        return found
    if found and not isinstance(_value_at(found, body), Mapping):  # a kind's name that is also the missing member's
        found = found[:-1]
    return (*found, parts[-1])


def _value_at(place: Place, at: Any) -> Any:
    for part in place:
        at = at[part]
    return at


def _trace_place(parts: Place, at: Any) -> tuple[Place, bool]:
    """The longest sequence of ``parts`` that leads through a value, and True if it includes the last one."""
    if not parts:
        return (), False
    part, rest = parts[0], parts[1:]
    passed, reached = _trace_place(rest, at)
    inside = (isinstance(at, Mapping) and part in at) or (
        isinstance(at, list) and isinstance(part, int) and part < len(at)
    )
    if not inside:
        return passed, reached
    found, ends = _trace_place(rest, at[part])
    taken: tuple[Place, bool] = ((part, *found), ends or not rest)
    return max((taken, (passed, reached)), key=lambda each: (each[1], len(each[0])))


async def no_query(request: Request) -> None:
    """Refuse query parameters on routes with a body; on others, those that the route does not have.
    Raises ApiError: there is one."""
    if request.method == "GET" and not request.url.path.startswith("/v1/responses/"):
        return  # reading: what is not known there is ignored
    route = request.scope.get("route")
    known = {parameter.name for parameter in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    allowed = {*known, *_ALLOWED.get(request.scope["path"], ())}
    if (name := next((name for name in request.query_params if name not in allowed), None)) is not None:
        posted = request.method == "POST"
        where = "of this address; write it into the body" if posted else "of this route; leave it out"
        raise ApiError(400, f"{name[:40]} is not a parameter {where}", param=name[:40] or None)


def take_body(kind: type[BaseModel]) -> Any:
    """The dependency of a route that takes such a body; :func:`document_bodies` documents it."""
    return Depends(partial(read_request, kind))


def declares_json(request: Request) -> bool:
    """True if the body is JSON. To Ollama's routes it is whatever its type says, as clients of theirs send none or a
    form's, unless a browser sent it: a page may send those types to any address without asking."""
    if request.url.path.startswith("/api/") and not {"origin", "sec-fetch-site"} & set(request.headers):
        return True
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return re.fullmatch(r"application/(.+\+)?json", declared) is not None


async def read_request(kind: type[M], request: Request) -> M:
    """The body of a request, which the guard has parsed where there is one."""
    content, parsed = await request.body(), request.scope.pop(PARSED, None)  # which nobody is to keep
    if content and not declares_json(request):
        raise ApiError(400, NO_OBJECT)
    call = call_of(request.scope)
    call.size = len(content)
    return await call.aside(partial(_read, kind, call, content, parsed))


def _read(kind: type[M], call: Call, content: bytes, parsed: Any) -> M:
    if not content.strip():
        raise ApiError(400, "the body is empty, expected a JSON object")
    try:
        parsed = value_of(content) if parsed is None else parsed
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON ({error.msg}), expected an object") from error
    except (ValueError, RecursionError) as error:
        said = "the body cannot be read, expected a JSON object in UTF-8, without integers of thousands of digits"
        raise ApiError(400, said) from error
    if not isinstance(parsed, dict):
        raise ApiError(400, NO_OBJECT)
    return _validate(kind, call, parsed)


def _validate(kind: type[M], call: Call, parsed: dict[str, Any]) -> M:
    try:
        return kind.model_validate(parsed, context=call)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise api_error([{**fault, "loc": ("body", *fault["loc"])} for fault in faults], parsed) from error


def take_form(kind: type[BaseModel]) -> Any:
    """As :func:`take_body`, of a form: one of its fields is bytes, the others are texts, numbers or flags."""
    return Depends(partial(read_form, kind))


async def read_form(kind: type[M], request: Request) -> M:
    """The form that a request's body is."""
    content, media_type, call = await request.body(), request.headers.get("content-type", ""), call_of(request.scope)
    call.size = len(content)

    def read() -> M:
        fields = parse_form(content, media_type)
        return _validate(kind, call, {name: _read_field(kind, name, values) for name, values in fields.items()})

    return await call.aside(read)


def _read_field(kind: type[BaseModel], name: str, values: list[bytes]) -> Any:
    """The value of a field: bytes where the form wants them, else a text, number or flag."""
    annotation = kind.model_fields[name].annotation if name in kind.model_fields else str
    if len(values) > 1:
        raise ApiError(400, f"{_format_place((name,))} is given {len(values)} times; give it once", param=name)
    if annotation is bytes:
        return values[0]
    try:
        text = values[0].decode()
        if annotation == bool | None:
            return {"true": True, "false": False}.get(text, text)
        return float(text) if annotation == float | None else text
    except ValueError:  # which validation describes
        return values[0].decode("utf-8", "replace")


# Media types by what reads a body.
_MEDIA: dict[Any, str] = {read_request: "application/json", read_form: "multipart/form-data"}


def document_bodies(document: dict[str, Any], routes: Iterable[APIRoute]) -> None:
    """Add the bodies that routes take (:func:`take_body`, :func:`take_form`) to an OpenAPI document."""
    calls = [(route, own.call) for route in routes for own in route.dependant.dependencies]
    kinds = {
        route.path: (call.args[0], _MEDIA[call.func])
        for route, call in calls
        if isinstance(call, partial) and call.func in _MEDIA
    }
    template = "#/components/schemas/{model}"
    schemas, together = models_json_schema([(kind, "validation") for kind, _ in kinds.values()], ref_template=template)
    document["components"]["schemas"] |= together["$defs"]
    for path, (kind, media_type) in kinds.items():
        content = {media_type: {"schema": schemas[kind, "validation"]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
