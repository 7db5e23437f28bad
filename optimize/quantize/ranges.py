"""Scales from the largest magnitudes that calibration saw, for integers -127 ... 127; values beyond are clipped.

Static activations of W8A8, uint8 q = round(x / s) + 128, have one scale for a whole tensor, which an engine holds as a
constant. One outlier channel costs all others their precision: smooth first (arXiv:2211.10438). An int8 KV cache, keys
(after rotation) and values as q = round(x / s), has a scale for the whole tensor, or one for each channel of each head,
which keeps a key's large channels from costing its small ones their precision (KIVI, arXiv:2402.02750, finds such
channels in keys). Source of its layout: com.microsoft.GroupQueryAttention in ONNX Runtime.
"""

import math

import numpy as np

from llmc.errors import BuildError
from llmc.optimize.quantize.grid import Float

LARGEST = 127
# Least magnitudes of what calibration only saw as zero: a scale of zero would make infinity of any other value.
SMALLEST_ACTIVATION, SMALLEST_CHANNEL = 1e-9, 1e-6


def activation_scale(absmax: float) -> float:
    """The scale for activations of magnitude up to ``absmax``; BuildError if that is no magnitude."""
    if not math.isfinite(absmax) or absmax < 0:
        raise BuildError(f"an activation's range is {absmax}, expected a finite magnitude; calibrate again")
    return max(absmax, SMALLEST_ACTIVATION) / LARGEST


def cache_scales(absmax: Float, *, per_channel: bool) -> Float:
    """Scales float32 [kv_heads, head_dim], or [1], from the largest magnitude of each channel [kv_heads, head_dim]."""
    if not absmax.size or not np.isfinite(absmax).all() or (absmax < 0).any():
        raise BuildError(f"ranges of the KV cache are {absmax!r:.60}, expected finite magnitudes; calibrate again")
    ranges = absmax if per_channel else absmax.max(keepdims=True).reshape(1)
    scales: Float = (np.maximum(ranges, SMALLEST_CHANNEL) / LARGEST).astype(np.float32)
    return scales
