"""Does a bundle compute what it should, and twice the same: its golden prompts, the unquantized model, repetitions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check import models
from gpu_check.steps import NotHereError, Options
from llmc.bundle import read_export, verify_files
from llmc.errors import BundleError, MissingExtraError
from llmc.runtime.selftest import replay
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.text.tokenizer import Tokenizer

Float = NDArray[np.float32]
# A prompt, and the reference's logits [n, V] after its last tokens.
Case = tuple[list[int], Float]

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
# And one of arbitrary tokens that is longer than a chunk of prefill and than the smallest buckets of the cache.
LONG_PROMPT = 320
# The last positions of each prompt are compared, in a sample of the vocabulary: all logits would be gigabytes, these
# are a megabyte or two, so that the reference can be carried along. A root mean square of so many is right to 1-2 %.
POSITIONS, SAMPLE = 24, 4096
# Of the two references: both add in float32, in another order. Planted in a test: a scaled norm is 0.1 and more.
SAME_MODEL = 1e-3


def reference(geometry: str, options: Options) -> dict[str, Any]:
    """Write the reference's cases, by transformers where it is installed; and how far apart both references are."""
    return reference_of(models.export(geometry, options), options.work / f"{geometry}.npz")


def reference_of(folder: Path, file: Path) -> dict[str, Any]:
    """Write the cases of an export into a file.

    Raises:
        NotHereError: neither of both that could compute them is installed.
    """
    found: dict[str, list[Float]] = {}
    missing = []
    prompts = prompts_of(folder)
    for way in (by_transformers, by_portable_graph):
        try:
            found[way.__name__] = way(folder, prompts)
        except (ImportError, MissingExtraError) as error:
            missing.append(f"{way.__name__}: {error}")
    if not found:
        raise NotHereError("; ".join(missing))
    source, logits = next(iter(found.items()))
    save(list(zip(prompts, logits, strict=True)), file)
    apart = None if missing else largest(worst(a, b) for a, b in zip(*found.values(), strict=True))
    problems = [] if apart is None else beyond({"portable graph": apart}, SAME_MODEL, "from transformers")
    return {"source": source, "missing": missing, "difference_of_both": apart, "problems": problems}


def beyond(distances: dict[str, float], limit: float, how: str) -> list[str]:
    """The distances that are larger than ``limit``, in words."""
    return [
        f"{name}: logits are {distance:.3g} {how}, at most {limit} is expected"
        for name, distance in distances.items()
        if not distance <= limit  # which NaN is not either
    ]


def prompts_of(folder: Path) -> list[list[int]]:
    """Token ids of all prompts."""
    tokenizer, geometry = Tokenizer.from_folder(folder), read_export(folder).geometry
    texts = [tokenizer.encode(text)[:POSITIONS] for text in TEXTS]
    return [*filter(None, texts), arbitrary(min(LONG_PROMPT, geometry.max_positions), geometry.vocab_size)]


