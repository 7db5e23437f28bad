"""Families that do not exist: layers differ in heads, widths, windows, ropes and number of linears; those of the hybrid
in mixers, states, experts and whose cache they read.

Whoever lists a decoder's parts by hand, or takes the first layer's shape for that of all, computes something else
than :class:`Reference`, which is written in plain torch and knows nothing of ``llmc``.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.tiny import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import relu, silu, softplus

from llmc.export.config import DecoderConfig, Layer
from llmc.export.families import FAMILIES
from llmc.export.keys import Keys
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.experts import ExpertsConfig
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.recurrent import RecurrentConfig
from llmc.export.parts.rope import Rope
from llmc.export.reading import read_decoder

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
# A recurrence before experts; attention beside a convolution, and experts beside an MLP; a cache of another layer.
EXPERTS = {"count": 4, "chosen": 2, "inner": 32, "normalized": False}
DELTA = {"rule": "delta", "channels": 64, "taps": 4, "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
HYBRID: list[dict[str, Any]] = [
    LAYERS[0],
    {"recurrent": DELTA, "experts": EXPERTS},
    {**LAYERS[1], "recurrent": {"rule": "conv", "channels": 64, "taps": 3}, "experts": {**EXPERTS, "chosen": 1}},
    {"attention": {**LAYERS[0]["attention"], "source": 0}, "mlp": {"inner": 96}},
]
PARTS = {"attention": AttentionConfig, "mlp": MlpConfig, "recurrent": RecurrentConfig, "experts": ExpertsConfig}


def read(keys: Keys) -> DecoderConfig:
    """The family's file, as it would stand in ``export/families``."""
    layers = tuple(
        Layer(**{part: make(**layer[part]) if layer.get(part) else None for part, make in PARTS.items()})  # type: ignore[arg-type]
        for layer in keys.raw("layers")
    )
    ropes = tuple(Rope(**rope) for rope in keys.raw("ropes"))
    return replace(read_decoder(keys), layers=layers, ropes=ropes, logit_softcap=SOFTCAP)


def register(patch: pytest.MonkeyPatch) -> None:
    """Make the family known until ``patch`` is undone."""
    patch.setitem(FAMILIES, "invented", "doubles.invented:read")


