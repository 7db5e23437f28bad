"""Tiny checkpoints: random ones of every family beside their transformers models, and one written by hand to break."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import invented

Feeds = dict[str, np.ndarray]
Run = Callable[[Feeds], list[np.ndarray]]

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # small, so that tiny heads have short, medium and long wavelengths
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
# Windows are shorter than the 20 tokens that the tests feed. dtype and shard_size say how the checkpoint is stored.
CASES: dict[str, dict[str, Any]] = {
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope-tied": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-linear-rope-no-groups-fp16": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        "num_key_value_heads": 4,
        "dtype": "float16",
    },
    "mistral-window-wide-heads": {"model_type": "mistral", "sliding_window": 6, "head_dim": 32},
    "mistral-one-kv-head-bf16": {
        "model_type": "mistral",
        "sliding_window": None,
        "num_key_value_heads": 1,
        "dtype": "bfloat16",
    },
    "qwen2-tied-bf16": {"model_type": "qwen2", "tie_word_embeddings": True, "dtype": "bfloat16"},
    "qwen2-window-in-second-layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3-tied-sharded": {
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "shard_size": "100KB",
    },
    "llama-yarn-rope": {"model_type": "llama", "rope_parameters": YARN_ROPE},
    "phi3-packed-window-fp16": {
        "model_type": "phi3",
        "sliding_window": 6,
        "dtype": "float16",
        "pad_token_id": None,
    },
    "seed_oss-output-bias": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    "smollm3-every-second-layer-rotated": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "pad_token_id": None,
    },
    "granite-multipliers": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "qwen3-biases-window-in-first-layer": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@dataclass(frozen=True)
class Case:
    """A random checkpoint, its export, and transformers running it in float32."""

    name: str
    checkpoint: Path
    export: Path
    reference: Any


@pytest.fixture(autouse=True)
def invented_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented family can be read like any other."""
    invented.register(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The machine may be shared, and the models are tiny."""
    import torch

    torch.set_num_threads(1)


def make_case(name: str, folder: Path, **changes: Any) -> Case:
    from llmc.export import export

    checkpoint, output = folder / "checkpoint", folder / "export"
    if name == "invented":
        with pytest.MonkeyPatch.context() as patch:
            invented.register(patch)
            export(invented.write_checkpoint(checkpoint), output)
        return Case(name, checkpoint, output, invented.Reference(checkpoint))
    write_random_checkpoint({**CASES[name], **changes}, checkpoint)
    export(checkpoint, output)
    return Case(name, checkpoint, output, Reference(checkpoint))


def write_random_checkpoint(case: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**BASE, **case}
    dtype, shard_size = options.pop("dtype", "float32"), options.pop("shard_size", "1GB")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    with torch.no_grad():
        for parameter in model.parameters():  # norms around one, the rest large enough to make every part matter
            parameter.normal_(float(parameter.dim() == 1), 0.25)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)


class Reference:
    """transformers in float32, on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def __call__(self, ids: np.ndarray, start: int = 0) -> np.ndarray:
        """Logits [B, S, V] of tokens whose first position is ``start``."""
        import torch

        positions = torch.arange(start, start + ids.shape[1])[None]
        with torch.no_grad():
            return self.model(torch.from_numpy(ids), position_ids=positions).logits.numpy()

    def hidden(self, ids: np.ndarray, normed: bool = True) -> np.ndarray:
        """The last hidden states [B, S, H], after the last norm or before it."""
        import torch

        seen = []
        hook = self.model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        with torch.no_grad():
            states = self.model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
        hook.remove()
        return (states[-1] if normed else seen[0]).numpy()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """A random checkpoint by its name and what its config has otherwise; each is made once."""
    return cache(lambda name, **changes: make_case(name, tmp_path_factory.mktemp(name), **changes))


@pytest.fixture(scope="session", params=[*CASES, "invented"])
def case(request: pytest.FixtureRequest, exported: Callable[..., Case]) -> Case:
    """Each of the random checkpoints in turn, and the one whose layers differ."""
    return exported(request.param)


@pytest.fixture(scope="session")
def window_case(exported: Callable[..., Case]) -> Case:
    """One checkpoint with a sliding window, for tests that need no second family."""
    return exported("mistral-window-wide-heads")


@pytest.fixture(scope="session")
def invented_case(exported: Callable[..., Case]) -> Case:
    """The one whose layers differ."""
    return exported("invented")


@pytest.fixture(scope="session")
def onnxruntime_run() -> Callable[[Path], Run]:
    """Opens an exported folder in ONNX Runtime on the CPU."""
    import onnxruntime as ort

    def open_graph(folder: Path) -> Run:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # it warns that the cache is copied, since nothing is bound in place here
        session = ort.InferenceSession(folder / "decoder.onnx", options, providers=["CPUExecutionProvider"])
        return lambda feeds: session.run(None, feeds)

    return open_graph


# ------------------------------------------------------------------------------------- a checkpoint written by hand

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": [16, 8],
    "model.layers.0.input_layernorm.weight": [8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [8, 8],
    "model.layers.0.self_attn.v_proj.weight": [8, 8],
    "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.post_attention_layernorm.weight": [8],
    "model.layers.0.mlp.gate_proj.weight": [12, 8],
    "model.layers.0.mlp.up_proj.weight": [12, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 12],
    "model.norm.weight": [8],
    "lm_head.weight": [16, 8],
}


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """Write float32 arrays; ``dtypes`` may claim another dtype of the same size in the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name, "F32")
        offsets = [position, position := position + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(array.astype(np.float32).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class HandWritten:
    """A small valid Llama checkpoint, and the ways to change it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        generator = np.random.default_rng(0)
        self.tensors = {name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
        self.set_config()
        self.write_weights()
        write_tokenizer(folder)

    def set_config(self, remove: str | None = None, **changes: Any) -> None:
        config = {key: value for key, value in {**CONFIG, **changes}.items() if key != remove}
        (self.folder / "config.json").write_text(json.dumps(config))

    def write_weights(self, dtypes: dict[str, str] | None = None) -> None:
        write_safetensors(self.folder / "model.safetensors", self.tensors, dtypes)

    def split(self) -> None:
        """Turn the weights into two shards with an index."""
        (self.folder / "model.safetensors").unlink()
        names = list(self.tensors)
        shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for file, part in shards.items():
            write_safetensors(self.folder / file, {name: self.tensors[name] for name in part})
        self.write_index({name: file for file, part in shards.items() for name in part})

    def write_index(self, weight_map: dict[str, Any]) -> None:
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> HandWritten:
    """A valid checkpoint of one layer, to be broken by the test."""
    return HandWritten(tmp_path / "checkpoint")
