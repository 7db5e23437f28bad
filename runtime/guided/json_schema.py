"""Check and prepare JSON Schemas for guided decoding: every keyword must be one that the grammar library implements.

JSON Schema lets implementations ignore unknown keywords. Here the output would then break the schema, so unknown
keywords are refused by name. Some values are rewritten because the library would enforce less than they say.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmc.errors import GrammarError, UsageError
from llmc.runtime.guided.patterns import (
    ESCAPES,
    UNNAMED_CONTROLS,
    check_patterns,
    check_regex,
    library_pattern,
    list_matches,
)

# Keywords of JSON Schema (https://json-schema.org/draft/2020-12/schema, and draft 7) by the type of their value. The
# library enforces these, except in combinations that it refuses, and ignores every other keyword.
_SCHEMAS = {"additionalItems", "additionalProperties", "items"}
_LISTS_OF_SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_DEFINITIONS = {"$defs", "definitions"}
_NAMED_SCHEMAS = {*_DEFINITIONS, "patternProperties", "properties"}
_VALUES = {
    *("$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern"),
    *("required", "type"),
}
# Keywords that restrict nothing; discriminator and those after it are OpenAPI's.
ANNOTATIONS = {
    *("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated"),
    *("description", "examples", "id", "readOnly", "title", "writeOnly"),
    *("discriminator", "example", "externalDocs", "xml"),
}
_KEYWORDS = _SCHEMAS | _LISTS_OF_SCHEMAS | _NAMED_SCHEMAS | _VALUES | ANNOTATIONS
# The library recurses over subschemas, with up to 4 kB of stack each.
_MOST_SUBSCHEMAS = 10_000
_LARGEST_INTEGER = 2**53
LARGEST_MULTIPLE = 10_000
"""Bound on the digits of ``multipleOf``: the automaton has a state per remainder; 100,000 take seconds."""
# Alternatives of schemas that apply together: their combinations may take some milliseconds each.
_MOST_QUICK_ALTERNATIVES = 20
# The library's patterns accept leap seconds at any time, 29 February in any year and host names of any length.
_FORMAT_PATTERNS = {
    "date": (
        "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
        "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
        "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
    ),
    # https://www.rfc-editor.org/rfc/rfc3339#section-5.6; a leap second ends a day of UTC, here only without an offset.
    "time": (
        r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+\-]00:00)"
    ),
    # https://www.rfc-editor.org/rfc/rfc1123#section-2.1; "--" in the third place is reserved (RFC 5891, 4.2.3.1).
    "hostname": "{label}(?:[.]{label})*".replace(
        "{label}",
        "[a-zA-Z0-9](?:[a-zA-Z0-9-]?[a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9][a-zA-Z0-9-]{0,59}[a-zA-Z0-9]"
        "|[a-zA-Z0-9-]-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?)?",
    ),
}
_FORMAT_PATTERNS["date-time"] = f"(?:{_FORMAT_PATTERNS['date']})[tT](?:{_FORMAT_PATTERNS['time']})"
_LONGEST_HOSTNAME = 253
# The formats above, and those that the library enforces correctly.
_FORMATS = {*_FORMAT_PATTERNS, "duration", "email", "ipv4", "ipv6", "unknown", "uri", "uuid"}
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_NUMBERS = ("const", "enum", "multipleOf", *_BOUNDS)
# Next to one of these, another keyword with subschemas makes the library enforce both at once.
_MERGING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}

# The library reads schemas strictly, with one spelling per character: with \u0061 for "a", a model could repeat a
# property under a name that the schema's rules for "a" miss.
_OPTIONS = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
# Once between two tokens of JSON: a confused model writes white space forever. Ten levels of four spaces fit.
_WHITE_SPACE = r" |\r?\n(?: {0,40}|\t{0,10})"


def options(compact: bool) -> dict[str, Any]:
    """The library's options for a schema; ``compact`` allows no white space between the tokens of JSON."""
    return {**_OPTIONS, **({"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITE_SPACE})}


def schema_text(value: Mapping[str, Any] | str, name: str) -> str:
    """A schema, the argument ``name``, as JSON text; the output follows the order of its properties.
    Raises UsageError: it is not the JSON text of an object, or holds a value that JSON lacks."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(name, f"is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(name, f"is JSON of type {type(parsed).__name__}, expected an object")
    return text


def check_schema(schema: Any) -> bool:
    """Refuse a parsed schema that cannot be fully enforced or is too large; return True if compiling may take long.
    Raises GrammarError: naming the keyword and its path."""
    nodes = list(_nodes(schema))
    for path, node in nodes:
        _check_keywords(path, node)
    # The library may enforce two subschemas at once.
    meeting = any(
        "allOf" in node or (_MERGING & node.keys() and len(node.keys() - ANNOTATIONS - _DEFINITIONS) > 1)
        for _, node in nodes
    )
    states = 0
    for group in [nodes] if meeting else [[item] for item in nodes]:
        _check_bounds(group)
        states += _check_multiples(group)
    lists = [node.get(name, ()) for _, node in nodes for name in ("anyOf", "enum", "oneOf", "patternProperties")]
    alternatives = sum(len(alternative) for alternative in lists if isinstance(alternative, list | dict))
    return states > LARGEST_MULTIPLE or (meeting and alternatives > _MOST_QUICK_ALTERNATIVES)


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A checked schema rewritten for the library: formats become patterns, patterns use the library's notation.
    Raises GrammarError: naming the keyword whose value cannot be enforced."""
    schema = json.loads(json.dumps(schema))
    for path, node in list(_nodes(schema)):
        _spell_format(path, node)
        _spell_names(node)
    for path, node in list(_nodes(schema)):
        if isinstance(node.get("pattern"), str):
            node["pattern"] = library_pattern(node["pattern"], path)
        if isinstance(named := node.get("patternProperties"), dict):
            node["patternProperties"] = {library_pattern(name, path): value for name, value in named.items()}
    _name_matches(list(_nodes(schema)))
    return schema


def _listed_names(node: dict[str, Any]) -> list[str] | None:
    """The names that ``propertyNames`` lists; [] if it allows all; None if it cannot be rewritten."""
    names = node["propertyNames"]
    if names is True or (isinstance(names, dict) and names.items() <= {"type": "string"}.items()):
        return []
    if not isinstance(names, dict) or not {"enum"} <= names.keys() <= {"enum", "type"} or "patternProperties" in node:
        return None
    listed = names["enum"]
    return listed if isinstance(listed, list) and listed and all(isinstance(name, str) for name in listed) else None


def _spell_names(node: dict[str, Any]) -> None:
    """Rewrite ``propertyNames`` as optional properties, and allow no others."""
    names = _listed_names(node) if "propertyNames" in node else None
    node.pop("propertyNames", None)
    if names:
        properties, default = _mapping(node.get("properties")), node.get("additionalProperties", True)
        kept = {name: schema if name in names else False for name, schema in properties.items()}
        node["properties"] = {**kept, **{name: default for name in names if name not in properties}}
        node["additionalProperties"] = False


def _name_matches(nodes: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Replace patterns that only match named properties: the library would wait for further names after a comma."""
    names = {name: None for _, node in nodes for key in ("properties", "required") for name in _strings(node.get(key))}
    for path, node in nodes:
        patterns = _mapping(node.get("patternProperties"))
        for pattern, schema in list(patterns.items()):
            matches = list_matches(pattern, names)
            if matches is None:
                continue
            del patterns[pattern]
            properties = node.setdefault("properties", {})
            for name in (name for name in names if name in matches):
                properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        if len(patterns) > 1:
            check_patterns(patterns, path)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> Iterator[str]:
    return (item for item in (value if isinstance(value, dict | list) else ()) if isinstance(item, str))


def without_unenforceable(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema without the keywords that cannot be enforced, and their paths, such as ``properties.a.pattern``;
    ``oneOf`` keeps its alternatives. Raises GrammarError: it is not a schema."""
    copy = json.loads(json.dumps(schema))
    places = []
    for path, node in _nodes(copy):
        for name in list(node):
            if name == "oneOf" and "anyOf" not in node:
                node["anyOf"] = node.pop(name)
            elif _is_enforceable(path, node, name):
                continue
            else:
                del node[name]
            places.append(f"{path}/{name}".removeprefix("#/").replace("/", "."))
    return copy, places


def _is_enforceable(path: str, node: dict[str, Any], name: str) -> bool:
    """True if a keyword of a subschema may be enforceable, judging by its value."""
    if name == "oneOf" or (name == "format" and node[name] not in _FORMATS):
        return False
    patterns = _patterns({name: node[name]})
    try:
        _check_keywords(path, {key: node[key] for key in ("additionalProperties", name) if key in node})
        check_patterns([library_pattern(pattern, path) for pattern in patterns], path)
    except GrammarError:
        return False
    return True


def without_rules(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """An object schema that keeps the names of another's properties and allows any values for them."""
    named, required = schema.get("properties"), schema.get("required")
    properties: dict[str, Any] = {name: {} for name in named} if isinstance(named, Mapping) else {}
    needed = [name for name in _strings(required) if name in properties] if isinstance(required, list) else []
    return {"type": "object", "properties": properties, "required": needed}, [""]


def _spell_format(path: str, node: dict[str, Any]) -> None:
    """Add to a format the rules that the library leaves out."""
    name = node.get("format")
    if not isinstance(name, str) or name not in _FORMAT_PATTERNS:
        return
    if not isinstance(node.get("allOf", []), list) or not isinstance(node.get("maxLength", 0), int):
        raise GrammarError("json_schema", f"has at {path} an allOf or a maxLength of the wrong type")
    del node["format"]
    pattern = f"^(?:{_FORMAT_PATTERNS[name]})$"
    if "pattern" in node:
        node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]
    else:
        node["pattern"] = pattern
    if name == "hostname":
        node["maxLength"] = min(node.get("maxLength", _LONGEST_HOSTNAME), _LONGEST_HOSTNAME)


def _patterns(node: dict[str, Any]) -> list[str]:
    named = node.get("patternProperties")
    patterns = [node.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def _holds_unnamed_control(value: Any) -> bool:
    """True if a text in a JSON value (not a name) has a control character without a short escape."""
    if isinstance(value, str):
        return UNNAMED_CONTROLS.search(value) is not None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_unnamed_control, values))


def _nodes(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All subschemas except true and false, with their paths.
    Raises GrammarError: there are too many, or one is not a schema."""
    waiting = [("#", schema)]
    visited = 0
    while waiting:
        path, node = waiting.pop()
        visited += 1
        if visited > _MOST_SUBSCHEMAS:
            raise GrammarError("json_schema", f"has more than {_MOST_SUBSCHEMAS} subschemas, expected fewer")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise GrammarError(
                "json_schema", f"has at {path} a value of type {type(node).__name__}, expected an object, true or false"
            )
        yield path, node
        waiting.extend(_subschemas(path, node))


def _check_keywords(path: str, node: dict[str, Any]) -> None:
    # Vendors' annotations begin with x-, but x-guidance instructs the library not to enforce.
    for name in node:
        if name == "propertyNames" and _listed_names(node) is not None:
            continue
        if name not in _KEYWORDS and (not name.startswith("x-") or name == "x-guidance"):
            raise GrammarError(
                "json_schema", f"has the keyword {name!r} at {path}, which cannot be enforced", "correct or remove it"
            )
    # The library counts a property that is written twice as two, unless it knows the property by name.
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if node.get("minProperties", 0) and not closed:
        raise GrammarError(
            "json_schema",
            f"has the keyword 'minProperties' at {path}, which cannot be enforced",
            "list the properties and set additionalProperties to false",
        )
    # Draft 7 ignores the siblings of a $ref, so the drafts disagree about its target.
    if {"$id", "$ref"} <= node.keys() and not (path == "#" and str(node["$ref"]).startswith("#")):
        raise GrammarError("json_schema", f"has the keyword '$ref' at {path} beside '$id'", "leave out one of them")
    for name in ("const", "enum"):
        if _holds_unnamed_control(node.get(name)):
            raise GrammarError(
                "json_schema",
                f"has the keyword {name!r} at {path} with a control character that JSON writes as \\u00XX only",
            )
    for pattern in _patterns(node):
        check_regex(pattern, "json_schema", f"has a pattern at {path} that ")
    for name in _NUMBERS:
        _check_numbers(node.get(name), f"for the keyword {name!r} at {path}")


def _check_numbers(value: Any, where: str) -> None:
    """Refuse integers that the library would round: it reads all numbers as 64-bit floats (IEEE 754)."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part, where)
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise GrammarError("json_schema", f"has {where} an integer beyond +-2**53, expected one nearer to zero")


def _check_bounds(nodes: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Refuse an exclusive integer bound that the library would include: the other bound is before the next integer."""
    bounds: dict[str, dict[float, str]] = {name: {} for name in _BOUNDS}
    for path, node in nodes:
        for name in _BOUNDS:
            value = node.get(name, math.inf)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise GrammarError(
                    "json_schema", f"has the keyword {name!r} at {path} as {value!r:.60}, expected a number"
                )
            bounds[name] |= {value: path} if math.isfinite(value) else {}
    above, below = bounds["maximum"] | bounds["exclusiveMaximum"], bounds["minimum"] | bounds["exclusiveMinimum"]
    for name, others, nearest in (("exclusiveMinimum", above, math.floor), ("exclusiveMaximum", below, math.ceil)):
        for other in others:
            bound = nearest(other)
            if bound != other and bound in bounds[name]:
                raise GrammarError(
                    "json_schema",
                    f"has the keyword {name!r} at {bounds[name][bound]}, which cannot be enforced beside the "
                    f"bound {other:g}, before the next integer",
                    "use a bound with a fraction",
                )


def _check_multiples(nodes: Iterable[tuple[str, dict[str, Any]]]) -> int:
    """Refuse divisors whose common automaton is too large; return the number of its states, 0 without divisors."""
    given = [(path, node["multipleOf"]) for path, node in nodes if isinstance(node.get("multipleOf"), int | float)]
    divisors = {Fraction(repr(float(abs(divisor)))) for _, divisor in given if math.isfinite(divisor) and divisor}
    if not divisors:
        return 0
    scale = max(map(_scale, divisors))
    scaled = [int(divisor * scale) for divisor in divisors]
    common = Fraction(math.lcm(*scaled), scale)
    states = int(common * _scale(common))
    # The library multiplies the second product in 32 bits.
    if states > LARGEST_MULTIPLE or math.lcm(*scaled) * max(scaled) >= 2**32:
        what = "is" if len(divisors) == 1 else "has, with those that apply with it, a least common multiple of"
        raise GrammarError(
            "json_schema",
            f"has the keyword 'multipleOf' at {given[-1][0]}, which {what} {float(common):.15g}; its digits without "
            f"the point exceed {LARGEST_MULTIPLE}",
            "use divisors of fewer digits",
        )
    return states


def _scale(number: Fraction) -> int:
    """The least power of ten that turns a decimal number into an integer."""
    scale = 1
    while (number * scale).denominator != 1:
        scale *= 10
    return scale


def _subschemas(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        below = f"{path}/{name}"
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{below}/{key}", schema) for key, schema in value.items())
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{below}/{index}", schema) for index, schema in enumerate(value))
        elif name in _SCHEMAS:
            yield below, value
