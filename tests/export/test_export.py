"""The export folder: what lies in it, what it costs, and that a failure leaves nothing behind."""

import errno
import json
import os
import sys

import numpy as np
import onnx
import pytest

from llmc import __version__
from llmc.bundle import GRAPH_CONTRACT_VERSION, read_export
from llmc.errors import CheckpointError, MissingExtraError, ResourceError, UsageError
from llmc.export import export
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.tokenizer import Tokenizer


@pytest.fixture
def output(tmp_path):
    return tmp_path / "export"


def test_the_folder_holds_graph_weights_tokenizer_and_manifest(checkpoint, output):
    (checkpoint.folder / "chat_template.jinja").write_text("{{ messages }}")
    (checkpoint.folder / "unrelated.txt").write_text("stays behind")
    report = export(checkpoint.folder, output)
    names = {"decoder.onnx", "export.json", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in output.iterdir()} == names
    assert report.files == {name: (output / name).stat().st_size for name in names}
    manifest = read_export(output)
    assert (manifest.llmc_version, manifest.graph_contract) == (__version__, GRAPH_CONTRACT_VERSION)
    assert (manifest.geometry, manifest.source) == (report.geometry, report.source)
    assert manifest.geometry.model_type == "llama"
    assert (output / "model.safetensors").samefile(checkpoint.folder / "model.safetensors")
    assert report.new_bytes == sum(size for name, size in report.files.items() if name != "model.safetensors")


PLACES = {
    "chat_template.jinja": "plain {{ messages[0].content }}",
    "chat_template.json": json.dumps({"chat_template": "json {{ messages[0].content }}"}),
    "additional_chat_templates/tool_use.jinja": "tools {{ messages[0].content }}",
    "tokenizer_config.json": json.dumps({"chat_template": "config {{ messages[0].content }}"}),
}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((0,), ("plain", "plain")),
        ((1,), ("json", "json")),
        ((1, 3), ("config", "config")),  # of a model that sees it would be the processor's
        ((0, 1, 3), ("plain", "plain")),
        ((0, 2), ("plain", "tools")),
        ((0, 2, 3), ("plain", "tools")),
        ((1, 2), ("json", "tools")),
        ((2, 3), ("config", "tools")),
    ],
)
def test_chat_templates_are_found_wherever_transformers_keeps_them(checkpoint, output, files, words):
    for name in [list(PLACES)[index] for index in files]:
        path = checkpoint.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PLACES[name])
    export(checkpoint.folder, output)
    template = ChatTemplate.from_folder(output, Tokenizer.from_folder(output))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    found = [template.render([{"role": "user", "content": "x"}], tools=tools) for tools in (None, [tool])]
    assert found == [f"{word} x" for word in words]


def test_a_chat_template_that_leads_out_of_the_folder_is_refused(checkpoint, output, tmp_path):
    (tmp_path / "secret").write_text("key")
    (checkpoint.folder / "additional_chat_templates").mkdir()
    (checkpoint.folder / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside its folder"):
        export(checkpoint.folder, output)


@pytest.mark.parametrize("asked", [False, True])
def test_weights_are_copied_on_request_and_where_they_cannot_be_linked(asked, checkpoint, output, monkeypatch):
    def other_file_system(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not asked:
        monkeypatch.setattr(os, "link", other_file_system)
    report = export(checkpoint.folder, output, copy=asked)
    copy, original = output / "model.safetensors", checkpoint.folder / "model.safetensors"
    assert not copy.samefile(original) and copy.read_bytes() == original.read_bytes()
    assert report.new_bytes == sum(report.files.values())


def test_an_existing_folder_is_replaced_only_by_force_and_stays_when_that_fails(checkpoint, output):
    output.mkdir()
    (output / "export.json").write_text("an older one")
    with pytest.raises(UsageError, match="--force"):
        export(checkpoint.folder, output)
    checkpoint.set_config(hidden_act="xielu")
    with pytest.raises(CheckpointError, match="hidden_act='xielu'"):
        export(checkpoint.folder, output, force=True)
    assert (output / "export.json").read_text() == "an older one"
    assert set(os.listdir(output.parent)) == {"checkpoint", "export"}
    checkpoint.set_config(hidden_act="silu")
    export(checkpoint.folder, output, force=True)
    assert read_export(output).geometry.model_type == "llama"


@pytest.mark.parametrize("step", ["linking weights and tokenizer", "checking the graph"])
def test_interrupting_leaves_nothing_behind(checkpoint, output, step):
    def interrupt(current: str) -> None:
        if current == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(checkpoint.folder, output, progress=interrupt)
    assert os.listdir(output.parent) == ["checkpoint"]


def test_a_full_disk_is_named_and_leaves_nothing_behind(checkpoint, output, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmc.export.writer.ir.save", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        export(checkpoint.folder, output)
    assert os.listdir(output.parent) == ["checkpoint"]


@pytest.mark.parametrize("module", ["torch", "onnx", "onnx_ir", "onnxscript"])
def test_a_missing_extra_is_one_sentence(checkpoint, output, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=rf"{module} is not installed.*pip install .*cpu 'onnx>=.* 'torch>=.* 'onnxscript>="
    ):
        export(checkpoint.folder, output)


def test_a_decoder_that_never_encodes_positions_is_exported(checkpoint, output):
    changes = {"model_type": "smollm3", "no_rope_layers": [0], "num_key_value_heads": 2, "tie_word_embeddings": False}
    checkpoint.set_config(**changes)
    export(checkpoint.folder, output)
    [attention] = [
        node
        for node in onnx.load(output / "decoder.onnx", load_external_data=False).graph.node
        if node.op_type == "CachedAttention"
    ]
    assert attention.input[6] == "model.layers.0.self_attn.rotary_emb.inv_freq"


def test_weights_at_odd_offsets_are_read_right(checkpoint, output, onnxruntime_run):
    """A header of odd length shifts every tensor off its alignment."""
    export(checkpoint.folder, output)
    path = checkpoint.folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padding = 1 + length % 2
    path.unlink()
    path.write_bytes(
        (length + padding).to_bytes(8, "little") + data[8 : 8 + length] + b" " * padding + data[8 + length :]
    )
    shifted = output.parent / "shifted"
    export(checkpoint.folder, shifted)
    cache = {f"past_key_values.0.{part}": np.zeros((1, 2, 4, 4), np.float32) for part in ("key", "value")}
    feeds = {
        "input_ids": np.array([[3, 7]]),
        "past_lengths": np.array([0]),
        "logit_indices": np.array([[0, 1]]),
        **cache,
    }
    for a, b in zip(onnxruntime_run(output)(feeds), onnxruntime_run(shifted)(feeds), strict=True):
        np.testing.assert_array_equal(a, b)
