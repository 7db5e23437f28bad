"""Quantized checkpoints as their authors' tools write them, made from random integers, and the floats they stand for.

Each scheme takes a matrix W [N, K] = (levels - zeros) * scales, whose levels are unsigned, and gives the tensors that
the published rules store, without a glance at llmc's reader. Rules: AutoAWQ's WQLinear_GEMM, AutoGPTQ's and GPTQModel's
QuantLinear.pack, compressed-tensors' pack_to_int32, DeepSeek-V3's fp8 blocks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import tiny
from doubles.shared import shared

Tensors = dict[str, np.ndarray]
BASE = {"model_type": "qwen2", "num_hidden_layers": 1}
MIXTURE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Grid:
    """Integers of a random matrix; ``group`` 0 is a whole row, ``ordered`` scatters the inputs over the groups.

    Linears that read the same have one order, as their Hessian is one, unless each has its ``own_order``.
    """

    bits: int = 4
    group: int = 32
    zeros: bool = True
    ordered: bool = False
    own_order: bool = False
    scale_type: str = "float16"
    values: tuple[int, ...] = ()  # signed integers that there are; all of the bits where it is empty


@dataclass(frozen=True)
class Matrix:
    """Levels [N, K] from 0, zero points [N, G], scales [N, G], and the group of each input [K]."""

    bits: int
    levels: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    @property
    def floats(self) -> np.ndarray:
        """By definition, in float32."""
        steps = self.levels.astype(np.float32) - self.zeros[:, self.group_of].astype(np.float32)
        return steps * self.scales.astype(np.float32)[:, self.group_of]


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], grid: Grid) -> Matrix:
    outputs, inputs = shape
    group = grid.group or inputs
    count, middle = 1 << grid.bits, 1 << (grid.bits - 1)
    levels = middle + rng.choice(grid.values, shape) if grid.values else rng.integers(0, count, shape)
    # From 1 on: the format gptq has no zero points of 0.
    groups = (outputs, inputs // group)
    zeros = rng.integers(1, count, groups) if grid.zeros else np.full(groups, middle)
    scales = (rng.uniform(0.5, 1.5, groups) * 0.5 / count).astype(np.float32)
    if grid.scale_type == "nvfp4":
        import torch

        stored = torch.from_numpy(scales * 2 / NVFP4_SCALE).to(torch.float8_e4m3fn)
        scales = (stored.float().numpy() * NVFP4_SCALE) / np.float32(2)
    elif grid.scale_type == "bfloat16":
        scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    else:
        scales = scales.astype(grid.scale_type)
    group_of = np.arange(inputs) // group
    if grid.ordered:
        group_of = group_of[(rng if grid.own_order else np.random.default_rng(inputs)).permutation(inputs)]
    return Matrix(grid.bits, levels, zeros, scales, group_of)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values packed along the last axis into int32, the first one lowest; a last word is filled with zeros."""
    fields = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % fields))).astype(np.uint64)
    shifted = padded.reshape(len(values), -1, fields) << (np.arange(fields, dtype=np.uint64) * np.uint64(bits))
    return np.bitwise_or.reduce(shifted, axis=2).astype(np.uint32).view(np.int32)


def awq(matrix: Matrix) -> Tensors:
    """Eight outputs in a word, first the even ones of each eight, then the odd ones."""

    def interleaved(values: np.ndarray) -> np.ndarray:
        by_eight = values.reshape(len(values), -1, 8)
        return words(by_eight[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(values), -1), 4)

    return {
        "qweight": interleaved(matrix.levels.T),
        "qzeros": interleaved(matrix.zeros.T),
        "scales": matrix.scales.T.astype(np.float16),
    }


def gptq(matrix: Matrix, less: int = 1) -> Tensors:
    """Inputs packed in words, zero points along outputs and ``less`` by one in the first format."""
    return {
        "qweight": words(matrix.levels, matrix.bits).T,
        "qzeros": words((matrix.zeros - less).T, matrix.bits),
        "scales": matrix.scales.T.astype(np.float16),
        "g_idx": matrix.group_of.astype(np.int32),
    }


