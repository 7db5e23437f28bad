"""Remove other GPUs' machine code from a CUDA library, so that it packs small enough to be carried.

The payloads of other architectures become zeros, which compress to nothing. Headers and sizes stay, so the file loads
as before but only runs on the kept architectures. For transport of openly licensed libraries; not for publishing.
"""

import struct
from collections import Counter
from collections.abc import Collection, Iterator

MAGIC = 0xBA55ED50  # of a container of machine code ("fatbin")
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the payload
ARCHITECTURE = 28  # its offset in an entry's header; 90 for example


def trim(data: bytearray, keep: Collection[int]) -> dict[int, int]:
    """Zero the payloads of architectures not in ``keep``, in place; return the bytes of all payloads by architecture.

    Raises ValueError: the library has no machine code of an architecture in ``keep``.
    """
    sizes: Counter[int] = Counter()
    for start, size, architecture in list_payloads(data):
        sizes[architecture] += size
        if architecture not in keep:
            data[start : start + size] = bytes(size)
    if missing := sorted(set(keep) - sizes.keys()):
        raise ValueError(f"the library has no code for sm_{missing[0]}; expected one of {sorted(sizes)}")
    return dict(sizes)


def list_payloads(data: bytearray) -> Iterator[tuple[int, int, int]]:
    """Offset, size and architecture of each payload of machine code."""
    for offset, end in list_sections(data):
        while offset + CONTAINER.size <= end:
            magic, _, header, size = CONTAINER.unpack_from(data, offset)
            if magic != MAGIC:
                offset += 8
                continue
            entry, offset = offset + header, offset + header + size
            while entry + ENTRY.size <= offset:
                _, _, header, size = ENTRY.unpack_from(data, entry)
                if not header:  # padding
                    break
                (architecture,) = struct.unpack_from("<I", data, entry + ARCHITECTURE)
                yield entry + header, size, architecture
                entry += header + size


def list_sections(data: bytearray) -> Iterator[tuple[int, int]]:
    """Start and end of the sections with machine code for GPUs, from the headers of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        text = strings + name
        if bytes(data[text : data.index(0, text)]) in SECTIONS:
            yield offset, offset + length
