"""Scales of an int8 KV cache: keys (after rotation) and values as q = round(x / s), clipped to -127 ... 127.

With a scale for the whole tensor, s = max|x| / 127 over all heads and channels; with one per channel, the same for each
channel of each head, which keeps a key's large channels from costing its small ones their precision (KIVI, arXiv
2402.02750, finds such channels in keys). Source of the layout: com.microsoft.GroupQueryAttention in ONNX Runtime.
"""

import numpy as np

from llmc.errors import BuildError
from llmc.optimize.quantize.grid import Float

LARGEST = 127
# A channel that calibration only saw as zero would give a scale of zero, and any other value infinity.
SMALLEST = 1e-6


def scales(absmax: Float, *, per_channel: bool) -> Float:
    """Scales float32 [kv_heads, head_dim], or [1], from the largest magnitude of each channel [kv_heads, head_dim]."""
    if not absmax.size or not np.isfinite(absmax).all() or (absmax < 0).any():
        raise BuildError(f"ranges of the KV cache are {absmax!r:.60}, expected finite magnitudes; calibrate again")
    found = absmax if per_channel else absmax.max(keepdims=True).reshape(1)
    result: Float = (np.maximum(found, SMALLEST) / LARGEST).astype(np.float32)
    return result