def compressed(matrix: Matrix) -> Tensors:
    found = {
        "weight_packed": words(matrix.levels, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": np.array(matrix.levels.shape, np.int64),
    }
    if (matrix.zeros != 1 << (matrix.bits - 1)).any():
        found["weight_zero_point"] = np.ascontiguousarray(words(matrix.zeros.T, matrix.bits).T)
    if (np.diff(matrix.group_of) < 0).any():
        found["weight_g_idx"] = matrix.group_of.astype(np.int32)
    return found


def plain_int8(matrix: Matrix) -> Tensors:
    found = {"weight": (matrix.levels - 128).astype(np.int8), "weight_scale": matrix.scales}
    if (matrix.zeros != 128).any():
        found["weight_zero_point"] = (matrix.zeros - 128).astype(np.int8)
    return found


# The scale of a whole matrix in NVFP4, no power of two; and 4-bit floats (E2M1), twice their values by code.
NVFP4_SCALE = np.float32(0.00123)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def nvfp4(matrix: Matrix) -> dict[str, Any]:
    """Two codes in a byte, the first one low, scales in float8 of 16 inputs each and one of the matrix."""
    import torch

    codes = np.array([E2M1.index(value) for value in range(-12, 13) if value in E2M1])
    places = np.searchsorted(sorted(set(E2M1)), matrix.levels - 128)
    packed = codes[places].astype(np.uint8).reshape(len(places), -1, 2)
    return {
        "weight": packed[..., 0] | packed[..., 1] << 4,
        "weight_scale": torch.from_numpy(matrix.scales * 2 / NVFP4_SCALE).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(NVFP4_SCALE),
    }


def compressed_config(**weights: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "strategy": "group", "dynamic": False, "actorder": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*vision.*"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "backend": "autoawq"}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.01,
    "checkpoint_format": "gptq",
}


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.layers.0.block_sparse_moe*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.33.0"},
}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized: the grid, the tensors of a matrix, and what its config says."""

    grid: Grid
    pack: Callable[[Matrix], Tensors]
    config: dict[str, Any]


SCHEMES = {
    "awq": Scheme(Grid(), awq, AWQ),
    "gptq": Scheme(Grid(zeros=False), gptq, GPTQ),
    "gptq-zeros-act-order": Scheme(Grid(ordered=True), gptq, {**GPTQ, "desc_act": True, "sym": False}),
    "gptq_v2-8-bits": Scheme(
        Grid(8, 0), lambda m: gptq(m, 0), {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}
    ),
    "packed-int4-bf16": Scheme(
        Grid(zeros=False, scale_type="bfloat16"), compressed, compressed_config(num_bits=4, group_size=32)
    ),
    "packed-int4-zeros-act-order": Scheme(
        Grid(ordered=True), compressed, compressed_config(num_bits=4, group_size=32, symmetric=False, actorder="group")
    ),
    "packed-int8-channel": Scheme(
        Grid(8, 0), compressed, compressed_config(num_bits=8, strategy="channel", symmetric=False)
    ),
    "int8-channel": Scheme(
        Grid(8, 0, zeros=False, scale_type="float32"),
        plain_int8,
        {**compressed_config(num_bits=8, strategy="channel"), "format": "int-quantized"},
    ),
    "nvfp4": Scheme(Grid(8, 16, zeros=False, scale_type="nvfp4", values=E2M1), nvfp4, MODELOPT),
}


@dataclass(frozen=True)
class Written:
    """A checkpoint's matrices by module, and transformers' model of the floats that they stand for."""

    matrices: dict[str, Matrix]
    model: Any

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """By transformers, in float32: [B, S, V] of ids [B, S]."""
        import torch

        with torch.no_grad():
            found: np.ndarray = self.model(torch.from_numpy(ids)).logits.numpy()
        return found


def write_checkpoint(scheme: Scheme, folder: Path, **config: Any) -> Written:
    """A random checkpoint of which all linears but the head are quantized."""
    import torch

    model = tiny.make(**{**BASE, **config})
    rng, matrices = np.random.default_rng(0), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                matrix = random_matrix(rng, tuple(parameter.shape), scheme.grid)
                matrices[name.removesuffix(".weight")] = matrix
                parameter.copy_(torch.from_numpy(matrix.floats))
            elif ".experts." in name:  # of all experts, who have tensors of their own
                at, _, part = name.rpartition(".")
                parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
                for module, rows in ((f"{at}.{e}", stack) for e, stack in enumerate(parameter)):
                    for part, own in zip(parts, rows.chunk(len(parts)), strict=True):
                        matrices[f"{module}.{part}"] = random_matrix(rng, tuple(own.shape), scheme.grid)
                        own.copy_(torch.from_numpy(matrices[f"{module}.{part}"].floats))
    tensors = {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings) and ".experts." not in name
    }
    for module, matrix in matrices.items():
        tensors.pop(f"{module}.weight", None)
        tensors |= {f"{module}.{part}": array for part, array in scheme.pack(matrix).items()}
    write_tensors(folder, tensors, {"bfloat16": "weight_scale"}.get(scheme.grid.scale_type, ""))
    _write_settings(folder, model, scheme.config)
    return Written(matrices, model.eval())


def export_shared(name: str, factory: pytest.TempPathFactory) -> tuple[Scheme, Written, Path]:
    """A scheme, what its checkpoint holds, and the export of that, made once for all processes."""
    from llmc.export import export

    def make(folder: Path) -> None:
        write_checkpoint(SCHEMES[name], folder / "checkpoint")
        export(folder / "checkpoint", folder / "export")

    written = write_checkpoint(SCHEMES[name], factory.mktemp(name))
    return SCHEMES[name], written, shared(factory, f"quantized {name}", make) / "export"


def write_float8(folder: Path, config: dict[str, Any], name: str, block: tuple[int, int], scale_type: str) -> Any:
    """A random checkpoint in float8 with a scale per block, rows and columns (0 for all), called ``name``.

    Returns the weights that it stands for, float32 by name.
    """
    import torch

    model = tiny.make(**BASE)
    tensors, weights = dict(model.state_dict()), {}
    for own in [own for own in tensors if own.endswith("_proj.weight")]:
        outputs, inputs = tensors[own].shape
        rows, columns = block[0] or outputs, block[1] or inputs
        blocks = tensors[own].reshape(outputs // rows, rows, inputs // columns, columns)
        scales = (blocks.abs().amax((1, 3), keepdim=True) / 448).to(getattr(torch, scale_type))
        codes = (blocks / scales.float()).to(torch.float8_e4m3fn)
        weights[own] = (codes.float() * scales.float()).reshape(outputs, inputs).numpy()
        tensors[own] = codes.reshape(outputs, inputs)
        tensors[own.removesuffix("weight") + name] = scales[:, 0, :, 0] if any(block) else scales.reshape(())
        tensors[own.removesuffix("weight") + "activation_scale"] = torch.tensor(1.0)
    write_tensors(folder, tensors)
    _write_settings(folder, model, config)
    return weights


def write_float8_experts(folder: Path, scale_fmt: str, *, stacked: bool) -> dict[str, np.ndarray]:
    """A random mixture in float8 by transformers' own rounding, with static scales of activations beside it, whose
    experts lie in stacks or apart. Returns the floats of the stacks that transformers makes of it."""
    from types import SimpleNamespace

    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    how = FineGrainedFP8Config(activation_scheme="static", weight_block_size=(16, 32), scale_fmt=scale_fmt)
    quantize, back = Fp8Quantize(SimpleNamespace(quantization_config=how)), Fp8Dequantize(None)
    model = tiny.make(**{**BASE, **MIXTURE})
    tensors, floats = dict(model.state_dict()), {}
    for own in [own for own in tensors if own.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack, at = tensors.pop(own), own.rpartition(".")[0]
        found = quantize.convert({own: stack})
        scales = found[f"{own}_scale_inv"]
        floats[own] = back._dequantize_one(found[own], scales, torch.float32).numpy()
        if stacked:
            tensors |= {**found, f"{own}_activation_scale": torch.ones(len(stack))}
            continue
        parts = ("gate_proj", "up_proj") if "gate" in own else ("down_proj",)
        for expert in range(len(stack)):
            for number, part in enumerate(parts):
                name = f"{at}.{expert}.{part}"
                tensors[f"{name}.weight"] = found[own][expert].chunk(len(parts))[number].contiguous()
                tensors[f"{name}.weight_scale_inv"] = scales[expert].chunk(len(parts))[number].contiguous()
                tensors[f"{name}.activation_scale"] = torch.tensor(1.0)
    write_tensors(folder, tensors)
    _write_settings(folder, model, how.to_dict())
    return floats


def _write_settings(folder: Path, model: Any, quantization: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": quantization}))
    tiny.write_tokenizer(folder)


def write_tensors(folder: Path, tensors: dict[str, Any], bfloat16: str = "") -> None:
    """A safetensors file of arrays or torch's tensors; those whose names end with ``bfloat16`` are stored so."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    held = {
        name: torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else array.contiguous()
        for name, array in tensors.items()
    }
    if bfloat16:
        held |= {name: tensor.bfloat16() for name, tensor in held.items() if name.endswith(bfloat16)}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
