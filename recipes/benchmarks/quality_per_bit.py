"""Measure llmc's bundles and llama.cpp's quantizations against the same reference logits, and print quality per bit.

All see the same windows of tokens, prefill in one go and decode token by token. The reference is transformers in
float32. Before anything is compared, llmc's own reference and llama.cpp's float16 file must agree with it: so a
difference is one of quantization and not of conversion.
"""

import argparse
import collections
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import onnx_ir as ir
import torch
from machine import provenance
from machine import table as markdown
from numpy.typing import NDArray
from peers import run_script
from scores import Score, ratio, score
from torch import nn
from transformers import AutoModelForCausalLM

from llmc.errors import LlmcError
from llmc.export import export
from llmc.optimize.judge.reference import Reference
from llmc.runtime import load
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.sessions import Phase
from llmc.runtime.text.tokenizer import Tokenizer

SCHEMES = ("q4_0_pure", "q4_0", "q4_k_m", "q8_0")
UNWEIGHED = ("f16", "q8_0")  # schemes for which llama.cpp takes no heed of importances
BASELINE = "q4_0_pure"
# Two float32 implementations differ by rounding (measured: 1e-11); a wrong rotation, norm or mask makes 1e-2 and more.
SAME_KL = 1e-7
# Weights, activations and cache in float16 (measured: 8e-7 on the small model, 9e-6 on random ones); Q8_0 makes 2e-4.
CONVERTED_KL = 5e-5
# Readers of values that are no matrix: norm weights and rotary tables are not quantized by anyone.
VECTOR_READERS = ("Normalization", "Attention", "RotaryEmbedding")


@dataclass(frozen=True)
class Measured:
    """A system's score on one path. ``bits``: per weight of all matrices that this path uses, scales included."""

    system: str
    phase: Phase
    bits: float
    detail: str
    score: Score


@dataclass(frozen=True)
class Task:
    """The text and reference of all systems; ``reference`` is float32 [windows, length, V], files go to ``folder``."""

    windows: NDArray[np.int64]
    reference: NDArray[np.float32]
    matrix_weights: int
    folder: Path

    def score(self, candidate: Any) -> Score:
        """Compare a system's logits of all windows."""
        return score(self.reference, candidate, self.windows)


