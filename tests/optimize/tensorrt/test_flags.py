"""Flags of the library's compiler: for Thor alone, and only while an engine is built."""

import os

import pytest

from llmc.optimize.tensorrt.flags import FLAGS, FLAGS_OF_11, VARIABLE, compiler_flags, use_flags


@pytest.mark.parametrize(
    ("version", "gpu", "expected"),
    [("10.16.2", "8.7", ""), ("10.16.2", "11.0", FLAGS), ("11.4.1", "11.0", f"{FLAGS_OF_11} {FLAGS}")],
)
def test_flags_are_for_thor_by_version(version: str, gpu: str, expected: str):
    assert compiler_flags(version, gpu) == expected


@pytest.mark.parametrize("before", [None, "-their:own=1"])
def test_flags_are_there_for_a_while_behind_the_users_own(before: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError), use_flags(FLAGS):
        assert os.environ[VARIABLE] == (f"{before} {FLAGS}" if before else FLAGS)
        raise RuntimeError
    assert os.environ.get(VARIABLE) == before
