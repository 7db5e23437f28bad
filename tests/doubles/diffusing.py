"""Tiny diffusion language models with random weights, what transformers computes of them, and their sampling in numpy.

LLaDA is Llama, and Dream Qwen2, where every position sees all others: transformers takes such a mask. The sampling is
written from its rules (arXiv 2502.09992, 2505.22618) and runs a whole forward for every step.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doubles.tiny import BASE, draw, write_tokenizer
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llmc.export.families.llada import KEYS

VOCAB, MASK, EOS = 4096, 3, 0
SHIFTS = {"llada": 0, "Dream": 1}  # of each family's logits
SIZES: dict[str, Any] = {name: size for name, size in BASE.items() if not name.endswith("token_id")}
SIZES |= {"vocab_size": VOCAB, "rope_theta": 500.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
# Keys and values as published, but for sizes; of LLaDA these have other names.
PUBLISHED = json.loads((Path(__file__).parents[1] / "export" / "published" / "models.json").read_text("utf-8"))
CONFIGS = {"llada": PUBLISHED["LLaDA-8B-Instruct"]["config"], "Dream": PUBLISHED["Dream-v0-Instruct-7B"]["config"]}
CONFIGS["Dream"] = {**PUBLISHED["Qwen2.5-7B-Instruct"]["config"], **CONFIGS["Dream"]}
LLADA_NAMES = (
    *(("model.embed_tokens", "model.transformer.wte"), ("model.norm", "model.transformer.ln_f")),
    *(("lm_head", "model.transformer.ff_out"), ("model.layers", "model.transformer.blocks")),
    *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"), ("self_attn.o_proj", "attn_out")),
    *(("mlp.gate_proj", "ff_proj"), ("mlp.down_proj", "ff_out"), ("self_attn.", ""), ("mlp.", "")),
)


def _own_names(family: str) -> dict[str, str]:
    return {name: own for own, name in KEYS.items()} if family == "llada" else {}


def _read_sizes(folder: Path) -> tuple[str, dict[str, Any]]:
    """The family of a checkpoint, and its sizes by the names of :data:`SIZES`."""
    config = json.loads((folder / "config.json").read_text())
    names = _own_names(config["model_type"])
    return config["model_type"], {name: config[names.get(name, name)] for name in SIZES}


def _model(family: str, found: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {key: value for key, value in found.items() if key != "rope_theta"}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": found["rope_theta"]}}
    if family == "llada":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()  # type: ignore[arg-type]
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()  # type: ignore[arg-type]


def _rename(name: str) -> str:
    for ours, theirs in LLADA_NAMES:
        name = name.replace(ours, theirs)
    return name


def write_checkpoint(folder: Path, family: str) -> Path:
    """A new ``folder`` with random weights of ``llada`` or ``Dream`` and the small model's tokenizer."""
    folder.mkdir(parents=True)
    names = _own_names(family)
    sizes = {names.get(name, name): value for name, value in SIZES.items()}
    ids = {"vocab_size": VOCAB, "mask_token_id": MASK, "bos_token_id": EOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps({**CONFIGS[family], **sizes, **ids}))
    write_tokenizer(folder, ())
    cut = {"do_sample": True, "temperature": 0.2, "top_p": 0.95}  # which no diffusion model can do
    (folder / "generation_config.json").write_text(json.dumps(cut if family == "Dream" else {}))
    torch.manual_seed(0)
    tensors = draw(_model(family, SIZES)).state_dict()
    tensors["lm_head.weight"] *= 2.0  # far from ties, sure enough for thresholds
    found = {_rename(name) if family == "llada" else name: tensor for name, tensor in tensors.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors by transformers' names of Llama and Qwen2."""
    (family, sizes), stored = _read_sizes(folder), load_file(folder / "model.safetensors")
    names = _model(family, sizes).state_dict()
    return {name: stored[_rename(name) if family == "llada" else name].float() for name in names}


class Transformers:
    """Logits (S, V) of a text (S), each position of which sees all, by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = _model(*_read_sizes(folder))
        self._model.load_state_dict(read_weights(folder))

    def __call__(self, ids: list[int]) -> NDArray[np.float32]:
        every = torch.zeros(1, 1, len(ids), len(ids))
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids]), attention_mask=every).logits
        found: NDArray[np.float32] = logits[0].numpy()
        return found


class Plain:
    """The same in plain torch, of the tokens from ``start`` on in a row of ``length``, whose keys and values (2, KV,
    length, D) of each layer lie in ``held``: all of them are seen, whenever they were written."""

    def __init__(self, folder: Path) -> None:
        self.weights, (_, self.sizes) = read_weights(folder), _read_sizes(folder)
        self.width = self.sizes["hidden_size"] // self.sizes["num_attention_heads"]
        self.held: list[Tensor] = []

    def begin(self, length: int) -> None:
        shape = (2, self.sizes["num_key_value_heads"], length, self.width)
        self.held = [torch.zeros(shape) for _ in range(self.sizes["num_hidden_layers"])]

    def __call__(self, ids: list[int], start: int = 0) -> NDArray[np.float32]:
        with torch.inference_mode():
            x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
            places = torch.arange(start, start + len(ids))
            for index, held in enumerate(self.held):
                at = f"model.layers.{index}"
                x = x + self._attend(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn", places, held)
                y = self._norm(x, f"{at}.post_attention_layernorm")
                gate, up = (self._linear(y, f"{at}.mlp.{part}_proj") for part in ("gate", "up"))
                x = x + self._linear(torch.nn.functional.silu(gate) * up, f"{at}.mlp.down_proj")
            found: NDArray[np.float32] = self._linear(self._norm(x, "model.norm"), "lm_head").numpy()
            return found

    def _attend(self, x: Tensor, at: str, places: Tensor, held: Tensor) -> Tensor:
        q, k, v = (self._linear(x, f"{at}.{part}_proj").view(len(x), -1, self.width) for part in "qkv")
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # (H or KV, S, D)
        held[0][:, places], held[1][:, places] = self._turn(k, places), v
        keys, values = held.repeat_interleave(len(q) // len(k), dim=1)  # (H, length, D)
        weights = (self._turn(q, places) @ keys.mT / self.width**0.5).softmax(-1)
        return self._linear((weights @ values).transpose(0, 1).flatten(1), f"{at}.o_proj")

    def _turn(self, x: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None] * self.sizes["rope_theta"] ** -(torch.arange(0, self.width, 2) / self.width)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _norm(self, x: Tensor, at: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt() * self.weights[f"{at}.weight"]

    def _linear(self, x: Tensor, at: str) -> Tensor:
        y = x @ self.weights[f"{at}.weight"].T
        return y + self.weights[f"{at}.bias"] if f"{at}.bias" in self.weights else y


def sample(
    model: Plain,
    shift: int,
    prompt: list[int],
    max_tokens: int,
    *,
    block_length: int = 32,
    steps: int | None = None,
    threshold: float | None = None,
    cached: bool = True,
) -> list[int]:
    """The greedy tokens after a prompt; without ``cached`` every step computes all tokens."""
    tokens = [*prompt, *[MASK] * max_tokens]
    model.begin(len(tokens))
    before = None
    for start in range(len(prompt), len(tokens), block_length):
        end, step = min(start + block_length, len(tokens)), 0
        masks = end - start
        calls = min(masks, max(1, (steps or max_tokens) * masks // max_tokens))  # one more mask in the first of them
        while MASK in tokens[start:end]:
            first, last = start, end
            if not cached or (step == 0 and before is None):
                first, last = 0, len(tokens)
            elif step == 0 and before is not None:
                first = before
            first = max(0, first - shift)
            logits = model(tokens[first:last], first).astype(np.float64)
            sure = []
            for place in (place for place in range(start, end) if tokens[place] == MASK):
                row = logits[place - shift - first]
                likely = np.exp(row - row.max())
                likely /= likely.sum()
                row[MASK] = -np.inf
                sure.append((likely[row.argmax()], place, int(row.argmax())))
            sure.sort(key=lambda item: (-item[0], item[1]))
            count = masks // calls + (step < masks % calls)
            if threshold is not None:
                count = max(1, sum(item[0] >= threshold for item in sure))
            for _, place, token in sure[:count]:
                tokens[place] = token
            step += 1
        before = start
    return tokens[len(prompt) :]
