"""Models that also see: their text part is read, by each prefix of its tensors, and computes what transformers does."""

from pathlib import Path

import numpy as np
import pytest
from doubles import towers
from doubles.decoders import load_decoder
from doubles.tiny import BASE, tiny

from llmc.bundle import read_export
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint

# As of the other families, see test_parity.py.
LOGIT_TOLERANCE = 2e-4
# The chunks of transformers' recurrence round otherwise than single steps: 7e-4 here, of logits up to 8.
STATE_TOLERANCE = 1e-3
TEXT = {
    **BASE,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 95},
    "gemma4": {
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "per_layer_config": {"1": {"head_dim": 32}},
        },
        "vision_config": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "image_token_id": 95,
    },
    "gemma4_unified": {
        "text_config": {**TEXT, "model_type": "gemma4_unified_text", "per_layer_config": {"1": {"head_dim": 32}}},
        "vision_config": {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 8, "mm_posemb_size": 4},
        "audio_config": {"audio_embed_dim": 8},
        "image_token_id": 95,
    },
    "smolvlm": {
        "text_config": {**BASE, "model_type": "llama", "head_dim": 16, "pad_token_id": 0},
        "vision_config": {**SIZES, "image_size": 28, "patch_size": 14},
        "image_token_id": 95,
    },
}
KINDS["idefics3"] = KINDS["smolvlm"]
# Windows of growth are shorter than the 20 tokens that the test feeds.
KINDS["mistral3"] = {
    "text_config": {
        **BASE,
        "model_type": "mistral4",
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 20.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 6,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "vision_config": {**SIZES, "model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    "image_token_index": 95,
}
KINDS |= {kind: towers.FAMILIES[kind].config for kind in towers.QWEN}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
DENSE = KINDS["qwen3_vl"]
KINDS["qwen3_vl_moe"] = {**DENSE, "text_config": {**DENSE["text_config"], **MIXTURE}}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vision tower, as transformers saves it."""
    return tiny(
        tmp_path_factory.mktemp(request.param), request.param, "AutoModelForImageTextToText", **KINDS[request.param]
    )


def test_the_text_part_computes_what_the_whole_computes_of_text(checkpoint, tmp_path, onnxruntime_run):
    import torch
    from transformers import AutoModelForImageTextToText

    report = export(checkpoint, tmp_path / "export", text_only=True)
    output = report.output
    assert report.notes[-1] == "config.json: only the text part was exported, which sees no images"
    assert read_export(output).geometry.vision is None and not (output / "vision.onnx").exists()
    ids = np.random.default_rng(1).integers(0, 90, (2, 20))
    caches = {
        name: np.zeros(cache.shape_of(2, 24), np.float32)
        for cache in read_export(output).geometry.caches
        for name in cache.inputs
    }
    places = np.tile(np.arange(20), (2, 1))
    run = onnxruntime_run(output)
    feeds = {"input_ids": ids, "past_lengths": np.zeros(2, np.int64), "logit_indices": places, **caches}
    feeds |= {"new_lengths": np.full(2, 20)} if read_export(output).geometry.has_states else {}
    found = run(feeds)[0]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    tolerance = STATE_TOLERANCE if read_export(output).geometry.has_states else LOGIT_TOLERANCE
    assert np.abs(found - expected).max() < tolerance
    assert np.abs(found[:, 1:] - expected[:, :-1]).max() > 100 * tolerance  # of the position before


@pytest.mark.parametrize("checkpoint", ["qwen3_vl_moe"], indirect=True)
def test_experts_are_read_in_both_orders(checkpoint, tmp_path):
    """Published ones are stored as [experts, inputs, outputs], those that transformers 5 saves the other way round."""
    from safetensors.numpy import load_file, save_file

    stored = load_file(checkpoint / "model.safetensors")
    turned = {
        name: np.ascontiguousarray(it.swapaxes(1, 2)) if it.ndim == 3 and ".experts." in name else it
        for name, it in stored.items()
    }
    assert sum(turned[name].shape != it.shape for name, it in stored.items()) == 4
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    save_file(turned, tmp_path / "model.safetensors")
    first, second = (
        load_decoder(folder, read_checkpoint(folder, text_only=True)).state_dict() for folder in (checkpoint, tmp_path)
    )
    assert all(np.array_equal(first[name].numpy(), second[name].numpy()) for name in first)


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)  # others were always saved by the other prefix
def test_tensors_are_known_by_both_prefixes_and_the_rest_is_left_out(checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    stored = load_file(checkpoint / "model.safetensors")
    assert any("vision_" in name for name in stored)
    other = {
        f"model.{name}".replace(".language_model.model.", ".language_model."): item for name, item in stored.items()
    }
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    save_file(other, tmp_path / "model.safetensors")
    first, second = (read_checkpoint(folder, text_only=True) for folder in (checkpoint, tmp_path))
    assert list(first.tensors) == list(second.tensors)
    assert {name: item.shape for name, item in first.tensors.items()} == {
        name: item.shape for name, item in second.tensors.items()
    }
