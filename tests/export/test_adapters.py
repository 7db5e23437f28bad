"""Merged adapters: what PEFT computes on transformers, and what is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from doubles.ggufs import write_gguf
from doubles.refusals import about
from safetensors.numpy import load_file, save_file

from llmc.bundle import read_export
from llmc.errors import CheckpointError, UsageError
from llmc.export import export
from llmc.export.sources.adapters import WEIGHTS_FILE
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.streaming import StreamedDecoder

# Of logits in float32, up to about 20 here. The merged product is rounded once where PEFT adds two; a scale that is off
# by 1 % costs more than 1e-2.
TOLERANCE = 1e-4
Q = "model.layers.0.self_attn.q_proj"
IDS = np.random.default_rng(1).integers(0, 96, (2, 20))
PATTERNS = {"rank_pattern": {"q_proj": 2, "^model.layers.1.self_attn.v_proj": 8}, "alpha_pattern": {"down_proj": 3}}
TRAINED = {
    "linears-patterns-biases-head": (
        "llama-biases",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "bias": "lora_only",
            "modules_to_save": ["lm_head"],
            **PATTERNS,
        },
    ),
    "packed-rows": ("phi3-packed-window-fp16", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "packed-by-head": ("gpt_neox-two-norms", {"target_modules": ["query_key_value", "dense"]}),
    "transposed": ("gpt2-scale-by-layer", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "dora": ("mistral-window-wide-heads", {"target_modules": r".*\.(q_proj|down_proj)", "use_dora": True}),
    "embedding": ("mistral-window-wide-heads", {"target_modules": ["embed_tokens", "o_proj"]}),
    "norms-less-one-bf16": ("gemma-bf16", {"target_modules": ["k_proj"], "modules_to_save": ["input_layernorm"]}),
    "recurrent": ("granitemoehybrid-mamba-bf16", {"target_modules": ["in_proj", "out_proj", "q_proj"]}),
}


def train(model, folder: Path, **config):
    """Save an adapter with random factors, and return the model that has it."""
    peft = pytest.importorskip("peft")
    import torch

    found = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **config}))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "embedding" in name else 0.1))
    found.save_pretrained(folder)
    return found.eval()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:`is_gradient_checkpointing`")  # of PEFT
@pytest.mark.parametrize("name", TRAINED)
def test_logits_equal_peft(name, random_checkpoint, transformers_model, onnxruntime_run, tmp_path):
    base, config = TRAINED[name]
    checkpoint = random_checkpoint(base)
    reference = transformers_model(checkpoint)
    plain = reference(IDS)
    reference.model = train(reference.model, tmp_path / "adapter", **config)
    export(checkpoint, tmp_path / "export", adapters=[(tmp_path / "adapter", 1.0)])
    geometry = read_export(tmp_path / "export").geometry
    feeds = {"input_ids": IDS, "past_lengths": np.zeros(2, np.int64), "logit_indices": np.tile(np.arange(20), (2, 1))}
    feeds |= {name: np.zeros(it.shape_of(2, 20), np.float32) for it in geometry.caches for name in it.inputs}
    feeds |= {"new_lengths": np.full(2, 20)} if geometry.has_states else {}
    feeds |= {"text_lengths": np.full(2, 20)} if geometry.long_after else {}
    logits = onnxruntime_run(tmp_path / "export")(feeds)[0]
    wanted = reference(IDS)
    assert np.abs(logits - wanted).max() <= TOLERANCE
    assert np.abs(logits - plain - 0.99 * (wanted - plain)).max() > 10 * TOLERANCE  # a factor that is off by 1 %


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "sql", tensors())


def tensors(module: str = Q, outputs: int = 64, inputs: int = 64, rank: int = 4) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(2).standard_normal
    parts = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
    return {f"base_model.model.{module}.{part}.weight": draw(shape).astype(np.float32) for part, shape in parts.items()}


def write_adapter(folder: Path, found: dict[str, np.ndarray], **config) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(found, folder / WEIGHTS_FILE)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def llama(random_checkpoint):
    return random_checkpoint("llama-biases")


def test_adapters_add_up_and_what_they_leave_alone_stays_a_reference(llama, adapter, tmp_path):
    export(llama, tmp_path / "export", adapters=[(adapter, 0.5), (adapter, -2.0)])
    a, b = tensors().values()
    base = load_file(llama / "model.safetensors")[f"{Q}.weight"]
    merged = StreamedDecoder(tmp_path / "export")
    np.testing.assert_allclose(merged.rows(f"{Q}.weight").numpy(), base - 1.5 * 6 / 4 * b @ a, atol=1e-5)
    found = read_checkpoint(llama, [(adapter, 0.5), (adapter, -2.0)])
    assert [name for name, it in found.tensors.items() if not isinstance(it, StoredTensor)] == [f"{Q}.weight"]
    source, plain = read_export(tmp_path / "export").source, read_checkpoint(llama).source
    assert [(it.name, it.scale) for it in source.adapters] == [("sql", 0.5), ("sql", -2.0)]
    assert source.fingerprint != plain.fingerprint


def test_an_adapter_of_another_base_is_merged_with_a_note(llama, tmp_path):
    other = write_adapter(tmp_path / "sql", tensors(), base_model_name_or_path="people/other-7b")
    assert "sql was trained on people/other-7b" in read_checkpoint(llama, [(other, 1.0)]).notes


def nan(found):
    found[f"base_model.model.{Q}.lora_B.weight"][3, 1] = np.nan
    return found


HALF = dict(list(tensors().items())[:1])
REFUSED = {
    "another method": (tensors(), {"peft_type": "LOHA"}, "peft_type='LOHA' is unsupported; expected one of LORA"),
    "an unknown key": (tensors(), {"use_magic": True}, "use_magic=True is not known to llmc"),
    "a changed base": (tensors(), {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is unsupported"),
    "more than factors": (tensors(), {"lora_bias": True}, "lora_bias=True is unsupported; expected nothing"),
    "a wild pattern": (tensors(), {"rank_pattern": {"(a+)+": 4}}, "rank_pattern='(a+)+' is unsupported"),
    "another rank": (tensors(), {"r": 8}, "factors of rank 4 and 4, but adapter_config.json says 8"),
    "no number": (nan(tensors()), {}, "lora_B.weight holds NaN or infinite values"),
    "one factor": (HALF, {}, "has lora_A [4, 64]; expected matrices lora_A and lora_B: download the adapter again"),
    "no magnitude": (tensors(), {"use_dora": True}, "and lora_magnitude_vector for a linear"),
    "an unknown tensor": ({"x.lora_E": np.ones(4, np.float32)}, {}, "x.lora_E of type F32 is unsupported"),
    "another width": (tensors(inputs=32), {}, "q_proj.weight as [64, 32], but"),
    "a module too much": (tensors("model.layers.9.self_attn.q_proj"), {}, "layers.9.self_attn.q_proj.weight, which"),
    "an expert": (tensors("model.layers.0.mlp.experts.1.up_proj"), {}, "lacks or has as one expert of several"),
    "nothing": ({}, {}, "this adapter has no tensors"),
    "another whole tensor": ({f"{Q}.bias": np.ones(63, np.float32)}, {}, "q_proj.bias as [63], but"),
}


@pytest.mark.threat("adapter-files")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name, llama, tmp_path):
    found, config, message = REFUSED[name]
    folder = write_adapter(tmp_path / "sql", found, **config)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(llama, [(folder, 1.0)])
    assert message in str(error.value)


def write_gguf_adapter(path: Path, found: dict[str, np.ndarray], alpha: float | None = 6.0) -> Path:
    """Factors of q_proj as llama.cpp's converter writes them: rows of its heads in pairs."""
    a, b = found.values()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", a)
    writer.add_tensor("blk.0.attn_q.weight.lora_b", b.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(b.shape).copy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def test_a_gguf_adapter_gives_the_weights_of_its_peft_folder(llama, tmp_path):
    model = write_gguf(llama, tmp_path / "model.gguf")
    adapter = write_gguf_adapter(tmp_path / "sql.gguf", tensors())
    export(model, tmp_path / "export", adapters=[(adapter, 0.5)])
    a, b = tensors().values()
    base = load_file(llama / "model.safetensors")[f"{Q}.weight"]
    rows = StreamedDecoder(tmp_path / "export").rows(f"{Q}.weight").numpy()
    np.testing.assert_allclose(rows, base + 0.5 * 6 / 4 * b @ a, atol=1e-5)
    with pytest.raises(CheckpointError, match="an adapter in a GGUF file for"):
        read_checkpoint(llama, [(adapter, 1.0)])
    with pytest.raises(CheckpointError, match="has no two factors of one rank"):
        read_checkpoint(
            model,
            [(write_gguf_adapter(tmp_path / "b.gguf", tensors(rank=4) | dict(list(tensors(rank=3).items())[:1])), 1.0)],
        )
    with pytest.raises(CheckpointError, match="of type 'lora' with alpha None; expected a LoRA adapter"):
        read_checkpoint(model, [(write_gguf_adapter(tmp_path / "c.gguf", tensors(), None), 1.0)])


def test_a_tied_table_is_not_changed_alone(random_checkpoint, tmp_path):
    folder = write_adapter(tmp_path / "sql", tensors("lm_head", 96))
    with pytest.raises(CheckpointError, match="embedding and head are one tensor"):
        read_checkpoint(random_checkpoint("qwen2-tied-bf16"), [(folder, 1.0)])


@pytest.mark.threat("adapter-files")
def test_folders_and_scales_are_checked(llama, adapter):
    with pytest.raises(UsageError, check=about("scale")):
        read_checkpoint(llama, [(adapter, float("nan"))])
    with pytest.raises(UsageError, check=about("scale")):
        read_checkpoint(llama, [(adapter, 0.0)])
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
        read_checkpoint(llama, [(adapter, 1.0)])
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json; expected an adapter's folder"):
        read_checkpoint(llama, [(llama, 1.0)])
