"""Does a bundle compute here what it should: its own golden prompts, and the unquantized model beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.reference import Case, Float, read, relative
from llmc.bundle import read_bundle, verify_files
from llmc.errors import BundleError
from llmc.runtime import Model, load
from llmc.runtime.selftest import replay
from llmc.runtime.sessions import Phase

# Relative differences (reference.relative) beyond which something is wrong, and not only rounded. They are the root
# mean square over all logits of the worst position. Seen on CPUs: float16 0.001, int8 0.07 and int4 0.58, the integers
# on random weights, which lose the most; logits of the position before are more than 1 away.
LIMITS = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "int8": 0.2, "fp8": 0.4, "int4": 0.9}


def verify(bundle: str, reference: str, emulate: bool) -> dict[str, Any]:
    """Hash the files, replay the golden prompts, and compare both paths with the reference, if its file is there."""
    folder = Path(bundle)
    manifest = read_bundle(folder)
    files = len(list(verify_files(folder, manifest)))
    with load(folder, self_test=False, emulate=emulate) as model:
        found: dict[str, Any] = {
            "files": files,
            "engine_version": model.engine_version,
            "golden": golden(model),
            "reference": compare(model, read(Path(reference))) if Path(reference).is_file() else None,
        }
    limit = LIMITS[manifest.recipe.precision]
    return found | {"limit": limit, "problems": problems(found, limit)}


def golden(model: Model) -> dict[str, Any]:
    """The recorded prompts: logits and tokens beside those of the build, and logits beside the CPU's reference."""
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


def _from_reference(model: Model, case: Any) -> float:
    """Largest difference of the reference's largest logits after a golden prompt."""
    logits = model.runner.prefill(case.prompt)[0, -1]
    return float(np.abs(logits[list(case.reference_ids)] - np.array(case.reference_logits, np.float32)).max())


def compare(model: Model, cases: Sequence[Case]) -> dict[str, Any]:
    """Logits of both paths and greedy tokens beside the reference's."""
    paths = {phase.value: [path(model, case, phase) for case in cases] for phase in Phase}
    largest = max(part["largest_difference"] for parts in paths.values() for part in parts)
    tokens = [same_tokens(model, case, largest) for case in cases if case.tokens]
    return {
        "paths": {name: summary(parts) for name, parts in paths.items()},
        "tokens": sum(len(case.tokens) for case in cases),
        "equal_tokens": sum(equal for equal, _ in tokens),
        "wrong_tokens": sum(wrong for _, wrong in tokens),
    }


def path(model: Model, case: Case, phase: Phase) -> dict[str, float]:
    """One prompt through one path."""
    logits = model.runner.logits(case.ids, phase)[-len(case.logits) :]
    distances = relative(logits, case.logits)
    return {
        "worst": float(distances.max()),
        "mean": float(distances.mean()),
        "largest_difference": float(np.abs(logits - case.logits).max()),
        "mean_kl": divergence(logits, case.logits),
        "same_choice": float((logits.argmax(axis=-1) == case.logits.argmax(axis=-1)).mean()),
    }


def summary(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all prompts: the worst of the first and third figure, the mean of the others."""
    return {
        name: float((np.max if name in ("worst", "largest_difference") else np.mean)([part[name] for part in parts]))
        for name in parts[0]
    }


def divergence(found: Float, wanted: Float) -> float:
    """Mean KL(wanted || found) in nats."""
    x, y = (_log_softmax(np.asarray(a, np.float64)) for a in (found, wanted))
    return float((np.exp(y) * (y - x)).sum(axis=-1).mean())


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def same_tokens(model: Model, case: Case, largest: float) -> tuple[int, int]:
    """Greedy tokens equal to the reference's up to the first that is not; and 1 if that was none of two near choices.

    Two choices are near where differences of logits as large as ``largest`` can swap them.
    """
    answer = model.generate(case.ids, max_tokens=len(case.tokens), temperature=0, ignore_eos=True).token_ids
    for i, (here, there, lead) in enumerate(zip(answer, case.tokens, case.leads, strict=True)):
        if here != there:
            return i, int(lead > 2 * largest)
    return len(case.tokens), 0


def problems(found: dict[str, Any], limit: float) -> list[str]:
    """What is wrong, in words."""
    wrong = [found["golden"]["trouble"]] if found["golden"]["trouble"] else []
    compared = found["reference"]
    if compared is None:
        return wrong
    for name, figures in compared["paths"].items():
        if not figures["worst"] <= limit:  # which NaN is not either
            wrong.append(f"{name}: logits are {figures['worst']:.3g} from the reference, at most {limit} is expected")
    if compared["wrong_tokens"]:
        wrong.append(f"{compared['wrong_tokens']} answers leave the reference's by more than a near choice")
    return wrong