def arbitrary(length: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Token ids without meaning; another first one for another ``salt``."""
    found: list[int] = np.random.default_rng(salt).integers(10, min(vocab_size, 4000), length).tolist()
    return found


def by_transformers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Float]:
    """Logits by transformers in float32, from the export's own weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids]), logits_to_keep=POSITIONS).logits[0].numpy() for ids in prompts]


def by_portable_graph(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Float]:
    """Logits by the exported graph in ONNX Runtime."""
    from llmc.optimize.judge.reference import Reference

    model = Reference(folder)
    return [model.project(rows[-POSITIONS:]) for rows in model.normed(prompts)]


def sampled(logits: Float) -> Float:
    """The logits [n, min(V, SAMPLE)] of the same tokens each time."""
    size = logits.shape[-1]
    return logits[..., np.sort(np.random.default_rng(0).permutation(size)[:SAMPLE])]


def save(cases: Sequence[Case], path: Path) -> None:
    """Write the cases, their logits sampled, in one piece."""
    part = path.with_suffix(".part.npz")
    arrays = [{f"ids.{i}": np.array(ids), f"logits.{i}": sampled(logits)} for i, (ids, logits) in enumerate(cases)]
    np.savez(part, **{name: array for pair in arrays for name, array in pair.items()})
    part.replace(path)


def read(path: Path) -> list[Case]:
    """The cases that :func:`save` wrote."""
    with np.load(path) as file:
        return [(file[f"ids.{i}"].tolist(), file[f"logits.{i}"]) for i in range(len(file.files) // 2)]


def worst(found: Any, wanted: Any) -> float:
    """The largest relative difference of any position; NaN where something is not finite.

    It is the root mean square of the differences over the deviation of the wanted logits. Both are centred first, for a
    constant that is added to all logits means nothing.
    """
    x, y = (np.asarray(a, np.float64) - np.asarray(a, np.float64).mean(axis=-1, keepdims=True) for a in (found, wanted))
    return float(np.sqrt(((x - y) ** 2).mean(axis=-1) / (y**2).mean(axis=-1)).max())


def largest(distances: Iterable[float]) -> float:
    """The largest of all, NaN if any is."""
    return float(np.max(list(distances)))


# ------------------------------------------------------------------------------------------------------- verification

# Relative differences (worst) beyond which something is wrong, and not only rounded: the root mean square over all
# logits of the worst position. Seen on CPUs: float16 0.001, int8 0.07 and int4 0.58, the integers on
# random weights, which lose the most; logits of the position before are more than 1 away.
LIMITS = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "int8": 0.2, "fp8": 0.4, "int4": 0.9}


def verify(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Hash the files, replay the golden prompts, and compare both paths with the reference, if there can be one: that
    of this machine, or the one that was carried along."""
    name = f"{geometry}.npz"
    carried = options.models and options.models / name
    cases = carried if carried and carried.is_file() and not (options.work / name).is_file() else options.work / name
    with models.opened(target, geometry, precision, options) as model:
        folder = models.built(target, geometry, precision, options)
        found: dict[str, Any] = {"files": len(list(verify_files(folder, model.manifest))), "golden": golden(model)}
        try:
            made = {} if cases.is_file() else reference(geometry, options)
            found |= {"reference": compare(model, read(cases)), "problems": made.get("problems", [])}
        except (NotHereError, MissingExtraError) as error:
            found |= {"reference": {}, "problems": [], "missing": str(error)}
        limit = LIMITS[precision]
        found["problems"] += mistakes(found["golden"], found["reference"], limit)
        return {**found, "limit": limit, "engine_version": model.engine_version}


def golden(model: Any) -> dict[str, Any]:
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
        "from_reference": max(from_reference(model, case) for case in model.manifest.golden),
        "trouble": trouble,
    }


def from_reference(model: Any, case: Any) -> float:
    """Largest difference of the reference's largest logits after a golden prompt."""
    logits = model.runner.prefill(case.prompt)[0, -1]
    return float(np.abs(logits[list(case.reference_ids)] - np.array(case.reference_logits, np.float32)).max())


def compare(model: Any, cases: Sequence[Case]) -> dict[str, float]:
    """The worst relative difference from the reference by each path."""
    return {
        phase.value: largest(worst(sampled(model.runner.logits(ids, phase)[-len(y) :]), y) for ids, y in cases)
        for phase in Phase
    }


def mistakes(golden: dict[str, Any], distances: dict[str, float], limit: float) -> list[str]:
    """Mistakes, in words."""
    trouble = [golden["trouble"]] if golden["trouble"] else []
    return trouble + beyond(distances, limit, "from the reference")


# -------------------------------------------------------------------------------------------------------- determinism

ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 24
STEPS = 4
# Kernels for several rows add in another order. Relative to the deviation of the logits (worst), float16 and
# activations in 8 bits stay below this; the row of another sequence gives about 1.
ROUNDING = 0.1


def determinism(target: str, geometry: str, precision: str, options: Options) -> dict[str, Any]:
    """Tokens and relative differences of logits of the same prompts: twice, in a batch, and of one step repeated."""
    with models.opened(target, geometry, precision, options) as model:
        vocab, rows = model.manifest.geometry.vocab_size, min(ROWS, model.manifest.limits.max_batch)
        prompts = [arbitrary(PROMPT_TOKENS + i, vocab, i) for i in range(rows)]
        session, runner = model.runner.session, model.runner
        apart = graphs_apart(session, prompts)  # first, see there
        apart["batch"] = rows_apart(session, prompts)
        first = runner.prefill(prompts[0]).copy()
        apart["prefill again"] = worst(runner.prefill(prompts[0]), first)
        return {"rows": rows, "apart": apart, "tokens": tokens(model, prompts), "problems": differences(apart)}


def differences(apart: dict[str, float]) -> list[str]:
    """Differences beyond rounding, in words; those within are figures, and so are tokens: near choices swap them."""
    return beyond(apart, ROUNDING, "apart (relative)")


def rows_apart(session: Any, prompts: Sequence[Sequence[int]]) -> float:
    """A decode step of all rows at once beside one of each row alone."""
    fed(session, prompts)
    alone = np.concatenate([step(session, prompts[r : r + 1], r).copy() for r in range(len(prompts))])
    return worst(step(session, prompts, 0), alone)


def graphs_apart(session: Any, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """A step again and again: of one row (graph A), of all rows (B), of one row again; beside the first of its kind.

    An engine with CUDA graphs runs the first one plainly, captures, and replays, so nothing may have decoded on this
    session before. The cache gets the same values at the same position each time.
    """
    fed(session, prompts)
    first: dict[int, Float] = {}
    found = {}
    for name, count in {"graph A": 1, "graph B": len(prompts), "graph A again": 1}.items():
        logits = [step(session, prompts[:count], 0).copy() for _ in range(STEPS)]
        found[name] = largest(worst(each, first.setdefault(count, logits[0])) for each in logits)
    return found


def fed(session: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Put each prompt but its last token into its row."""
    session.cache.reserve(len(prompts), max(map(len, prompts)) + 1)
    for row, ids in enumerate(prompts):
        indices = np.zeros((1, 0), np.int64)
        session.run(Batch(Phase.PREFILL, np.array([ids[:-1]], np.int64), np.zeros(1, np.int64), indices, row))


def step(session: Any, prompts: Sequence[Sequence[int]], row: int) -> Float:
    """Feed the last token of each prompt into the rows from ``row`` on; logits [B, 1, V]."""
    ids = np.array([[prompt[-1]] for prompt in prompts], np.int64)
    past = np.array([len(prompt) - 1 for prompt in prompts], np.int64)
    found: Float = session.run(Batch(Phase.DECODE, ids, past, np.zeros((len(prompts), 1), np.int64), row))
    return found


def tokens(model: Any, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Greedy answers: how many prompts have the same twice alone, and the same in a batch as alone."""
    options: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    first, second = ([model.generate(ids, **options).token_ids for ids in prompts] for _ in range(2))
    handles = [model.submit(model.request(ids, **options)) for ids in prompts]
    batched = [handle.result().token_ids for handle in handles]
    again, together = (sum(a == b for a, b in zip(first, other, strict=True)) for other in (second, batched))
    return {"prompts": len(prompts), "equal_again": again, "equal_in_batch": together}
