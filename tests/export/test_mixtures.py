"""Checkpoints of mixtures: experts in tensors of their own or in one, beside states, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from doubles.lowerings import difference, open_session
from safetensors.torch import load_file, save_file

from llmc.bundle import MADE_FILE, read_export
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint

TOKENS = 20
# As in test_parity, where a recurrence is among the layers: largest absolute difference of logits up to 20.
LOGIT_TOLERANCE = 4e-4
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
HYBRIDS = {
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h with a vector for its experts": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_latent_size": 48,
        "mlp_bias": True,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_5_moe_text": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
FIRST = "model.layers.0.block_sparse_moe"


@pytest.mark.parametrize("family", HYBRIDS)
def test_experts_beside_states_equal_transformers(family, tmp_path, write_case):
    reference = write_case({"model_type": family, **HYBRIDS[family]}, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "export")
    geometry, ids = read_export(tmp_path / "export").geometry, np.random.default_rng(1).integers(0, 96, (2, TOKENS))
    feeds = {"input_ids": ids, "past_lengths": np.zeros(2, np.int64), "new_lengths": np.full(2, TOKENS)}
    feeds |= {name: np.zeros(it.shape_of(2, TOKENS), np.float32) for it in geometry.caches for name in it.inputs}
    feeds["logit_indices"] = np.tile(np.arange(TOKENS), (2, 1))
    [logits] = open_session(tmp_path / "export" / "decoder.onnx").run(["logits"], feeds)
    assert difference(logits, reference(ids)) <= LOGIT_TOLERANCE


@pytest.fixture
def mixtral(tmp_path, write_case):
    """A checkpoint with a tensor for each expert, and what changes it."""
    folder = tmp_path / "mixtral"
    write_case({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, folder)

    def change(edit):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return change


def stack(tensors: dict[str, torch.Tensor]) -> None:
    """The names and shapes under which transformers holds them."""
    for layer in range(2):
        at = f"model.layers.{layer}"
        parts = {
            name: torch.stack([tensors.pop(f"{at}.block_sparse_moe.experts.{e}.{name}.weight") for e in range(4)])
            for name in ("w1", "w3", "w2")
        }
        tensors[f"{at}.mlp.experts.gate_up_proj"] = torch.cat([parts["w1"], parts["w3"]], 1)
        tensors[f"{at}.mlp.experts.down_proj"] = parts["w2"]


def test_stacked_experts_stay_where_they_are_and_are_the_same(mixtral, tmp_path):
    export(mixtral(lambda tensors: None), tmp_path / "apart")
    export(mixtral(stack), tmp_path / "stacked")
    assert not (tmp_path / "stacked" / MADE_FILE).exists()
    made = (tmp_path / "apart" / MADE_FILE).read_bytes()
    stored = load_file(mixtral(lambda tensors: None) / "model.safetensors")
    kept = [stored[f"model.layers.{i}.mlp.experts.{part}_proj"] for i in range(2) for part in ("gate_up", "down")]
    assert b"".join(tensor.numpy().tobytes() for tensor in kept) == made


def remove(name):
    return lambda tensors: tensors.pop(name)


def add(name, like):
    return lambda tensors: tensors.update({name: tensors[like].clone()})


def widen(name):
    return lambda tensors: tensors.update({name: torch.cat([tensors[name]] * 2)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (remove(f"{FIRST}.experts.3.w2.weight"), r"layers.0.experts.3.down_proj.weight is missing.*4 experts"),
        (add(f"{FIRST}.experts.4.w1.weight", f"{FIRST}.experts.0.w1.weight"), r"experts.4.gate_proj.weight .* unused"),
        (widen(f"{FIRST}.experts.2.w1.weight"), r"experts.2.gate_proj.weight has shape \[192, 64\].*\[96, 64\]"),
        (widen(f"{FIRST}.gate.weight"), r"experts.router.weight has shape \[8, 64\].*asks for \[4, 64\]"),
    ],
    ids=["missing", "one too many", "wider", "router wider than experts"],
)
def test_experts_that_contradict_the_config_are_refused(mixtral, edit, words):
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(mixtral(edit))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok=5 .*at most num_experts=4"),
        ({"hidden_act": "relu"}, r"hidden_act='relu' .*silu"),
        ({"scoring_func": "sigmoid"}, r"scoring_func='sigmoid' is not known"),
    ],
)
def test_rules_that_are_not_computed_are_refused(mixtral, changes, words):
    folder = mixtral(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(folder)


def retype(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def pack_mxfp4(tensors):
    name = "model.layers.1.mlp.experts.down_proj"
    tensors |= {f"{name}_blocks": torch.zeros(8, 64, 1, 16, dtype=torch.uint8)}
    tensors |= {f"{name}_scales": torch.zeros(8, 64, 1, dtype=torch.uint8)}
    for expert in range(8):
        del tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
GPT_OSS, DOWN = "gpt_oss-sinks-clamped-experts-bf16", "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("name", "edit", "changes", "words"),
    [
        ("qwen3_5-delta-and-gates", retype("model.norm.weight", torch.int32), {}, "model.norm.weight has dtype I32"),
        (GPT_OSS, retype(DOWN, torch.int8), {}, "down_proj.weight has dtype I8"),
        (GPT_OSS, lambda tensors: tensors.update({DOWN: torch.zeros(())}), {}, r"down_proj.weight has shape \[\]"),
        (
            "qwen3_moe-first-layer-dense-bf16",
            pack_mxfp4,
            MXFP4,
            "down_proj.weight is in MXFP4, .*only .* experts with biases",
        ),
        (
            "granitemoehybrid-mamba-bf16",
            lambda tensors: None,
            {"layer_types": ["attention", "mamba"]},
            r"layers.0.self_attn.q_proj.weight is missing",
        ),
    ],
    ids=["integers for a norm", "integers for experts", "a number for experts", "MXFP4", "layers the other way round"],
)
def test_tensors_of_another_kind_are_refused(random_checkpoint, tmp_path, name, edit, changes, words):
    folder = shutil.copytree(random_checkpoint(name), tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(folder)
