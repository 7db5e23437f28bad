"""What the unquantized model says, on the CPU and in float32: by transformers, and by the portable graph."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check import models
from gpu_check.steps import NotHereError, Options

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
# The last positions of each prompt are compared: logits of all would be gigabytes.
POSITIONS = 24
# Of the two references: both add in float32, in another order. Planted in a test: a scaled norm is 0.1 and more.
SAME_MODEL = 1e-3


def reference(geometry: str, options: Options) -> dict[str, Any]:
    """Write the reference's cases, by transformers where it is installed; and how far apart both references are."""
    from llmc.errors import MissingExtraError

    folder, found, missing = models.export(geometry, options), {}, []
    prompts = prompts_of(folder)
    for way in (by_transformers, by_portable_graph):
        try:
            found[way.__name__] = way(folder, prompts)
        except (ImportError, MissingExtraError) as error:
            missing.append(f"{way.__name__}: {error}")
    if not found:
        raise NotHereError("; ".join(missing))
    source, logits = next(iter(found.items()))
    save(list(zip(prompts, logits, strict=True)), options.work / f"{geometry}.npz")
    apart = None if missing else max(worst(a, b) for a, b in zip(*found.values(), strict=True))
    return {"source": source, "missing": missing, "difference_of_both": apart, "problems": problems(apart)}


def problems(apart: float | None) -> list[str]:
    """What is wrong with two references that are ``apart``; nothing where there is one alone."""
    if apart is None or apart <= SAME_MODEL:
        return []
    return [f"the portable graph differs from transformers by {apart:.3g}, at most {SAME_MODEL} is expected"]


def prompts_of(folder: Path) -> list[list[int]]:
    """Token ids of all prompts."""
    from llmc.bundle import read_export
    from llmc.runtime.text.tokenizer import Tokenizer

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


def save(cases: Sequence[Case], path: Path) -> None:
    """Write the cases, in one piece."""
    part = path.with_suffix(".part.npz")
    names = ("ids", "logits")
    np.savez(part, **{f"{names[j]}.{i}": np.array(case[j]) for i, case in enumerate(cases) for j in (0, 1)})  # type: ignore[arg-type]
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
