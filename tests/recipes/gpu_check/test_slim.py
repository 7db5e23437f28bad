"""A wheel made small: the code for one GPU stays as it was, all else becomes zeros, and pip takes the wheel."""

import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Part = Callable[[str], ModuleType]
# Kernels by compute capability, as a library's containers hold them.
DENSE, EXPERT = b".text.dense_gemv", b".text.cutlass_MoeFCGemm"
NAME = "onnxruntime_gpu-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"


def entry(capability: int, code: bytes, kind: int = 2) -> bytes:
    payload = code + bytes(-len(code) % 8)
    header = struct.pack("<HHIQIIII", kind, 257, 64, len(payload), len(code), 0, 0, capability)
    return header + bytes(64 - len(header)) + payload


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


@pytest.fixture
def library() -> bytes:
    """Two containers among other bytes, of which some look like the beginning of one."""
    looks = struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 1 << 40)
    first = container(entry(80, DENSE), entry(90, DENSE), entry(90, b"source", kind=1))
    return b"\x7fELF" + looks + b"code" + first + b"more" + container(entry(90, EXPERT), entry(120, DENSE)) + looks[:9]


@pytest.fixture
def wheel(tmp_path: Path, library: bytes) -> Path:
    path = tmp_path / NAME
    metadata = "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp312-cp312-manylinux_2_28_x86_64\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("onnxruntime/capi/libonnxruntime_providers_cuda.so", library)
        file.writestr("onnxruntime/capi/libonnxruntime.so.1.0", b"for C")
        file.writestr("onnxruntime/LICENSE", "MIT")
        file.writestr("onnxruntime_gpu-1.0.dist-info/METADATA", metadata)
        file.writestr("onnxruntime_gpu-1.0.dist-info/WHEEL", tags)
        file.writestr("onnxruntime_gpu-1.0.dist-info/RECORD", "")
    return path


def test_entries_of_every_container_are_found_and_nothing_else(part: Part, library: bytes):
    found = [(each.kind, each.capability) for each in part("slim").entries(library)]
    assert found == [(2, 80), (2, 90), (1, 90), (2, 90), (2, 120)]


def test_only_dense_code_for_the_one_gpu_is_left_and_nothing_moves(part: Part, library: bytes):
    slim = part("slim").slimmed(library, 90)
    assert len(slim) == len(library)
    assert [match.start() for match in re.finditer(b"dense_gemv", slim)] == [library.index(b"dense_gemv", 180)]
    assert b"Moe" not in slim and b"source" not in slim and slim.count(b"\x50\xed\x55\xba") == 4
    changed = [place for place, (a, b) in enumerate(zip(library, slim, strict=True)) if a != b]
    codes = [(each.start, each.start + each.size) for each in part("slim").entries(library)]
    assert changed and all(any(start <= place < end for start, end in codes) for place in changed)


def test_a_library_without_code_for_the_gpu_is_refused(part: Part, library: bytes):
    with pytest.raises(part("slim").SlimError, match=r"no code for compute capability 8\.9"):
        part("slim").slimmed(library, 89)


def test_compressed_code_needs_the_program_zstd(part: Part, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    packed = container(entry(90, b"\x28\xb5\x2f\xfd packed"))
    with pytest.raises(part("slim").SlimError, match="zstd is needed"):
        part("slim").slimmed(packed, 90)


def test_a_small_wheel_is_one_that_pip_installs(part: Part, wheel: Path, tmp_path: Path, library: bytes):
    made = part("slim").slim(wheel, tmp_path, 90)
    assert made.name == NAME.replace("-cp312-cp312", "-1slim90-cp312-cp312")
    with zipfile.ZipFile(made) as file:
        assert "onnxruntime/capi/libonnxruntime.so.1.0" not in file.namelist()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--python-version"]
    pip += ["3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--target", tmp_path / "site", made], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = tmp_path / "site" / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    assert installed.read_bytes() == part("slim").slimmed(library, 90)


def test_what_is_no_such_wheel_is_refused_and_leaves_nothing(part: Part, tmp_path: Path):
    other, folder = tmp_path / NAME, tmp_path / "made"
    folder.mkdir()
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("onnxruntime/LICENSE", "MIT")
    with pytest.raises(part("slim").SlimError, match="expected a wheel of onnxruntime-gpu"):
        part("slim").slim(other, folder, 90)
    other.write_bytes(b"no archive")
    with pytest.raises(part("slim").SlimError, match="not a zip file"):
        part("slim").slim(other, folder, 90)
    assert list(folder.iterdir()) == []
