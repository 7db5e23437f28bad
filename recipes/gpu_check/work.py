"""The processes of the steps: a name, its arguments as JSON, and one JSON object on the standard output."""

import importlib
import json
import math
import os
import sys
from typing import Any

from gpu_check.process import NOT_HERE

# Module and function by name, imported on use: a broken library must break its own step only.
WORKERS = {
    "machine": "gpu_check.machine:machine",
    "bandwidth": "gpu_check.machine:bandwidth",
    "library": "gpu_check.machine:library",
    "export": "gpu_check.models:export",
    "reference": "gpu_check.reference:reference",
    "verify": "gpu_check.verify:verify",
    "determinism": "gpu_check.determinism:determinism",
    "measure": "gpu_check.measure:measure",
    "buckets": "gpu_check.measure:buckets",
    "lengths": "gpu_check.lengths:lengths",
    "baseline": "gpu_check.baseline:baseline",
}


class NotHereError(Exception):
    """Something that the step needs is not on this machine."""


def work(name: str, arguments: str) -> int:
    """Run one worker; its exit status."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not end up in the result
    from llmc.errors import LlmcError, MissingExtraError

    module, _, function = WORKERS[name].partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except (NotHereError, MissingExtraError) as error:
        print(f"{error}", file=sys.stderr)
        return NOT_HERE
    except LlmcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump(finite(result), stream, allow_nan=False)
    return 0


def finite(value: Any) -> Any:
    """``value`` with None for what JSON cannot say: NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
