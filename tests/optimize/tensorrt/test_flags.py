"""Flags of the library's compiler: by version, and only while an engine is built."""

import os

import pytest

from llmc.optimize.tensorrt.flags import DUAL_PRODUCTS, FLAGS, TILES, VARIABLE, compiler_flags, use_flags


@pytest.mark.parametrize(
    ("version", "gpu", "more"),
    [("10.16.2", "11.0", ""), ("11.0.0", "8.9", ""), ("11.0.0", "10.0", DUAL_PRODUCTS), ("11.4.1", "8.9", TILES)],
)
def test_flags_go_by_version_and_the_gpus_generation(version, gpu, more):
    assert compiler_flags(version, gpu) == FLAGS + more


@pytest.mark.parametrize("before", [None, "-their:own=1"])
def test_flags_are_there_for_a_while_behind_the_users_own(before, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError), use_flags(FLAGS):
        assert os.environ[VARIABLE] == (f"{before} {FLAGS}" if before else FLAGS)
        raise RuntimeError
    assert os.environ.get(VARIABLE) == before
