"""KL divergence of every system from one reference: transformers in float32, which belongs to none of them.

All see the same windows of tokens, each fed at once (prefill) and token by token (decode).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from runners import PHASES

from llmc.optimize.calibrate.text import read_samples
from llmc.optimize.judge.quality import Tally

ALL_WINDOWS = 1 << 30
Figures = dict[str, float]


@dataclass(frozen=True)
class Quality:
    """Model and text that quality is measured with.

    Attributes:
        checkpoint: Hugging Face folder that every system's quality model was made from.
        text: that nobody was trained or calibrated on; empty for the part of llmc's own that calibration does not see.
    """

    checkpoint: str
    text: str


class Task:
    """The first windows of the text without overlap, and transformers' logits of them, in ``folder``."""

    def __init__(self, quality: Quality, args: argparse.Namespace, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        base, self.folder = args.systems.parent, folder
        checkpoint, text = base / quality.checkpoint, base / quality.text if quality.text else None
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
        vocabulary = model.config.vocab_size
        chosen = {"samples": ALL_WINDOWS, "length": args.length, "vocab_size": vocabulary, "held_out": True}
        self.windows: NDArray[np.int64] = read_samples(text, checkpoint, **chosen).ids[: args.windows]
        np.save(folder / "windows.npy", self.windows)
        shape = (*self.windows.shape, vocabulary)
        self._reference = np.lib.format.open_memmap(folder / "reference.npy", "w+", np.float32, shape)
        with torch.inference_mode():
            for row, tokens in zip(self._reference, self.windows, strict=True):
                row[:] = model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]  # a tied head once
        self._weights = sum(matrix.numel() for matrix in matrices)

    def measure(self, run: Callable[..., str]) -> dict[str, Figures]:
        """Bits per weight, KL in nats and so on by phase, of a system that ``run`` lets write its logits.
        Raises RuntimeError: its logits are not those of this model."""
        sizes = json.loads(run("--logits", self.folder))
        return {phase: {"bits": 8 * sizes[phase] / self._weights, **self._compare(phase)} for phase in PHASES}

    def _compare(self, phase: str) -> Figures:
        """A window's first token has nothing before it, and the logits after its last one predict nothing in it."""
        tally, found = Tally(), np.load(self.folder / f"{phase}.npy", mmap_mode="r")
        if found.shape != self._reference.shape or not np.isfinite(found).all():
            raise RuntimeError(f"logits {found.shape} of {phase} are not finite ones of {self._reference.shape}")
        for wanted, logits, tokens in zip(self._reference, found, self.windows, strict=True):
            tally.compare(wanted[:-1], logits[:-1])
            tally.predict(logits[:-1], tokens[1:])
        return asdict(tally.quality)
