"""Measure llmc's bundles and llama.cpp's quantizations against the same reference logits, and print quality per bit.

All see the same windows of tokens, prefill in one go and decode token by token. The reference is transformers in
float32, which belongs to neither side. llama.cpp's float16 file must agree with it, so a difference is one of
quantization and not of conversion.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import onnx_ir as ir
import torch
from machine import Disturbance, publish, table
from numpy.typing import NDArray
from peers import run_script
from transformers import AutoModelForCausalLM

from llmc.bundle import PhaseQuality
from llmc.errors import LlmcError
from llmc.optimize.judge.quality import Tally
from llmc.runtime import load
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.sessions import Phase
from llmc.runtime.text.tokenizer import Tokenizer

SCHEMES = ("q4_0_pure", "q4_0", "q4_k_m", "q8_0")
BASELINE = "llama.cpp q4_0_pure"
# Weights, activations and cache in float16 (measured: 8e-7 on the small model, 9e-6 on random ones); Q8_0 makes 2e-4.
CONVERTED_KL = 5e-5
# Readers of values that are no matrix: norm weights and rotary tables are not quantized by anyone.
VECTOR_READERS = ("Normalization", "Attention", "RotaryEmbedding")


@dataclass(frozen=True)
class Measured:
    """A system on one path: bits per weight of all matrices that it uses, scales included; its quality, and the mean KL
    of each window in nats."""

    system: str
    phase: Phase
    bits: float
    quality: PhaseQuality
    kl: NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """The text and its reference logits, float32 [windows, length, V]; files go to ``folder``."""

    windows: NDArray[np.int64]
    reference: NDArray[np.float32]
    matrix_weights: int
    folder: Path

    def measure_logits(self, system: str, phase: Phase, bits: float, logits: Iterable[NDArray[np.float32]]) -> Measured:
        """Compare a system's logits [length, V] of each window.

        A window's first token has nothing before it, and the logits after its last one predict nothing in it.
        """
        tally = Tally()
        for wanted, found, tokens in zip(self.reference, logits, self.windows, strict=True):
            if found.shape != wanted.shape or not np.isfinite(found).all():
                raise ValueError(f"{system}: logits {found.shape} are not finite ones of {wanted.shape}")
            tally.compare(wanted[:-1], found[:-1])
            tally.predict(found[:-1], tokens[1:])
        kl = tally.kl.reshape(len(self.windows), -1).mean(axis=1)
        return Measured(system, phase, bits, tally.quality, kl)


def make_task(args: argparse.Namespace, folder: Path) -> Task:
    """The first windows of the text without overlap, and transformers' logits of them."""
    text = args.text.read_text(encoding="utf-8")
    ids = Tokenizer.from_folder(args.checkpoint).encode(text, add_special_tokens=False)
    if len(ids) < (needed := args.windows * args.length):
        raise ValueError(f"{args.text} has {len(ids)} tokens, {needed} are needed; ask for fewer windows")
    windows = np.array(ids[:needed], np.int64).reshape(args.windows, args.length)
    np.save(folder / "windows.npy", windows)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32, local_files_only=True)
    shape = (*windows.shape, model.config.vocab_size)
    reference = np.lib.format.open_memmap(folder / "reference.npy", "w+", np.float32, shape)
    with torch.inference_mode():
        for row, tokens in zip(reference, windows, strict=True):
            row[:] = model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)  # a tied head once
    return Task(windows, reference, weights, folder)


def graph_bits(graph: Path, matrix_weights: int) -> float:
    """Bits per weight of a lowered graph: all its stored values but vectors. What two nodes share counts once."""
    sizes: dict[Any, int] = {}
    for value in ir.load(graph).graph.initializers.values():
        readers = [node.op_type for node, _ in value.uses()]
        if value.const_value is None or all(reader.endswith(VECTOR_READERS) for reader in readers):
            continue
        tensor = value.const_value
        place = (tensor.location, tensor.offset) if isinstance(tensor, ir.ExternalTensor) else value.name
        sizes[place] = max(sizes.get(place, 0), tensor.nbytes)
    return 8 * sum(sizes.values()) / matrix_weights


