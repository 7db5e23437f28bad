"""Grammars in llguidance's dialect of Lark: their counts bounded, the schemas in them checked and spelt anew."""

import json
import re

from llmc.errors import GrammarError
from llmc.runtime.guided.json_schema import check_schema, enforceable, options
from llmc.runtime.guided.regexes import MOST_REPETITIONS, repetitions

# Texts, comments and regular expressions are to be left as they are.
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_COUNT = re.compile(r"~\s*([0-9]+)(?:\s*\.\.\s*([0-9]+))?")


def checked_lark(grammar: str) -> tuple[str, bool]:
    """The grammar as it is enforced, and whether compiling it may take long, for a schema in it may.

    Raises:
        GrammarError: a count is too large, or a schema in it would not be enforced.
    """
    counts = [int(digits[:20]) for match in _COUNT.finditer(grammar) for digits in match.groups("0")]
    found = max(repetitions(grammar), *counts, 0)
    if found > MOST_REPETITIONS:
        raise GrammarError(f"grammar repeats something {found} times, expected at most {MOST_REPETITIONS}")
    parts, at, laborious = [], 0, False
    for piece in _PIECE.finditer(grammar):
        if not piece[0].startswith("%json") or piece.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, piece.end())
        except ValueError as error:
            raise GrammarError(f"grammar: what follows %json is no JSON: {error}") from error
        laborious |= check_schema(schema)
        if isinstance(schema, dict):
            schema, escapes = enforceable(schema)
            schema["x-guidance"] = options(escapes)
        parts += [grammar[at : piece.end()], json.dumps(schema)]
        at = end
    return "".join([*parts, grammar[at:]]), laborious