def write_checkpoint(folder: Path, dtype: str = "float32", layers: list[dict[str, Any]] = LAYERS) -> Path:
    """Random weights with the small model's tokenizer, in a new ``folder``."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "invented",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "eos_token_id": 0,
        "layers": layers,
        "ropes": ROPES,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, ())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        # Norms and biases around one, decays so slow that states matter, the rest around zero.
        name: (torch.randn(shape, generator=generator) * 0.25 + _mean(name, shape)).to(getattr(torch, dtype))
        for name, shape in read(Keys(config, "invented")).parameter_shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _mean(name: str, shape: tuple[int, ...]) -> int:
    return -2 if name.endswith((".A_log", ".dt_bias")) else len(shape) % 2 if len(shape) < 3 else 0


class Reference:
    """A family in plain torch, in float32: texts (B, S) from position 0 to logits (B, S, V)."""

    def __init__(self, folder: Path) -> None:
        self.layers = json.loads((folder / "config.json").read_text())["layers"]
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits (B, S, V) of texts (B, S)."""
        return np.tanh(self.hidden(ids) @ self.weights["lm_head.weight"].numpy().T / SOFTCAP) * SOFTCAP

    def hidden(self, ids: np.ndarray, normed: bool = True) -> np.ndarray:
        """What the head multiplies (B, S, N), or what the last norm reads."""
        with torch.inference_mode():
            x = self.weights["model.embed_tokens.weight"][torch.from_numpy(ids)]
            caches: list[tuple[Tensor, Tensor] | None] = []
            for i, layer in enumerate(self.layers):
                at, read, mixed = f"model.layers.{i}", self._norm(x, f"model.layers.{i}.input_layernorm"), 0
                caches.append(None)
                if mixer := layer.get("attention"):
                    caches[i] = caches[mixer["source"]] if "source" in mixer else self._cache(read, at, mixer)
                    mixed += self._attention(read, f"{at}.self_attn", mixer, caches[i])
                if mixer := layer.get("recurrent"):
                    mixed += self._recurrent(read, f"{at}.recurrent", mixer)
                x = x + mixed
                read = self._norm(x, f"{at}.post_attention_layernorm") if layer.get("mlp") or "experts" in layer else x
                x = x + self._mlp(read, f"{at}.mlp", layer["mlp"]) if layer.get("mlp") else x
                x = x + self._experts(read, f"{at}.experts", layer["experts"]) if "experts" in layer else x
            return (self._norm(x, "model.norm") if normed else x).numpy()

    def _cache(self, x: Tensor, at: str, mixer: dict[str, Any]) -> tuple[Tensor, Tensor]:
        k, v = (self._linear(x, f"{at}.self_attn.{part}_proj").unflatten(-1, (-1, mixer["head_dim"])) for part in "kv")
        k = self._norm(k, f"{at}.self_attn.k_norm") if mixer.get("qk_norm") else k
        return (k if mixer["rope"] is None else _rotated(k, **ROPES[mixer["rope"]])), v

    def _attention(self, x: Tensor, at: str, mixer: dict[str, Any], cache: tuple[Tensor, Tensor]) -> Tensor:
        q = self._linear(x, f"{at}.q_proj").unflatten(-1, (-1, mixer["head_dim"]))
        q = self._norm(q, f"{at}.q_norm") if mixer.get("qk_norm") else q
        q = q if mixer["rope"] is None else _rotated(q, **ROPES[mixer["rope"]])
        k, v = (part.repeat_interleave(mixer["heads"] // mixer["kv_heads"], 2) for part in cache)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        hidden = (distance < 0) | (distance >= (mixer.get("window") or x.shape[1]))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / mixer["head_dim"] ** 0.5
        seen = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return self._linear(torch.einsum("bhqk,bkhd->bqhd", seen, v).flatten(2), f"{at}.o_proj")

    def _recurrent(self, x: Tensor, at: str, mixer: dict[str, Any]) -> Tensor:
        """Token by token, a state (B, H, D, E) of key and value."""
        read, heads = self._linear(x, f"{at}.in_proj"), mixer.get("value_heads", 0)
        if not heads:
            before, after, inner = read.chunk(3, -1)
            return self._linear(after * self._conv(before * inner, at), f"{at}.out_proj")
        keys = mixer["key_heads"] * mixer["key_dim"]
        parts = silu(self._conv(read, at)).split([keys, keys, heads * mixer["value_dim"]], -1)
        q, k = (part.unflatten(-1, (-1, mixer["key_dim"])) for part in parts[:2])
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q, k = (part.repeat_interleave(heads // mixer["key_heads"], 2) for part in (q * mixer["key_dim"] ** -0.5, k))
        v, beta = parts[2].unflatten(-1, (heads, -1)), torch.sigmoid(self._linear(x, f"{at}.beta_proj"))
        step = softplus(self._linear(x, f"{at}.decay_proj") + self.weights[f"{at}.dt_bias"])
        decay, state, made = torch.exp(-step * self.weights[f"{at}.A_log"].exp()), torch.zeros(()), []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            error = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state.expand(*k[:, t].shape, v.shape[-1]))
            state = state + torch.einsum("bhd,bhe->bhde", k[:, t], error * beta[:, t, :, None])
            made.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
        y = self._norm(torch.stack(made, 1), f"{at}.norm").flatten(2)
        return self._linear(y * silu(self._linear(x, f"{at}.gate_proj")), f"{at}.out_proj")

    def _conv(self, x: Tensor, at: str) -> Tensor:
        weight = self.weights[f"{at}.conv.weight"]
        padded = torch.nn.functional.pad(x.mT, (weight.shape[-1] - 1, 0))
        return torch.nn.functional.conv1d(padded, weight, groups=x.shape[-1]).mT

    def _mlp(self, x: Tensor, at: str, mlp: dict[str, Any]) -> Tensor:
        up = self._linear(x, f"{at}.up_proj")
        inner = silu(self._linear(x, f"{at}.gate_proj")) * up if mlp.get("gated", True) else relu(up).square()
        return self._linear(inner, f"{at}.down_proj")

    def _experts(self, x: Tensor, at: str, experts: dict[str, Any]) -> Tensor:
        """All experts of each token, by their shares or none."""
        shares = torch.softmax(self._linear(x, f"{at}.router"), -1)
        least = shares.topk(experts["chosen"], -1).values[..., -1:]
        gate, up = torch.einsum("bsn,ein->bsei", x, self.weights[f"{at}.gate_up_proj.weight"]).chunk(2, -1)
        made = torch.einsum("bsei,eni->bsen", silu(gate) * up, self.weights[f"{at}.down_proj.weight"])
        return (made * torch.where(shares >= least, shares, 0)[..., None]).sum(2)

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
