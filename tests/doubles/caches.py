"""Contents of caches whose layers are all alike, as arrays by tensor, head and position."""

from typing import Any

import numpy as np

from llmc.runtime.kv.cache import KVCache


def read(cache: KVCache, row: int, start: int, end: int) -> np.ndarray:
    """What a row holds, [tensors, kv_heads, positions, head_dim]."""
    heads, width = cache.tensors[0].shape
    return cache.read(row, start, end).reshape(len(cache.tensors), heads, end - start, width)


def write(cache: KVCache, row: int, start: int, values: Any) -> None:
    """Put what :func:`read` gave into the positions from ``start`` on."""
    cache.write(row, start, start + values.shape[2], np.ascontiguousarray(values).reshape(-1))
