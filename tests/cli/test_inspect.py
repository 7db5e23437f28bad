"""``llmc inspect``: the right numbers for a checkpoint, an export and a bundle, without an engine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.geometries import uniform

from llmc import bundle
from llmc.bundle import read_bundle
from llmc.cli.inspect import geometry_rows
from llmc.export.families import read_config
from llmc.export.keys import Keys
from llmc.optimize.plan.memory import memory_plan
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.publish import file_entries
from llmc.runtime.kv.budget import plan_run


@pytest.fixture
def bundle_folder(tmp_path: Path, manifest: bundle.Manifest) -> Path:
    (tmp_path / "decode.onnx").write_bytes(b"x" * 1500)
    entries = file_entries(tmp_path, ["decode.onnx"])
    bundle.write_manifest(replace(manifest, files=entries), tmp_path)
    return tmp_path


@pytest.fixture
def export_folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """What an export of the small model looks like to ``inspect``; its graph is not read."""
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    geometry = uniform("qwen3", config["num_hidden_layers"], 256, 768, 8, 4, 32, 4096, 2048, True, (0,) * 6)
    source = bundle.Source("tiny", "f" * 64, "float16", 5_000_000)
    generation = bundle.Generation((0,), None, False, None, None, None, None)
    versions = (bundle.SCHEMA_VERSION, "0.1.0", bundle.GRAPH_CONTRACT_VERSION)
    bundle.write_manifest(
        bundle.ExportManifest(*versions, geometry, source, generation, ("a note",), {"float16": 11541760}), tmp_path
    )
    (tmp_path / bundle.DECODER_FILE).write_bytes(b"graph")
    (tmp_path / bundle.TOKENIZER_FILE).write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tiny_checkpoint / "model.safetensors")
    return tmp_path


def rows(out: str) -> dict[str, str]:
    """First column -> the rest of the line."""
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in out.splitlines()}


def test_a_checkpoint_shows_its_geometry_and_bytes(llmc, tiny_checkpoint: Path):
    shown = rows(llmc("inspect", tiny_checkpoint).out)
    assert shown["family"] == "qwen3"
    assert shown["attention"] == "8 heads of 32, 4 for keys and values"
    assert shown["window"] == "all positions"
    # 2 (keys and values) x 6 layers x 4 heads x 32 values x 2048 positions x 4 bytes
    assert "12.6 MB cache (float32)" in shown["memory at 2048 tokens x 1"]


def test_an_export_shows_the_weights_behind_its_links(llmc, export_folder: Path, tiny_checkpoint: Path):
    summary = json.loads(llmc("inspect", export_folder, "--json").out)
    assert summary["kind"] == "export"
    assert summary["bundle"] is None
    assert rows(llmc("inspect", export_folder).out)["note"] == "a note"
    assert summary["weights"] == json.loads(llmc("inspect", tiny_checkpoint, "--json").out)["weights"]


def test_a_bundle_shows_what_it_was_built_for(llmc, bundle_folder: Path):
    shown = rows(llmc("inspect", bundle_folder).out)
    assert shown["target"] == "cpu, onnxruntime 1.31.1 (needs 1.31.0 or newer)"
    assert shown["recipe"].startswith("default: int8, ") and "blocks of 128, split phases" in shown["recipe"]
    assert shown["limits"] == "512 tokens x 1, prefill in chunks of 128"
    assert shown["window"] == "all positions (1 layers), the last 128 positions (1 layers)"
    assert shown["decode quality"].startswith("KL 0.00200 mean, ")
    assert shown["decode.onnx"] == "1.5 kB"
    assert shown["note"] == "generation_config.json: num_beams=4 is not supported and was left out"


def test_of_a_model_in_stages_each_that_is_here_is_shown_and_planned_and_the_others_are_named(
    llmc, bundle_folder: Path, manifest: bundle.Manifest
):
    """The first of three stages lies beside the last, and the second is on another box."""
    geometry = uniform("llama", 6, 64, 128, 4, 2, 16, 320, 512, True, (0,) * 6)
    first = replace(manifest, geometry=geometry, stage=bundle.Stage(0, (0, 1, 4)), golden=(), quality=None)
    first = replace(
        first,
        memory=manifest.memory.without("weights").add(bundle.Part("weights", 7_000_000)),
        files=read_bundle(bundle_folder).files,
    )
    (bundle_folder / "stage-0").mkdir()
    shutil.copy(bundle_folder / "decode.onnx", bundle_folder / "stage-0")
    bundle.write_manifest(first, bundle_folder / "stage-0")
    hashed = bundle.sha256_file(bundle_folder / "stage-0" / bundle.BUNDLE_MANIFEST)
    last = replace(first, stage=bundle.Stage(2, (0, 1, 4), (hashed, "0" * 64)), memory=manifest.memory)
    bundle.write_manifest(last, bundle_folder)
    shown = rows(llmc("inspect", bundle_folder).out)
    assert shown["stage 0"].startswith("layers 0 to 0: 7.0 MB = 500 B engine + 50 B tokenizer + 7.0 MB weights")
    assert shown["stage"] == "2, the last of 3: layers 4 to 5" and shown["stage 1"] == "layers 1 to 3: elsewhere"
    assert shown["memory at 512 tokens x 1"].endswith(" (this stage alone)")
    assert shown["stage-0/decode.onnx"] == "1.5 kB" and "3.0 kB graphs" in shown["on disk"]
    planned = json.loads(llmc("plan", bundle_folder, "--json").out)
    assert {it["phase"]: it["layers"] for it in planned["phases"]} == {"run stage 0": [0, 0], "run stage 2": [4, 5]}
    assert planned["elsewhere"] == [{"number": 1, "first": 1, "last": 3, "memory": None}]
    assert llmc("plan", bundle_folder).out.endswith("elsewhere: stage 1, layers 1 to 3\n")


def test_a_bundle_shows_its_adapters_and_what_its_weights_were_made_from(llmc, bundle_folder):
    adapters = (bundle.MergedAdapter("sql", "a" * 64, 0.5), bundle.MergedAdapter("tone", "b" * 64, 1.0))
    manifest = read_bundle(bundle_folder)
    source = replace(manifest.source, dtype="int4", adapters=adapters)
    bundle.write_manifest(replace(manifest, source=source), bundle_folder)
    out = llmc("inspect", bundle_folder).out
    assert rows(out)["model"].endswith(" parameters, made from int4")
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("adapter")] == [
        "sql, 0.5 times",
        "tone, 1 times",
    ]


def test_a_bundles_memory_is_its_own_plan(llmc, bundle_folder: Path):
    summary = json.loads(llmc("inspect", bundle_folder, "--json").out)
    # Two steps of 256 positions.
    assert summary["memory"] == {
        "context": 512,
        "batch": 1,
        "parts": {
            "engine": 500,
            "tokenizer": 50,
            "weights": 1000,
            "embedding": 200,
            "cache": 16 * 512,
            "workspace": 64 + 8 * 512,
            "logits": 30,
        },
        "total": 500 + 50 + 1000 + 200 + 64 + (16 + 8) * 512 + 30,
    }


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_bytes_on_disk_are_those_of_the_files_by_what_they_are(llmc, tiny_bundle: Path, command: str):
    sizes = {path.name: path.stat().st_size for path in tiny_bundle.iterdir()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    found = json.loads(llmc(command, tiny_bundle, "--json").out)["disk"]
    assert found == {
        "weights": sizes["weights.bin"],
        "graphs": graphs,
        "text": sum(sizes.values()) - sizes["weights.bin"] - graphs,
    }
    assert " weights + " in next(line for line in llmc(command, tiny_bundle).out.splitlines() if "on disk" in line)


def test_a_bundle_holds_its_weights_once(tiny_bundle: Path):
    graphs = read_bundle(tiny_bundle).graphs.values()
    stored = (tiny_bundle / "weights.bin").stat().st_size
    assert stored <= 1.1 * sum(graph.weight_bytes for graph in graphs)


def test_experts_states_and_per_layer_tables_are_named_and_planned_apart():
    """What experts and states take of memory, and what is only mapped of a file: no part of the sum."""
    limits, recipe = bundle.Limits(64, 2, 64), resolve(Request(), capabilities("cpu"), 64, "x")[0]
    common = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
    common |= {"head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "intermediate_size": 96}
    mixture = {
        "model_type": "qwen3_5_moe_text",
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    found = read_config(Keys(common | mixture, "x")).geometry
    shown, parts = dict(geometry_rows(found)), memory_plan(found, limits, recipe, 0).parts(64, 2)
    assert shown["experts"] == "3 of 8 for each token, inner size 32"
    assert shown["states"] == "delta of 3x8192 and 32x128x128 values"
    assert parts["experts"] > 4 * 8 * 3 * 32 * 64 and parts["states"] == 2 * 3 * 4 * (3 * 8192 + 32 * 128 * 128)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    table = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 16,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
    }
    found = read_config(Keys(common | table, "x")).geometry
    plan = memory_plan(found, limits, recipe, 0)
    assert dict(geometry_rows(found))["per-layer table"] == "96 rows of 6 x 8"
    assert plan_run(plan, limits).per_layer_table == plan["per-layer table"].fixed > 96 * 6 * 8
    assert plan.total(64) == plan.without("per-layer table").total(64)
