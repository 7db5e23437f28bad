"""What the unquantized model says, on the CPU and in float32: by transformers, and by the portable graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check.machine import need
from gpu_check.work import NotHereError
from llmc.errors import MissingExtraError

Float = NDArray[np.float32]

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
# And one of arbitrary tokens that is longer than a chunk of prefill and than the smallest buckets of the cache.
LONG_PROMPT = 320
# The last positions of each prompt are compared: logits of all would be gigabytes.
POSITIONS = 24
NEW_TOKENS = 16
# Of the two references: both add in float32, in another order. Planted in a test: a scaled norm is 0.1 and more.
SAME_MODEL = 1e-3


@dataclass(frozen=True)
class Case:
    """A prompt, the reference's logits after its last tokens [n, V], and its greedy tokens with their leads.

    Without transformers there are no greedy tokens.
    """

    ids: list[int]
    logits: Float
    tokens: list[int]
    leads: list[float]


def reference(export: str, output: str) -> dict[str, Any]:
    """Write the reference's cases to ``output`` (npz), by transformers where it is installed.

    Raises:
        NotHereError: neither transformers nor what runs the portable graph is installed.
    """
    folder = Path(export)
    prompts = prompts_of(folder)
    ways = {"transformers": by_transformers, "the portable graph": by_portable_graph}
    found: dict[str, list[Case]] = {}
    missing = []
    for name, way in ways.items():
        try:
            found[name] = way(folder, prompts)
        except (ImportError, MissingExtraError, NotHereError) as error:
            missing.append(f"{name}: {error}")
    if not found:
        raise NotHereError("; ".join(missing))
    source, cases = next(iter(found.items()))
    save(cases, Path(output))
    apart = difference(*found.values()) if len(found) == len(ways) else None
    return {
        "source": source,
        "missing": missing,
        "prompts": [len(ids) for ids in prompts],
        "positions": POSITIONS,
        "difference_of_both": apart,
        "problems": problems(apart),
    }


def difference(first: Sequence[Case], second: Sequence[Case]) -> float:
    """The largest relative difference of the logits of the same prompts; NaN where something is not finite."""
    return float(np.max([worst(a.logits, b.logits) for a, b in zip(first, second, strict=True)]))


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
    length = min(LONG_PROMPT, geometry.max_positions - NEW_TOKENS)
    return [*(ids for ids in texts if ids), arbitrary(length, geometry.vocab_size)]


def arbitrary(length: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Token ids without meaning; another first one for another ``salt``."""
    found: list[int] = np.random.default_rng(salt).integers(10, min(vocab_size, 4000), length).tolist()
    return found


def by_transformers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Case]:
    """The cases by transformers in float32, read from the export's own weights."""
    need("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as many tokens as asked for
    cases = []
    with torch.inference_mode():
        for ids in prompts:
            batch = torch.tensor([ids])
            logits = model(batch, logits_to_keep=POSITIONS).logits[0].numpy()
            tokens, leads = greedy(model, batch)
            cases.append(Case(list(ids), logits, tokens, leads))
    return cases


def greedy(model: Any, batch: Any) -> tuple[list[int], list[float]]:
    """New tokens of transformers, and how far each leads the second choice."""
    import torch

    answer = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    two = torch.stack(answer.logits)[:, 0].topk(2).values
    return answer.sequences[0, batch.shape[1] :].tolist(), (two[:, 0] - two[:, 1]).tolist()


def by_portable_graph(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Case]:
    """The cases by the exported graph in ONNX Runtime; without greedy tokens."""
    from llmc.optimize.judge.reference import Reference

    model = Reference(folder)
    states = model.normed(prompts)
    return [
        Case(list(ids), model.project(rows[-POSITIONS:]), [], []) for ids, rows in zip(prompts, states, strict=True)
    ]


def save(cases: Sequence[Case], path: Path) -> None:
    """Write the cases."""
    arrays: dict[str, Any] = {}
    for i, case in enumerate(cases):
        arrays |= {f"{name}.{i}": np.array(value) for name, value in vars(case).items()}
    np.savez(path, **arrays)


def read(path: Path) -> list[Case]:
    """The cases that :func:`save` wrote."""
    with np.load(path) as file:
        count = sum(name.startswith("ids.") for name in file.files)
        return [
            Case(
                file[f"ids.{i}"].tolist(),
                file[f"logits.{i}"],
                file[f"tokens.{i}"].astype(int).tolist(),
                file[f"leads.{i}"].tolist(),
            )
            for i in range(count)
        ]


def worst(found: Float, wanted: Float) -> float:
    """The largest relative difference of any position, see :func:`relative`; NaN where something is not finite."""
    return float(relative(found, wanted).max())


def relative(found: Float, wanted: Float) -> NDArray[np.float64]:
    """Root mean square of the differences over the deviation of the wanted logits, for each position [n].

    Both are centred first, for a constant that is added to all logits means nothing.
    """
    x, y = (np.asarray(a, np.float64) - np.asarray(a, np.float64).mean(axis=-1, keepdims=True) for a in (found, wanted))
    distance: NDArray[np.float64] = np.sqrt(((x - y) ** 2).mean(axis=-1) / (y**2).mean(axis=-1))
    return distance
