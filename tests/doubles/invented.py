"""A family that does not exist: layers differ in heads, widths, windows, ropes and number of linears.

Whoever lists a decoder's parts by hand, or takes the first layer's shape for that of all, computes something else
than :class:`Reference`, which is written in plain torch and knows nothing of ``llmc``.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import relu, silu

from llmc.export.config import AttentionConfig, DecoderConfig, Layer, MlpConfig, Rope
from llmc.export.families import FAMILIES
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "checkpoint"
HIDDEN, VOCAB, EPS = 64, 4096, 1e-5
SOFTCAP = 8.0  # of logits up to 10
# The first two have one width, so that their tables can be mistaken for each other.
ROPES: list[dict[str, Any]] = [
    {"dim": 16, "theta": 10_000.0},
    {"dim": 16, "theta": 50.0, "type": "linear", "factor": 2.0},
    {"dim": 32, "theta": 500.0},
]
SWITCHES = {"qk_norm": "head", "qkv_bias": True, "o_bias": True}
# Windows are shorter than any text that tests feed.
LAYERS: list[dict[str, Any]] = [
    {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 16, "rope": 0}, "mlp": {"inner": 96}},
    {
        "attention": {"heads": 2, "kv_heads": 1, "head_dim": 32, "rope": 2, "window": 6},
        "mlp": {"inner": 128, "gated": False, "activation": "relu2"},
    },
    {"attention": {"heads": 4, "kv_heads": 4, "head_dim": 16, "rope": None, "window": 5}, "mlp": None},
    {
        "attention": {"heads": 8, "kv_heads": 2, "head_dim": 16, "rope": 1, **SWITCHES},
        "mlp": {"inner": 160, "bias": True},
    },
]


def read(keys: Keys) -> DecoderConfig:
    """The family's file, as it would stand in ``export/families``."""
    layers = tuple(
        Layer(AttentionConfig(**layer["attention"]), MlpConfig(**layer["mlp"]) if layer["mlp"] else None)
        for layer in keys.raw("layers")
    )
    ropes = tuple(Rope(**rope) for rope in keys.raw("ropes"))
    return replace(read_decoder(keys), layers=layers, ropes=ropes, logit_softcap=SOFTCAP)


def register(patch: pytest.MonkeyPatch) -> None:
    """Make the family known until ``patch`` is undone."""
    patch.setitem(FAMILIES, "invented", "doubles.invented:read")


def write_checkpoint(folder: Path, dtype: str = "float32") -> Path:
    """Random weights with the small model's tokenizer, in a new ``folder``."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "invented",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "eos_token_id": 0,
        "layers": LAYERS,
        "ropes": ROPES,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.25 + len(shape) % 2).to(getattr(torch, dtype))
        for name, shape in _shapes().items()  # norms and biases around one, the rest around zero
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i, layer in enumerate(LAYERS):
        at, mixer, mlp = f"model.layers.{i}", layer["attention"], layer["mlp"]
        queries, keys = mixer["heads"] * mixer["head_dim"], mixer["kv_heads"] * mixer["head_dim"]
        linears = {"q": (queries, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN), "o": (HIDDEN, queries)}
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        for part, shape in linears.items():
            shapes[f"{at}.self_attn.{part}_proj.weight"] = shape
            if mixer.get("o_bias" if part == "o" else "qkv_bias"):
                shapes[f"{at}.self_attn.{part}_proj.bias"] = shape[:1]
        if mixer.get("qk_norm"):
            shapes |= {f"{at}.self_attn.{part}_norm.weight": (mixer["head_dim"],) for part in "qk"}
        if mlp is None:
            continue
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        for part in ("gate", "up", "down") if mlp.get("gated", True) else ("up", "down"):
            shape = (HIDDEN, mlp["inner"]) if part == "down" else (mlp["inner"], HIDDEN)
            shapes[f"{at}.mlp.{part}_proj.weight"] = shape
            if mlp.get("bias"):
                shapes[f"{at}.mlp.{part}_proj.bias"] = shape[:1]
    return shapes | {"model.norm.weight": (HIDDEN,)}


class Reference:
    """The family in plain torch, in float32: texts (B, S) from position 0 to logits (B, S, V)."""

    def __init__(self, folder: Path) -> None:
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits (B, S, V) of texts (B, S)."""
        return np.tanh(self.hidden(ids) @ self.weights["lm_head.weight"].numpy().T / SOFTCAP) * SOFTCAP

    def hidden(self, ids: np.ndarray, normed: bool = True) -> np.ndarray:
        """What the head multiplies (B, S, N), or what the last norm reads."""
        with torch.inference_mode():
            x = self.weights["model.embed_tokens.weight"][torch.from_numpy(ids)]
            for i, layer in enumerate(LAYERS):
                at = f"model.layers.{i}"
                x = x + self._attention(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn", layer["attention"])
                if layer["mlp"] is not None:
                    x = x + self._mlp(self._norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp", layer["mlp"])
            return (self._norm(x, "model.norm") if normed else x).numpy()

    def _attention(self, x: Tensor, at: str, mixer: dict[str, Any]) -> Tensor:
        q, k, v = (self._linear(x, f"{at}.{part}_proj").unflatten(-1, (-1, mixer["head_dim"])) for part in "qkv")
        if mixer.get("qk_norm"):
            q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{at}.k_norm")
        if mixer["rope"] is not None:
            q, k = (_rotated(part, **ROPES[mixer["rope"]]) for part in (q, k))
        k, v = (part.repeat_interleave(mixer["heads"] // mixer["kv_heads"], 2) for part in (k, v))
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        hidden = (distance < 0) | (distance >= (mixer.get("window") or x.shape[1]))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / mixer["head_dim"] ** 0.5
        seen = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return self._linear(torch.einsum("bhqk,bkhd->bqhd", seen, v).flatten(2), f"{at}.o_proj")

    def _mlp(self, x: Tensor, at: str, mlp: dict[str, Any]) -> Tensor:
        up = self._linear(x, f"{at}.up_proj")
        inner = silu(self._linear(x, f"{at}.gate_proj")) * up if mlp.get("gated", True) else relu(up).square()
        return self._linear(inner, f"{at}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weights[f"{name}.weight"]


def _rotated(x: Tensor, dim: int, theta: float, type: str = "default", factor: float = 1.0) -> Tensor:  # noqa: A002
    """x (B, S, H, D), each pair turned by its position's angle."""
    half = dim // 2
    angles = torch.arange(x.shape[1])[:, None, None] * theta ** (-torch.arange(half) / half) / factor  # (S, 1, D/2)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)
