"""Count the rows of a head that a cheap first stage cannot rule out, on a model's own hidden states.

    python head_bounds.py FOLDER      # where recipes/smollm2/fetch.py puts the model, which it fetches if need be

An exact two-stage head reads few bits of every row, bounds each logit from both sides, and reads exactly only the rows
whose upper bound reaches the k-th largest lower bound. Bounds are proofs, by the inequality of Cauchy and Schwarz: of
the error of b-bit weights as a whole, of that in blocks of 32, and of what lies outside of the first principal
directions of the hidden states. Beside them, as the best that any bound could hope for, four standard deviations of the
true error, which prove nothing.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from machine import table
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from smollm2.fetch import fetch
from smollm2.real import transformers_model
from transformers import AutoTokenizer

from llmc.optimize.calibrate.text import held_out_text

WINDOW, TRAINED_ON, JUDGED_ON = 256, 512, 256  # tokens: of a window, for the principal directions, for the counts
BLOCK = 32
Floats = NDArray[np.float32]


@torch.inference_mode()
def states_and_head(folder: Path) -> tuple[Floats, Floats]:
    """Hidden states [T, H] that the head multiplies, of English text, and the head [V, H]."""
    path = fetch(folder)
    model = transformers_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = torch.tensor(tokenizer(held_out_text())["input_ids"][: TRAINED_ON + JUDGED_ON])
    windows = [model.model(part[None]).last_hidden_state[0] for part in tokens.split(WINDOW)]
    return torch.cat(windows).numpy(), model.lm_head.weight.detach().numpy()


def rounded(head: Floats, bits: int) -> Floats:
    """The head in so many bits, with a scale and a minimum for each block of 32 weights."""
    blocks = head.reshape(len(head), -1, BLOCK)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scale = np.maximum((high - low) / (2**bits - 1), np.float32(1e-12))
    return (np.round((blocks - low) / scale) * scale + low).reshape(head.shape)


def survivors(approximate: Floats, error: Floats, k: int) -> tuple[float, float]:
    """Median and 90th percentile of the share of rows that may be among the ``k`` largest logits [T, V]."""
    least = np.partition(approximate - error, -k, axis=1)[:, -k]
    share = (approximate + error >= least[:, None]).mean(axis=1)
    return float(np.median(share)), float(np.quantile(share, 0.9))


def stages(seen: Floats, states: Floats, head: Floats) -> Iterator[tuple[str, float, Floats, Floats]]:
    """First stages: name, share of the bytes of an 8-bit head, approximate logits and bounds of their error [T, V]."""
    exact, norms = states @ head.T, np.linalg.norm(states, axis=1, keepdims=True)
    in_blocks = np.linalg.norm(states.reshape(len(states), -1, BLOCK), axis=2)
    for bits in (2, 3, 4):
        cheap = rounded(head, bits)
        approximate, error = states @ cheap.T, head - cheap
        yield f"{bits} bits", bits / 8, approximate, norms * np.linalg.norm(error, axis=1)
        by_block = np.linalg.norm(error.reshape(len(head), -1, BLOCK), axis=2)
        yield f"{bits} bits, bounds by blocks", bits / 8, approximate, in_blocks @ by_block.T
        sigma = (exact - approximate).std(axis=1, keepdims=True)
        yield f"{bits} bits, 4 sigma (no proof)", bits / 8, approximate, np.broadcast_to(4 * sigma, exact.shape)
    directions = np.linalg.svd(seen)[2]
    turned, rows = states @ directions.T, head @ directions.T
    for share in (0.25, 0.5):
        kept = int(share * head.shape[1])
        outside = np.linalg.norm(turned[:, kept:], axis=1, keepdims=True) * np.linalg.norm(rows[:, kept:], axis=1)
        yield f"first {kept} directions of {head.shape[1]}", share, turned[:, :kept] @ rows[:, :kept].T, outside


def main() -> None:
    """Print the table."""
    states, head = states_and_head(Path(sys.argv[1]))
    lines = []
    for name, share, approximate, error in stages(states[:TRAINED_ON], states[TRAINED_ON:], head):
        counts = [f"{value:.1%}" for k in (1, 50) for value in survivors(approximate, error, k)]
        lines.append((name, f"{share:.2f}", *counts))
    print(table(("rows left by a first stage", "bytes", "greedy", "p90", "top-k 50", "p90"), *lines))


if __name__ == "__main__":
    main()
