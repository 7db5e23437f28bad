"""Make the kit's bundles on a machine with torch: tiny ones with golden logits, and large graphs without weights.

Weights are random and nothing is judged: a build with its gate is an item of the kit. Golden logits come from the same
graph on the CPU, so a GPU differs only by rounding.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import onnx
from tokenizers import Tokenizer, models, pre_tokenizers
from weights import BLOCK, SPEC, WEIGHTS, random_values

from llmc.bundle import Manifest, read_bundle, write_manifest
from llmc.export import export
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from make_model import GEOMETRIES, write_checkpoint

# Weights are large enough for attention to focus on few positions: then a wrong rope, mask or window shows.
BASE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "initializer_range": 0.15,
}
GROUP_OF_7 = {"model_type": "qwen2", "hidden_size": 448, "num_attention_heads": 7}  # with biases, as Qwen2.5
GROUP_OF_3 = {"hidden_size": 192, "num_attention_heads": 3}  # as SmolLM2
GEMMA = {
    "model_type": "gemma2",
    "num_attention_heads": 2,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
PARTIAL = {
    "model_type": "phi3",
    **GROUP_OF_3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "pad_token_id": 0,
}
# Differences from BASE, precision, longest context.
TINY: dict[str, tuple[dict[str, Any], str, int]] = {
    "llama-g4-fp16": ({}, "fp16", 1024),
    "llama-g4-int8": ({}, "int8", 1024),
    "llama-g4-int4": ({}, "int4", 1024),
    "qwen2.5-g7-int8": (GROUP_OF_7, "int8", 1024),
    "smollm-g3-int4": (GROUP_OF_3, "int4", 1024),
    "qwen3-norms-fp16": ({"model_type": "qwen3", "num_attention_heads": 2, "head_dim": 128}, "fp16", 1024),
    "gemma2-window-fp16": (GEMMA, "fp16", 1024),
    "phi3-partial-int8": (PARTIAL, "int8", 1024),
    "llama-untied-int4": ({"tie_word_embeddings": False}, "int4", 1024),
    "llama-long-fp16": ({}, "fp16", 2048),
}
SPEED = {"1b": "llama-3.2-1b", "0.5b": "qwen2.5-0.5b"}
PRECISIONS = ("fp16", "int8", "int4")
CONTEXT, ROWS = 4096, 8  # CONTEXT is for the speed bundles, ROWS for all
STEPS = 32  # golden steps; the prompt leaves room for them
EXPORT = "llama-g4-fp16"  # the tiny model whose export is part of the kit


def make_tiny(output: Path, name: str, exports: Path | None = None) -> None:
    """Build one tiny bundle and its golden logits in ``output/name``; its export goes to ``exports``, if given."""
    geometry, precision, context = TINY[name]
    with TemporaryDirectory(dir=output) as work:
        tokenizer = write_tokenizer(Path(work) / "tokenizer")
        write_checkpoint({**BASE, **geometry}, Path(work) / "checkpoint", tokenizer)
        made = export(Path(work) / "checkpoint", exports or Path(work) / "export", force=True).output
        build_unjudged(made, output / name, precision, context)
        if exports:  # the export's weights are links to the checkpoint's
            shutil.copytree(made, f"{made}.copy", copy_function=shutil.copyfile)
            shutil.rmtree(made)
            Path(f"{made}.copy").rename(made)
    write_golden(output / name, context)


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token per byte, so that a bundle is small."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<|endoftext|>", "<|unknown|>", "<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def build_unjudged(source: Path, output: Path, precision: str, context: int) -> None:
    """Build for the target ``cuda``, and publish without running the result."""
    builder = importlib.import_module("llmc.optimize.build")

    def publish(order: Any, folder: Path, manifest: Manifest, weights: Any) -> Manifest:
        write_manifest(manifest, folder)
        return manifest

    with mock.patch.object(builder, "judge_decoder", publish):
        limits = {"max_context": context, "max_batch": ROWS}
        builder.build(BuildRequest(source, output, target="cuda", precision=precision, force=True, **limits))


def write_golden(bundle: Path, context: int, steps: int = STEPS) -> None:
    """Record the CPU's logits after a random prompt, which nearly fills the context, and after each further step."""
    ids = np.random.default_rng(0).integers(3, read_bundle(bundle).geometry.vocab_size, context - 1)
    prompt = len(ids) - steps
    with load(bundle, emulate=True, self_test=False, prefix_cache_bytes=0) as model:
        rows = [model.runner.prefill(ids[:prompt].tolist())[0, 0].copy()]
        rows += [model.runner.step(int(ids[position]), position)[0, 0].copy() for position in range(prompt, len(ids))]
    np.savez(bundle.with_name(f"{bundle.name}.npz"), ids=ids, logits=np.stack(rows))


def make_speed(output: Path, model: str) -> None:
    """Build a large model in every precision, and keep only the graphs."""
    with TemporaryDirectory(dir=output) as work:
        write_checkpoint(GEOMETRIES[SPEED[model]], Path(work) / "checkpoint")
        write_tokenizer(Path(work) / "checkpoint")  # one with 150,000 tokens would be most of the kit's size
        made = export(Path(work) / "checkpoint", Path(work) / "export").output
        shutil.rmtree(Path(work) / "checkpoint")  # the export has links to its weights
        for precision in PRECISIONS:
            build_unjudged(made, output / f"{model}-{precision}", precision, CONTEXT)
            strip(output / f"{model}-{precision}")


def strip(bundle: Path) -> None:
    """Replace a bundle's weights by a list: name, type, shape, offset, mean and deviation."""
    graph = onnx.load(bundle / read_bundle(bundle).graphs["decode"].file, load_external_data=False).graph
    places = {}
    for tensor in graph.initializer:
        if tensor.external_data:
            external = {entry.key: entry.value for entry in tensor.external_data}
            offset, length = int(external["offset"]), int(external["length"])
            if places.get(offset, {"bytes": 0})["bytes"] < length:  # two tensors may have the same offset
                kind = onnx.TensorProto.DataType.Name(tensor.data_type)
                places[offset] = {"name": tensor.name, "type": kind, "shape": list(tensor.dims), "bytes": length}
    content = np.memmap(bundle / WEIGHTS, np.uint8, "r")
    spec = [{**tensor, "offset": offset, **describe(content[offset:], tensor)} for offset, tensor in places.items()]
    (bundle / SPEC).write_text(json.dumps({"bytes": len(content), "tensors": spec}))
    (bundle / WEIGHTS).unlink()


def describe(content: Any, tensor: dict[str, Any]) -> dict[str, float]:
    """Mean and deviation of the first values of a tensor of floats."""
    if tensor["type"] not in ("FLOAT", "FLOAT16"):
        random_values(tensor, 1)  # raises for types that random bytes would break
        return {}
    values = content[: min(tensor["bytes"], BLOCK)].view(np.float32 if tensor["type"] == "FLOAT" else np.float16)
    return {"mean": float(values.mean(dtype=np.float64)), "deviation": float(values.std(dtype=np.float64))}
