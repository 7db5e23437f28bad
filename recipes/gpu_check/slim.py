"""A wheel of onnxruntime-gpu, made small enough to be carried: code for one kind of GPU, and none for experts.

A CUDA library keeps its device code in containers, which have an entry for each kind of GPU. Those that are not wanted
become zeros, and their headers stay: nothing moves, and compression does the rest. Such a wheel is for a check on one
machine and no package to hand on: on other GPUs, and for mixtures of experts, it has no kernels.
"""

import base64
import hashlib
import re
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libonnxruntime_providers_cuda.so"
# The library for C, which Python has within its module, and the provider of an engine that is not checked.
LEFT_OUT = re.compile(r"/libonnxruntime\.so|/libonnxruntime_providers_tensorrt\.so")
# Kernels of mixtures of experts, which no dense decoder calls: more than half of the code for Hopper.
EXPERTS = re.compile(rb"[Mm]o[eE]|GroupProblemShape|ArrayTma")
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of all entries
MAGIC = 0xBA55ED50
# Kind, bytes of the header and of the payload, those of the payload before its padding, compute capability as 90.
ENTRY = struct.Struct("<H2xIQI8xI32x")
MACHINE_CODE = 2
ZSTD = b"\x28\xb5\x2f\xfd"


class SlimError(Exception):
    """The wheel is not one that can be made smaller."""


@dataclass(frozen=True)
class Entry:
    """Device code in a library: where its payload lies, and for which GPU it is."""

    start: int
    size: int
    compressed: int
    kind: int
    capability: int


def entries(library: bytes) -> Iterator[Entry]:
    """Every entry of every container."""
    magic, place = struct.pack("<I", MAGIC), 0
    while (place := library.find(magic, place)) >= 0:
        if place + CONTAINER.size > len(library):
            return
        _, version, header, total = CONTAINER.unpack_from(library, place)
        if version != 1 or header != CONTAINER.size or place + header + total > len(library):
            place += 1  # bytes that happen to look like one
            continue
        place += header
        end = place + total
        while place + ENTRY.size <= end:
            kind, header, size, compressed, capability = ENTRY.unpack_from(library, place)
            if not ENTRY.size <= header <= end - place or size > end - place - header:
                break
            yield Entry(place + header, size, compressed, kind, capability)
            place += header + size
        place = end


def kernels(library: bytes, entry: Entry) -> set[bytes]:
    """Names of the kernels of an entry.

    Raises:
        SlimError: it is compressed, and the program zstd is missing or fails.
    """
    code = library[entry.start : entry.start + entry.size]
    if code.startswith(ZSTD):
        command = [shutil.which("zstd") or "zstd", "-dcq"]
        try:
            code = subprocess.run(command, input=code[: entry.compressed], capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise SlimError(f"the program zstd is needed to read device code: {error}") from error
    return set(re.findall(rb"\.text\.(\w+)", code))


def slimmed(library: bytes, capability: int) -> bytes:
    """The library with code for one compute capability (as 90), and none for experts.

    Raises:
        SlimError: it has no code for it.
    """
    found, kept = bytearray(library), 0
    for entry in entries(library):
        wanted = entry.kind == MACHINE_CODE and entry.capability == capability
        if wanted and not any(map(EXPERTS.search, kernels(library, entry))):
            kept += 1
        else:
            found[entry.start : entry.start + entry.size] = bytes(entry.size)
    if not kept:
        raise SlimError(f"it has no code for compute capability {capability / 10}")
    return bytes(found)


def slim(wheel: Path, folder: Path, capability: int) -> Path:
    """Write the smaller wheel into ``folder``; it has a build tag of its own, and pip installs it like any other.

    Raises:
        SlimError: it is no wheel of onnxruntime-gpu, or has no code for this GPU.
    """
    name, version, *tags = wheel.name.split("-")
    target, record = folder / "-".join([name, version, f"1slim{capability}", *tags]), []
    try:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as made:
            if not any(file.endswith(f"/{LIBRARY}") for file in source.namelist()):
                raise SlimError(f"{wheel}: no {LIBRARY} is in it; expected a wheel of onnxruntime-gpu")
            for entry in source.infolist():
                if LEFT_OUT.search(entry.filename) or entry.is_dir() or entry.filename.endswith(".dist-info/RECORD"):
                    continue
                content = source.read(entry)
                if entry.filename.endswith(f"/{LIBRARY}"):
                    content = slimmed(content, capability)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                record.append(f"{entry.filename},sha256={digest},{len(content)}\n")
                entry.compress_type = zipfile.ZIP_LZMA
                made.writestr(entry, content)
            place = f"{name}-{version}.dist-info/RECORD"
            made.writestr(place, "".join([*record, f"{place},,\n"]))
    except (OSError, zipfile.BadZipFile, SlimError) as error:
        target.unlink(missing_ok=True)
        raise SlimError(f"{wheel}: {error}") from error
    return target
