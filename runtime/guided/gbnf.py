"""llama.cpp's grammars, spelt so that llguidance reads them as they are meant."""

import re

# A rule's name and ::= at the start of a line: no grammar in Lark's notation has that.
_RULE = re.compile(r"^[ \t]*[-\w]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def without_long_escapes(kind: str, grammar: str) -> str:
    r"""A grammar with the characters themselves, or their ``\xHH``, in place of ``\uHHHH`` and ``\UHHHHHHHH``.

    llguidance drops the leading zeros of these when it translates them into Lark's notation, so that ``"\u00e9ab"``
    became U+E9AB. Any other ``kind``, Lark's notation and escapes of what is no character stay as they are.

    Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
    """
    return _ESCAPE.sub(_character, grammar) if kind == "grammar" and _RULE.search(grammar) else grammar


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else -1
    if code < 0 or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        return escape[0]
    return chr(code) if code > 0xFF else f"\\x{code:02x}"
