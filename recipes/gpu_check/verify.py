"""Does a bundle compute here what it should: its own golden prompts, and the unquantized model beside it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_check import models
from gpu_check.reference import Case, read, reference, worst
from gpu_check.steps import NotHereError, Options

# Relative differences (reference.worst) beyond which something is wrong, and not only rounded. They are the root mean
# square over all logits of the worst position. Seen on CPUs: float16 0.001, int8 0.07 and int4 0.58, the integers on
# random weights, which lose the most; logits of the position before are more than 1 away.
LIMITS = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "int8": 0.2, "fp8": 0.4, "int4": 0.9}


def verify(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Hash the files, replay the golden prompts, and compare both paths with the reference, if there can be one."""
    from llmc.bundle import verify_files
    from llmc.errors import MissingExtraError

    cases = options.work / f"{geometry}.npz"
    with models.opened(target, geometry, precision, options) as model:
        folder = models.built(target, geometry, precision, options)
        found: dict[str, Any] = {"files": len(list(verify_files(folder, model.manifest))), "golden": golden(model)}
        try:
            made = {} if cases.is_file() else reference(geometry, options)
            found |= {"reference": compare(model, read(cases)), "problems": made.get("problems", [])}
        except (NotHereError, MissingExtraError) as error:
            found |= {"reference": {}, "problems": [], "missing": str(error)}
        limit = LIMITS[precision]
        found["problems"] += problems(found["golden"], found["reference"], limit)
        return {**found, "limit": limit, "engine_version": model.engine_version}


def golden(model: Any) -> dict[str, Any]:
    """The recorded prompts: logits and tokens beside those of the build, and logits beside the CPU's reference."""
    from llmc.errors import BundleError
    from llmc.runtime.selftest import replay

    try:
        report, trouble = replay(model), None
    except BundleError as error:
        report, trouble = None, str(error)
    return {
        "prompts": len(model.manifest.golden),
        "tokens": report and report.tokens,
        "equal_tokens": report and report.equal_tokens,
        "largest_difference": report and report.largest_difference,
        "from_reference": max(_from_reference(model, case) for case in model.manifest.golden),
        "trouble": trouble,
    }


def _from_reference(model: Any, case: Any) -> float:
    """Largest difference of the reference's largest logits after a golden prompt."""
    logits = model.runner.prefill(case.prompt)[0, -1]
    return float(np.abs(logits[list(case.reference_ids)] - np.array(case.reference_logits, np.float32)).max())


def compare(model: Any, cases: Sequence[Case]) -> dict[str, float]:
    """The worst relative difference from the reference by each path."""
    from llmc.runtime.sessions import Phase

    return {
        phase.value: float(np.max([worst(model.runner.logits(ids, phase)[-len(y) :], y) for ids, y in cases]))
        for phase in Phase
    }


def problems(golden: dict[str, Any], distances: dict[str, float], limit: float) -> list[str]:
    """What is wrong, in words."""
    beyond = {
        path: distance for path, distance in distances.items() if not distance <= limit
    }  # which NaN is not either
    trouble = [golden["trouble"]] if golden["trouble"] else []
    return trouble + [
        f"{path}: logits are {distance:.3g} from the reference, at most {limit} is expected"
        for path, distance in beyond.items()
    ]
