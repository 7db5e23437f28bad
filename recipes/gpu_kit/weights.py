"""Write random weights for a bundle that is a graph without weights: speeds are meaningful, texts are not.

    python weights.py BUNDLE...        # bundles that have their weights are skipped

``weights.json`` in the bundle lists the tensors. Floats are normal, with the mean and deviation of the real ones; codes
of quantized weights are random bytes. Each tensor repeats one block of random values, which is fast.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

SPEC, WEIGHTS = "weights.json", "weights.bin"
BLOCK = 1 << 24  # random bytes per tensor, which are repeated
CODES = ("UINT8", "INT8", "UINT4", "INT4")


def random_values(tensor: dict[str, Any], count: int) -> bytes:
    """``count`` random bytes, as values of the tensor."""
    generator = np.random.default_rng(tensor.get("offset", 0))
    if tensor["type"] in CODES:
        return generator.bytes(count)
    kind = {"FLOAT": np.float32, "FLOAT16": np.float16}.get(tensor["type"])
    if kind is None:
        raise ValueError(f"{tensor['name']} has the type {tensor['type']}, expected codes or floats")
    values = generator.standard_normal(count // kind().itemsize, np.float32) * tensor["deviation"] + tensor["mean"]
    return values.astype(kind).tobytes()


def write_weights(bundle: Path) -> None:
    """Write the file of a bundle's weights, under another name until it is complete."""
    part = bundle / f"{WEIGHTS}.{os.getpid()}"
    spec = json.loads((bundle / SPEC).read_text(encoding="utf-8"))
    with part.open("wb") as file:
        file.truncate(spec["bytes"])
        for tensor in spec["tensors"]:
            file.seek(tensor["offset"])
            block = random_values(tensor, min(BLOCK, tensor["bytes"]))
            whole, rest = divmod(tensor["bytes"], len(block))
            for _ in range(whole):
                file.write(block)
            file.write(block[:rest])
    part.replace(bundle / WEIGHTS)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        if not (folder / WEIGHTS).exists():
            write_weights(folder)
