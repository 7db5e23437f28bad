"""What the session asks of TensorRT exists in every recorded version, with the arguments that it is given.

The session runs behind a double of its own; this holds the double's world to the recorded one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.recorded import VERSIONS, surface

ENGINE = Path(__file__).parents[4] / "runtime" / "sessions" / "tensorrt" / "engine.py"
# What the source calls an object of the library, and what class that is: (file's class, expression) -> class.
OBJECTS = {
    ("Engine", "self.native"): "ICudaEngine",
    ("Engine", "self._runtime"): "Runtime",
    ("Context", "engine.native"): "ICudaEngine",
    ("Context", "self._native"): "IExecutionContext",
}
# Calls that the scan finds in the source; fewer mean that it no longer reads it right.
CALLS_AT_LEAST = 10
# Asked with getattr, because not every version has them.
LATER = {"get_aliased_input_tensor": "ICudaEngine", "is_stream_capturable": "IExecutionContext"}


def uses() -> Iterator[tuple[str, str, ast.Attribute]]:
    """Class and member of each use of an object of the library, in source order."""
    tree = ast.parse(ENGINE.read_text(encoding="utf-8"))
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute):
                found = OBJECTS.get((owner.name, ast.unparse(node.value)))
                if found:
                    yield found, node.attr, node


def test_the_scan_finds_what_a_run_needs():
    found = {(owner, member) for owner, member, _ in uses()}
    assert ("IExecutionContext", "execute_async_v3") in found
    assert ("IExecutionContext", "set_tensor_address") in found
    assert ("ICudaEngine", "create_execution_context") in found
    assert ("Runtime", "deserialize_cuda_engine") in found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_member_exists(version: str):
    recorded = surface(version)
    missing = [f"{owner}.{member}" for owner, member, _ in uses() if member not in recorded[owner]["members"]]
    assert missing == []


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_have_as_many_arguments_as_the_recorded_ones(version: str):
    """``self._asked(text, method, *arguments)`` calls the method; any other call is written out."""
    recorded = surface(version)
    tree = ast.parse(ENGINE.read_text(encoding="utf-8"))
    by_place = {(node.lineno, node.col_offset): (owner, member) for owner, member, node in uses()}
    checked = 0
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        target, arguments = call.func, call.args
        if ast.unparse(target) == "self._asked":
            target, arguments = call.args[1], call.args[2:]
        owner, member = by_place.get((target.lineno, target.col_offset), ("", ""))
        if not owner or not isinstance(target, ast.Attribute) or target.attr != member:
            continue
        checked += 1
        overloads = recorded[owner]["members"][member]
        assert overloads is not None, f"{owner}.{member} is no method"
        counts = [(sum(not name.endswith("=") for name in names), len(names)) for names in overloads]
        assert any(least <= len(arguments) <= most for least, most in counts), (
            f"{owner}.{member} takes {overloads}, not {ast.unparse(call)}"
        )
    assert checked >= CALLS_AT_LEAST


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_of_contexts_can_be_shared(version: str):
    assert "USER_MANAGED" in surface(version)["ExecutionContextAllocationStrategy"]["enum"]


def test_what_is_asked_with_getattr_came_later():
    """Should every version have one of them, it need not be asked any more."""
    text = ENGINE.read_text(encoding="utf-8")
    for member, owner in LATER.items():
        assert f'"{member}"' in text
        assert member not in surface("10.3")[owner]["members"]