def bundles(folders: Sequence[Path], task: Task) -> Iterator[Measured]:
    for folder in folders:
        with load(folder) as model:
            for phase in Phase:
                # A machine that cannot run one graph runs the decode graph for both.
                used = Phase.DECODE if model.runner.session.substitutes else phase
                bits = graph_bits(folder / model.manifest.graphs[used.value].file, task.matrix_weights)
                logits = (model.runner.logits(tokens.tolist(), phase) for tokens in task.windows)
                yield task.measure_logits(f"llmc {folder.name}", phase, bits, logits)


def llamacpp(python: Path, checkpoint: Path, task: Task) -> Iterator[Measured]:
    """Quantize the checkpoint in llama.cpp's interpreter, and run both paths of each scheme there."""
    schemes, output = ("f16", *SCHEMES), task.folder / "logits.npy"
    run_script(python, "convert_gguf.py", checkpoint, task.folder / "model", *schemes)
    for scheme in schemes:
        for phase in Phase:
            model = task.folder / f"model-{scheme}.gguf"
            work = (model, task.folder / "windows.npy", output, phase.value, usable_threads())
            said = json.loads(run_script(python, "llamacpp_logits.py", *work))
            logits = np.load(output, mmap_mode="r")
            found = task.measure_logits(f"llama.cpp {scheme}", phase, said["bits_per_weight"], logits)
            same = said["matrix_weights"] == task.matrix_weights
            if not same or (scheme == "f16" and not found.quality.mean_kl <= CONVERTED_KL):
                raise RuntimeError(f"{model.name} computes another model than the checkpoint; nothing can be compared")
            yield found


def ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[float, float]:
    """Mean KL of ``ours`` over that of ``theirs``, and the standard error of that ratio, from means of windows.

    Both saw the same windows, so the error is that of paired means, whose positions are not independent (the ratio
    estimator of survey sampling: Cochran, Sampling Techniques, 1977, section 6.4).
    """
    value = ours.mean() / theirs.mean()
    error = np.std(ours - value * theirs, ddof=1) / np.sqrt(len(ours)) / theirs.mean() if len(ours) > 1 else np.nan
    return float(value), float(error)


def lines(measured: Sequence[Measured]) -> Iterator[tuple[str, ...]]:
    base = {found.phase: found.kl for found in measured if found.system == BASELINE}
    yield "system", "path", "bits per weight", "mean KL", "p99 KL", "top-1", "perplexity", f"KL / {BASELINE}"
    for found in measured:
        quality = found.quality
        kl = (f"{found.bits:.3f}", f"{quality.mean_kl:.5f}", f"{quality.p99_kl:.4f}")
        share = "{:.3f} ± {:.3f}".format(*ratio(found.kl, base[found.phase])) if base else ""
        yield found.system, found.phase.value, *kl, f"{quality.top1_agreement:.1%}", f"{quality.perplexity:.3f}", share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*", help="bundles built from the checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True, help="what everything was made from")
    parser.add_argument("--text", type=Path, required=True, help="text that nobody was trained or calibrated on")
    parser.add_argument("--windows", type=int, default=24, help="number of windows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--llamacpp-python", type=Path, help="interpreter that has llama-cpp-python")
    parser.add_argument("--json", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    disturbance = Disturbance()
    try:
        with tempfile.TemporaryDirectory() as folder:
            task = make_task(args, Path(folder))
            measured = list(llamacpp(args.llamacpp_python, args.checkpoint, task)) if args.llamacpp_python else []
            measured += bundles(args.bundles, task)
    except (LlmcError, OSError, RuntimeError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    head, *rows = lines(measured)
    publish(args.json, disturbance.cpus(), [table(head, *rows)], windows=args.windows, length=args.length, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
