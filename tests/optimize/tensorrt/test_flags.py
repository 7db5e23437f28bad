"""Flags of the library's compiler: for the GPU and the versions that need them, while builders are made."""

import os

import pytest

from llmc.optimize.tensorrt.flags import RULES, VARIABLE, compiled_with, compiler_flags

DUAL, MERGED = "-peep:match_dual_gemm=off", "-peep:fc_h_fusion=off"
LATER = "-mlir:autotune:num_threads=1 -mlir:collective:fp4=off -cask_fusion:async_policy=1"


@pytest.mark.parametrize(
    ("version", "gpu", "expected"),
    [
        ("10.3.0", "11.0", ""),
        ("10.13.3.9", "11.0", f"{DUAL} {MERGED}"),
        ("10.14.1.48", "11.0", f"{DUAL} {MERGED}"),
        ("10.15.1.29", "11.0", f"{LATER} {MERGED}"),
        ("10.16.2.10", "11.0", f"{LATER} {MERGED}"),
        ("11.4.1", "11.0", f"{DUAL} {LATER} {MERGED}"),
        ("11.4.1", "10.1", f"{DUAL} {LATER} {MERGED}"),
        ("11.4.1", "8.7", ""),
        ("11.4.1", "9.0", ""),
        ("11.4.1", "10.0", ""),
    ],
)
def test_flags_are_for_thor_by_version(version: str, gpu: str, expected: str):
    assert compiler_flags(version, gpu) == expected


def test_every_rule_says_where_it_is_from():
    assert all(rule.source.startswith("https://github.com/NVIDIA/") for rule in RULES)


@pytest.mark.parametrize("before", [None, "-their:own=1"])
@pytest.mark.parametrize("flags", ["", MERGED])
def test_flags_are_there_for_a_while_behind_the_users_own(
    monkeypatch: pytest.MonkeyPatch, before: str | None, flags: str
):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError), compiled_with(flags):
        assert os.environ.get(VARIABLE, "") == " ".join(filter(None, (before, flags)))
        raise RuntimeError
    assert os.environ.get(VARIABLE) == before
