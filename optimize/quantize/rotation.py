"""Orthogonal matrices that spread what a few channels hold over all of them, so that 8 bits lose less of it.

For an orthogonal Q, x W^T = (x Q) (W Q)^T, and where x has outliers the largest value of x Q is near its root mean
square. Source: QuaRot (Ashkboos et al. 2024, arXiv:2404.00456), section 4: 1a is the residual stream, 1c the inputs
of ``down_proj``, here in blocks.
"""

from functools import lru_cache

import numpy as np

from llmc.optimize.quantize.grid import Float

SEED = 0


@lru_cache(maxsize=2)
def rotation(size: int) -> Float:
    """The orthogonal matrix Q [size, size]: random signs, times a matrix without small entries.

    That is the Kronecker product of the Hadamard matrix for the powers of two in ``size``, and for what is odd of the
    Hartley matrix (cos(2 pi jk / n) + sin(2 pi jk / n)) / sqrt(n).
    """
    twos = size & -size
    odd = size // twos
    angles = 2 * np.pi * (np.outer(np.arange(odd), np.arange(odd)) % odd) / odd
    hartley = (np.cos(angles) + np.sin(angles)) / np.sqrt(odd)
    signs = np.random.default_rng(SEED).integers(0, 2, size) * 2 - 1
    return np.asarray(signs[:, None] * np.kron(hartley, hadamard(twos)), np.float32)


def hadamard(size: int) -> Float:
    """Sylvester's Hadamard matrix [size, size] over sqrt(size), for a power of two: symmetric, and its own inverse."""
    places = np.arange(size)
    signs = np.ones((size, size))
    for bit in range(size.bit_length() - 1):  # -1 for each bit that row and column have in common
        signs[np.ix_(places >> bit & 1 == 1, places >> bit & 1 == 1)] *= -1
    return np.asarray(signs / np.sqrt(size), np.float32)


def rotate_blocks(x: Float, block: int) -> Float:
    """x [..., n] with each run of ``block`` values times :func:`hadamard`; ``block`` divides n."""
    return np.asarray((x.reshape(-1, block) @ hadamard(block)).reshape(x.shape))
