"""The JSON Schemas that guided decoding can enforce: those whose every keyword the grammar library implements.

JSON Schema has implementations ignore keywords that they do not know. Here an output would then break the schema, so
such keywords are refused by name.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmc.errors import GrammarError, UsageError

LONGEST_REGEX = 16 * 1024
"""Characters of a regular expression at most; longer ones cost minutes before a limit of the library stops them."""

# Keywords of JSON Schema (https://json-schema.org/draft/2020-12/schema, and draft 7) by what they hold. The library
# enforces these, in the combinations that it does not refuse itself, and ignores every keyword that it does not know.
_SCHEMAS = {"additionalItems", "additionalProperties", "items"}
_LISTS_OF_SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"$defs", "definitions", "patternProperties", "properties"}
_VALUES = {
    *("$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern"),
    *("required", "type"),
}
# They restrict nothing; discriminator and those after it are OpenAPI's.
_ANNOTATIONS = {
    *("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated"),
    *("description", "examples", "id", "readOnly", "title", "writeOnly"),
    *("discriminator", "example", "externalDocs", "xml"),
}
_KEYWORDS = _SCHEMAS | _LISTS_OF_SCHEMAS | _NAMED_SCHEMAS | _VALUES | _ANNOTATIONS
# What the library recurses over, at up to 4 kB of stack each.
_MOST_SUBSCHEMAS = 10_000


def schema_text(value: Mapping[str, Any] | str, name: str) -> str:
    """A schema as JSON text, with its properties in their order, which is that of the output.

    ``name`` is that of the argument it came in.

    Raises:
        UsageError: it is not the JSON text of an object, or holds what JSON has not.
    """
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{name} is JSON of type {type(parsed).__name__}, expected an object")
    return text


def check_schema(schema: Any) -> None:
    """Refuse a parsed schema that would not be enforced as a whole, or that is too large.

    Raises:
        GrammarError: naming the keyword and where it stands.
    """
    waiting = [("#", schema)]
    visited = 0
    while waiting:
        path, node = waiting.pop()
        visited += 1
        if visited > _MOST_SUBSCHEMAS:
            raise GrammarError(f"json_schema has more than {_MOST_SUBSCHEMAS} subschemas, expected fewer")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise GrammarError(
                f"json_schema: {path} is of type {type(node).__name__}, expected an object, true or false"
            )
        _check_keywords(path, node)
        waiting.extend(_subschemas(path, node))


def _check_keywords(path: str, node: dict[str, Any]) -> None:
    # The vendors' own annotations begin with x-, but x-guidance instructs the library not to enforce.
    for name in node:
        if name not in _KEYWORDS and (not name.startswith("x-") or name == "x-guidance"):
            close = difflib.get_close_matches(name, sorted(_KEYWORDS), n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it if the output need not follow it"
            raise GrammarError(f"json_schema: keyword {name!r} at {path} cannot be enforced; {hint}")
    # The library counts a property again that is written twice, and prevents that only for those it knows by name.
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if node.get("minProperties", 0) and not closed:
        raise GrammarError(
            f"json_schema: keyword 'minProperties' at {path} cannot be enforced; "
            "list the properties and set additionalProperties to false"
        )
    patterns = node.get("patternProperties")
    for pattern in [node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
        if isinstance(pattern, str) and len(pattern) > LONGEST_REGEX:
            raise GrammarError(
                f"json_schema: a pattern at {path} has {len(pattern)} characters, expected at most {LONGEST_REGEX}"
            )


def _subschemas(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        below = f"{path}/{name}"
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{below}/{key}", schema) for key, schema in value.items())
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{below}/{index}", schema) for index, schema in enumerate(value))
        elif name in _SCHEMAS:
            yield below, value
