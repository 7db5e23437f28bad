"""The machine's own speed limit for decoding: how fast all threads together read memory."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.host.machine import available_memory

BYTES_PER_THREAD = 256 << 20  # far beyond any cache
PASSES = 5


def read_bandwidth(threads: int) -> float:
    """Bytes per second of the best of several passes in which every thread reads its own 256 MiB once.

    Where memory is short the pieces are smaller, so that all together take at most a quarter of what is free.
    """
    size = min(BYTES_PER_THREAD, available_memory() // (4 * threads))
    arrays = [np.ones(size // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best = min(_timed_pass(pool, arrays) for _ in range(PASSES))
    return threads * size / best


def _timed_pass(pool: ThreadPoolExecutor, arrays: list[NDArray[np.int64]]) -> float:
    start = time.perf_counter()
    # max() is a vectorised reduction that releases the interpreter lock and has no long dependency chain.
    list(pool.map(np.max, arrays))
    return time.perf_counter() - start
