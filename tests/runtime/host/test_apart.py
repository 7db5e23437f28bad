"""Functions in a process of their own, whatever becomes of it."""

from typing import Any

import pytest

from llmc.runtime.host.apart import ApartError, call_apart

PATIENCE_S, GIB = 60.0, 1 << 30


def call(function: str, *arguments: Any, seconds: float = PATIENCE_S) -> Any:
    return call_apart(function, *arguments, seconds=seconds, memory=GIB)


def test_a_result_comes_back():
    assert call("llmc.errors:install_command", "no such extra").startswith("pip install")


@pytest.mark.parametrize(
    ("function", "arguments", "refused", "message"),
    [
        ("llmc.errors:require", ["no_such_module", "cpu"], True, "no_such_module is not installed; it is in the extra"),
        ("builtins:int", ["a"], False, "ValueError: invalid literal"),
        ("os:abort", [], False, "ended by SIGABRT"),
        ("builtins:bytearray", [4 * GIB], False, "MemoryError"),
        ("sys:exit", [3], False, "SystemExit: 3"),
    ],
)
def test_what_becomes_of_the_process_is_told(function, arguments, refused, message):
    with pytest.raises(ApartError, match=message) as caught:
        call(function, *arguments)
    assert caught.value.refused is refused


def test_what_hangs_is_ended():
    with pytest.raises(ApartError, match="no answer within 1 s"):
        call("time:sleep", 1000, seconds=1)