class Unquantized:
    """The checkpoint as transformers computes it in float32 on the CPU.

    It belongs to neither side, so neither is measured against itself.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)

    @property
    def matrix_weights(self) -> int:
        """Number of weights in matrices, a tied head counted once."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.ndim > 1)

    @torch.inference_mode()
    def logits(self, windows: NDArray[np.int64], path: Path) -> NDArray[np.float32]:
        """Write the logits of every window into a .npy file and map it: float32 [windows, length, V]."""
        output = np.lib.format.open_memmap(path, "w+", np.float32, (*windows.shape, self._model.config.vocab_size))
        for row, tokens in zip(output, windows, strict=True):
            row[:] = self._model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()
        output.flush()
        return output

    @torch.inference_mode()
    def importance(self, windows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """Mean square of each input of each decoder linear, by weight name: what ``llama-imatrix`` collects.

        As there, embedding and head are left out.
        """
        sums: dict[str, Any] = collections.defaultdict(float)

        def add(name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            sums[name] += inputs[0].double().square().flatten(0, -2).sum(dim=0)

        linears = {name: m for name, m in self._model.model.named_modules() if isinstance(m, nn.Linear)}
        hooks = [m.register_forward_pre_hook(partial(add, f"model.{name}.weight")) for name, m in linears.items()]
        for tokens in windows:
            self._model(input_ids=torch.from_numpy(tokens[None]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {name: (total / windows.size).float().numpy() for name, total in sums.items()}


def read_windows(tokenizer: Tokenizer, text: Path, count: int, length: int) -> NDArray[np.int64]:
    """The first ``count`` windows of a text, one after the other: int64 [count, length].

    Raises:
        ValueError: the text is too short.
    """
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) < count * length:
        raise ValueError(
            f"{text} has {len(ids)} tokens, {count} windows of {length} need {count * length}; ask for fewer windows"
        )
    return np.array(ids[: count * length], np.int64).reshape(count, length)


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
    """Run both paths of each bundle."""
    for folder in folders:
        with load(folder) as model:
            recipe = model.manifest.recipe
            for phase in Phase:
                # A machine that cannot run one graph runs the decode graph for both.
                used = Phase.DECODE if model.runner.session.substitutes else phase
                bits = graph_bits(folder / model.manifest.graphs[used.value].file, task.matrix_weights)
                logits = (model.runner.logits(tokens.tolist(), phase) for tokens in task.windows)
                detail = f"{recipe.precision} {recipe.scheme}, block {recipe.block_size}, head {recipe.head}"
                yield Measured(f"llmc {folder.name}", phase, bits, detail, task.score(logits))


def llamacpp(
    python: Path, checkpoint: Path, schemes: Iterable[str], task: Task, importance: Path | None = None
) -> Iterator[Measured]:
    """Quantize the checkpoint in llama.cpp's interpreter, and run both paths of each scheme there.

    ``importance`` is a .npz file of mean squares of inputs.

    Raises:
        RuntimeError: a script failed, or the file has more or fewer weights than the checkpoint.
    """
    options, suffix = (["--importance", importance], " + imatrix") if importance else ([], "")
    schemes, output = list(schemes), task.folder / "logits.npy"
    run_script(python, "convert_gguf.py", checkpoint, task.folder / "model", *schemes, *options)
    for scheme in schemes:
        model = task.folder / f"model-{scheme}.gguf"
        for phase in Phase:
            work = (model, task.folder / "windows.npy", output, phase.value, usable_threads())
            found = json.loads(run_script(python, "llamacpp_logits.py", *work))
            if found["matrix_weights"] != task.matrix_weights:
                raise RuntimeError(
                    f"{model.name} has {found['matrix_weights']} weights in matrices, the checkpoint "
                    f"{task.matrix_weights}; convert_gguf.py lost or doubled a tensor"
                )
            scored = task.score(np.load(output, mmap_mode="r"))
            yield Measured(f"llama.cpp {scheme}{suffix}", phase, found["bits_per_weight"], found["detail"], scored)


def check(name: str, found: Score, highest: float) -> float:
    """The mean KL of something that must agree with the reference.

    Raises:
        RuntimeError: it does not.
    """
    mean_kl = float(found.kl.mean())
    if not mean_kl <= highest:
        raise RuntimeError(
            f"{name} has a mean KL of {mean_kl:.2e} to transformers, expected at most {highest:.0e}: "
            "it computes another model, so nothing can be compared"
        )
    return mean_kl


def own_reference(checkpoint: Path, task: Task) -> float:
    """Mean KL of llmc's layer-by-layer reference, which builds are judged by."""
    exported = export(checkpoint, task.folder / "export").output
    logits = Reference(exported).logits([tokens.tolist() for tokens in task.windows])
    return check("llmc's reference", task.score(logits), SAME_KL)


def peers(args: argparse.Namespace, unquantized: Unquantized, task: Task, checks: dict[str, float]) -> list[Measured]:
    """llama.cpp's schemes, its float16 file checked first; with a calibration text once more with importances."""
    if args.llamacpp_python is None:
        return []
    peer = args.llamacpp_python, args.checkpoint
    for found in llamacpp(*peer, ["f16"], task):
        name = f"llama.cpp f16, {found.phase.value}"
        checks[name] = check(name, found.score, CONVERTED_KL)
    measured = list(llamacpp(*peer, args.schemes, task))
    if args.calibration:
        tokenizer = Tokenizer.from_folder(args.checkpoint)
        windows = read_windows(tokenizer, args.calibration, args.calibration_windows, args.length)
        path = task.folder / "importance.npz"
        np.savez(path, **unquantized.importance(windows))
        measured += llamacpp(*peer, (scheme for scheme in args.schemes if scheme not in UNWEIGHED), task, path)
    return measured


def rows(measured: Sequence[Measured], baseline: str) -> list[dict[str, Any]]:
    """Figures of each system and path for the JSON file.

    ``ratio`` is the mean KL over the baseline's on the same path, ``ratio_error`` its standard error.
    """
    base = {found.phase: found.score for found in measured if found.system == baseline}
    rows = []
    for found in measured:
        share = ratio(found.score, base[found.phase]) if found.phase in base else (None, None)
        names = {"system": found.system, "phase": found.phase.value, "bits": round(found.bits, 3)}
        figures = {**asdict(found.score.quality), "ratio": share[0], "ratio_error": share[1]}
        rows.append({**names, "detail": found.detail, **figures})
    return rows


def table(results: dict[str, Any], baseline: str) -> str:
    """Markdown."""
    head = (
        "system",
        "path",
        "bits per weight",
        "mean KL",
        "p99 KL",
        "top-1",
        "perplexity",
        f"KL / {baseline}",
        "weights",
    )
    lines = []
    for row in results["rows"]:
        share = "" if row["ratio"] is None else f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        kl = (f"{row['bits']:.3f}", f"{row['mean_kl']:.5f}", f"{row['p99_kl']:.4f}")
        others = (f"{row['top1_agreement']:.1%}", f"{row['perplexity']:.3f}", share, row["detail"])
        lines.append((row["system"], row["phase"], *kl, *others))
    checks = ", ".join(f"{name} {kl:.1e}" for name, kl in results["checks"].items())
    windows, length = results["windows"], results["length"]
    return markdown(head, *lines) + (
        f"\n\n{windows * (length - 1)} positions ({windows} windows of {length} tokens), KL in nats. "
        f"Perplexity of the reference: {results['reference_perplexity']:.3f}. "
        f"Mean KL of what must agree with it: {checks}."
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; what is written to the JSON file. ``checks``: mean KL of what must agree with the reference.

    Raises:
        ValueError: the text is too short.
        RuntimeError: a system failed, or computes another model.
    """
    tokenizer = Tokenizer.from_folder(args.checkpoint)
    windows = read_windows(tokenizer, args.text, args.windows, args.length)
    np.save(folder / "windows.npy", windows)
    unquantized = Unquantized(args.checkpoint)
    reference = unquantized.logits(windows, folder / "reference.npy")
    task = Task(windows, reference, unquantized.matrix_weights, folder)
    checks = {"llmc's reference": own_reference(args.checkpoint, task)}
    measured = [*peers(args, unquantized, task, checks), *bundles(args.bundles, task)]
    packages = ("llmc-deploy", "onnxruntime", "transformers", "torch")
    return {
        **provenance(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "windows": args.windows,
        "length": args.length,
        "tokens_sha256": hashlib.sha256(windows.tobytes()).hexdigest(),
        "reference_perplexity": task.score(reference).quality.perplexity,
        "checks": checks,
        "rows": rows(measured, f"llama.cpp {BASELINE}"),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*", help="bundles built from the checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True, help="what everything was made from")
    parser.add_argument("--text", type=Path, required=True, help="text that nobody was trained or calibrated on")
    parser.add_argument("--windows", type=int, default=24, help="number of windows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--llamacpp-python", type=Path, help="interpreter that has llama-cpp-python")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, help="default: all")
    parser.add_argument("--calibration", type=Path, help="text to weigh llama.cpp's rounding by, as llama-imatrix does")
    parser.add_argument("--calibration-windows", type=int, default=128, help="number of windows of that text")
    parser.add_argument("--json", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    if min(args.windows, args.calibration_windows) < 1 or args.length < 2:
        parser.error("windows must be at least 1, their length at least 2")
    if not args.bundles and args.llamacpp_python is None:
        parser.error("nothing to measure; name bundles, or llama.cpp's interpreter with --llamacpp-python")
    return args


def main() -> int:
    """Measure, write the JSON file and print the table; 1 if something failed."""
    args = _parse()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(args, Path(folder))
    except (LlmcError, OSError, RuntimeError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results, BASELINE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
