"""Manifests: written, read back, and refused when anything about them or their files is wrong."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc import bundle, inventory
from llmc.bundle import BUNDLE_MANIFEST, DECODER_FILE, EXPORT_MANIFEST, ExportManifest, FileEntry, Manifest
from llmc.errors import BundleError
from llmc.publish import file_entries

CONTENT = b"weights" * 1000
FILES = ["compiled-decode.onnx", "decode.onnx", "weights.bin"]


@pytest.fixture
def whole(manifest: Manifest, tmp_path: Path) -> Manifest:
    """The manifest of a bundle with its files, which lie in ``tmp_path``."""
    for name in FILES:
        (tmp_path / name).write_bytes(CONTENT)
    return dataclasses.replace(manifest, files=file_entries(tmp_path, FILES))


@pytest.fixture
def folder(whole: Manifest, tmp_path: Path) -> Path:
    """That bundle, written."""
    bundle.write_manifest(whole, tmp_path)
    return tmp_path


@pytest.fixture
def export_manifest(manifest: Manifest) -> ExportManifest:
    parts = manifest.geometry, manifest.source, manifest.generation, manifest.notes
    return ExportManifest(bundle.SCHEMA_VERSION, "0.1.0", 2, *parts)


def edit(folder: Path, change: Any, name: str = BUNDLE_MANIFEST) -> None:
    """Apply ``change`` to the parsed manifest and write it back."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


# ------------------------------------------------------------------------------------------------------ round trips


def test_a_bundle_manifest_survives_the_disk(folder: Path, whole: Manifest):
    assert bundle.read_bundle(folder) == whole


def test_a_bundle_without_quality_or_golden_prompts_survives_the_disk(folder: Path, whole: Manifest):
    bare = dataclasses.replace(whole, quality=None, golden=())
    bundle.write_manifest(bare, folder)
    assert bundle.read_bundle(folder) == bare


def test_an_export_manifest_survives_the_disk(tmp_path: Path, export_manifest: ExportManifest):
    bundle.write_manifest(export_manifest, tmp_path)
    (tmp_path / DECODER_FILE).write_bytes(b"graph")
    (tmp_path / bundle.TOKENIZER_FILE).write_text("{}")
    assert bundle.read_export(tmp_path) == export_manifest


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_floats_survive_json_to_the_bit(values: list[float]):
    quoted = json.loads(json.dumps(values))
    assert bundle.decode(tuple[float, ...], quoted) == tuple(values)


def test_whole_numbers_are_read_as_floats_where_floats_are_meant():
    decoded = bundle.decode(float, 1)
    assert decoded == 1.0
    assert type(decoded) is float


def test_names_in_any_script_survive_the_disk(folder: Path, whole: Manifest):
    named = dataclasses.replace(whole, source=dataclasses.replace(whole.source, name="小さな模型 🐍"))
    bundle.write_manifest(named, folder)
    assert bundle.read_bundle(folder).source.name == "小さな模型 🐍"


def test_a_value_that_is_no_number_is_never_written(tmp_path: Path, manifest: Manifest):
    quality = dataclasses.replace(manifest.quality, reference_perplexity=math.nan)
    with pytest.raises(ValueError, match="JSON"):
        bundle.write_manifest(dataclasses.replace(manifest, quality=quality), tmp_path)


# --------------------------------------------------------------------------------------------------- strict decoding


def drop(*path: str) -> Any:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def put(value: Any, *path: Any) -> Any:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


DAMAGE = [
    (drop("llmc_version"), "missing field llmc_version"),
    (drop("geometry", "layers"), "missing field geometry.layers"),
    (put(1, "extra"), "unknown field extra"),
    (put(1, "limits", "extra"), "unknown field limits.extra"),
    (put("4", "geometry", "layers"), "geometry.layers is '4', expected int"),
    (put(4.0, "geometry", "layers"), "geometry.layers is 4.0, expected int"),
    (put(True, "geometry", "layers"), "geometry.layers is True, expected int"),
    (put(1, "geometry", "tied_head"), "geometry.tied_head is 1, expected bool"),
    (put(True, "quality", "phases", "decode", "mean_kl"), "quality.phases.decode.mean_kl is True, expected float"),
    (
        put(None, "quality", "phases", "decode", "perplexity"),
        "quality.phases.decode.perplexity is None, expected float",
    ),
    (drop("recipe", "budget"), "missing field recipe.budget"),
    (put("0.1", "recipe", "budget", "max_kl"), "recipe.budget.max_kl is '0.1', expected float"),
    (put(["int8"], "recipe", "layers"), r"recipe.layers is \['int8'\], expected dict"),
    (put(8, "recipe", "layers", "*.down_proj"), r"recipe.layers.\*.down_proj is 8, expected str"),
    (put("yes", "recipe", "calibration", "default"), "recipe.calibration.default is 'yes', expected bool"),
    (put(None, "source"), "source is None, expected an object"),
    (put([], "graphs"), r"graphs is \[\], expected dict"),
    (put({}, "golden"), "golden is {}, expected tuple"),
    (put("x", "golden", 0, "tokens", 1), r"golden\[0\].tokens\[1\] is 'x', expected int"),
    (put(None, "files", "weights.bin"), "files.weights.bin is None, expected an object"),
    (put("much", "generation", "top_k"), "generation.top_k is 'much', expected int"),
    (put("1", "schema_version"), "no schema_version"),
    (put(0, "schema_version"), "no schema_version"),
    (put(True, "schema_version"), "no schema_version"),
    (put(10**400, "quality", "phases", "decode", "mean_kl"), "too large"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_manifest_is_refused_by_the_name_of_the_field(folder: Path, change: Any, message: str):
    edit(folder, change)
    with pytest.raises(BundleError, match=message) as caught:
        bundle.read_bundle(folder)
    assert str(folder / BUNDLE_MANIFEST) in str(caught.value)
    assert "llmc build" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe{}", b"[1]", b"null", b'"x"', b"[" * 100_000, b'{"schema_version": 1'], ids=repr
)
def test_a_manifest_that_is_no_json_object_is_refused(folder: Path, content: bytes):
    (folder / BUNDLE_MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match="corrupt"):
        bundle.read_bundle(folder)


def test_a_value_of_any_length_is_quoted_in_part(folder: Path):
    edit(folder, put("x" * 5000, "geometry", "layers"))
    with pytest.raises(BundleError) as caught:
        bundle.read_bundle(folder)
    assert len(str(caught.value)) < 300 + len(str(folder))


# --------------------------------------------------------------------------------------------------------- versions


def test_a_newer_schema_is_refused_with_the_version_that_wrote_it(folder: Path):
    edit(folder, put(bundle.SCHEMA_VERSION + 1, "schema_version"))
    edit(folder, put("9.9.9", "llmc_version"))
    with pytest.raises(BundleError, match=r"version 7, written by llmc 9.9.9.*up to 6.*pip install -U llmc-deploy"):
        bundle.read_bundle(folder)


def test_a_newer_schema_is_refused_before_its_unknown_fields_are(folder: Path):
    edit(folder, put("new", "novelty"))
    edit(folder, put(bundle.SCHEMA_VERSION + 1, "schema_version"))
    with pytest.raises(BundleError, match=f"schema version {bundle.SCHEMA_VERSION + 1}"):
        bundle.read_bundle(folder)


def test_an_older_schema_is_refused_before_its_missing_fields_are(folder: Path):
    edit(folder, drop("recipe", "scheme"))
    edit(folder, put(bundle.SCHEMA_VERSION - 1, "schema_version"))
    with pytest.raises(
        BundleError, match=r"schema version 5 of an older llmc \(0.1.0\), this one reads 6; make it again"
    ):
        bundle.read_bundle(folder)


DEVICE = {"context": 1, "weights": 1, "workspace": 1, "cache_per_token": 1, "logits": 1}

IMPOSSIBLE = [
    (put(0, "geometry", "layers"), "geometry"),
    (put(3, "geometry", "attentions", 0, "kv_heads"), "geometry"),
    (put(-1, "geometry", "attentions", 0, "window"), "geometry"),
    (put("9", "geometry", "attentions", 0, "cache"), "geometry"),
    (put([2], "geometry", "caches", 0, "shape"), "geometry"),
    (put("1", "geometry", "caches", 0, "name"), "geometry"),
    (put(2, "geometry", "linears", 0, "layer"), "geometry"),
    (put("lm_head", "geometry", "linears", 0, "name"), "geometry"),
    (put("nobody", "geometry", "linears", 0, "producer"), "geometry"),
    (put("nobody", "geometry", "linears", 0, "reads"), "geometry"),
    (put([], "geometry", "linears"), "geometry"),
    (put([], "geometry", "caches"), "geometry"),
    (put(513, "limits", "max_context"), "limits"),
    (put(0, "limits", "prefill_chunk"), "limits"),
    (put(bundle.MOST_ROWS + 1, "limits", "max_batch"), "limits"),
    (put(inventory.LARGEST_SIZE, "geometry", "vocab_size"), "geometry"),
    (put(inventory.LARGEST_SIZE, "geometry", "max_positions"), "geometry"),
    (put(0, "geometry", "attentions", 0, "heads"), "geometry"),
    (put(-1, "memory", "workspace"), "memory"),
    (put({**DEVICE, "workspace": -1}, "device"), "device"),
    (put({**DEVICE, "weights": 10**400}, "device"), "device"),
    (put({}, "graphs"), "graphs"),
    (put("int4", "cache"), "cache"),
    (put("1.x", "target", "engine_minimum"), "target"),
]


@pytest.mark.parametrize(("change", "part"), IMPOSSIBLE, ids=[part for _, part in IMPOSSIBLE])
def test_numbers_that_no_build_writes_are_refused(folder: Path, change: Any, part: str):
    edit(folder, change)
    with pytest.raises(BundleError, match=rf"the {part} in llmc.json cannot be right; build the bundle again"):
        bundle.read_bundle(folder)


def test_another_graph_contract_is_refused(folder: Path):
    edit(folder, put(bundle.GRAPH_CONTRACT_VERSION + 1, "graph_contract"))
    with pytest.raises(BundleError, match="graph contract 3, not 2; make it again with: llmc build"):
        bundle.read_bundle(folder)


# ------------------------------------------------------------------------------------------------------------ files


def test_a_missing_file_is_named(folder: Path):
    (folder / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights.bin is missing, 7000 expected"):
        bundle.read_bundle(folder)


def test_a_folder_in_the_place_of_a_file_counts_as_missing(folder: Path):
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").mkdir()
    with pytest.raises(BundleError, match=r"weights.bin is missing"):
        bundle.read_bundle(folder)


def test_a_truncated_file_is_named_with_both_sizes(folder: Path):
    (folder / "weights.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(BundleError, match=r"weights.bin has 6999 bytes, 7000 expected"):
        bundle.read_bundle(folder)


def test_verify_yields_each_file_once_it_is_whole(folder: Path):
    manifest = bundle.read_bundle(folder)
    assert list(bundle.verify_files(folder, manifest)) == FILES


def test_verify_notices_one_flipped_bit_that_reading_does_not(folder: Path):
    (folder / "weights.bin").write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:])
    manifest = bundle.read_bundle(folder)
    with pytest.raises(BundleError, match=r"weights.bin is corrupt"):
        list(bundle.verify_files(folder, manifest))


def test_verify_names_a_file_that_vanished(folder: Path):
    manifest = bundle.read_bundle(folder)
    (folder / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights.bin cannot be read"):
        list(bundle.verify_files(folder, manifest))


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "a/../../outside.bin"])
def test_a_manifest_that_leads_outside_its_folder_is_refused(folder: Path, name: str):
    edit(folder, put(dataclasses.asdict(FileEntry(1, "0" * 64)), "files", name))
    with pytest.raises(BundleError, match="lies outside"):
        bundle.read_bundle(folder)


def test_a_graph_that_no_hash_covers_is_refused(folder: Path):
    edit(folder, put("other.onnx", "graphs", "decode", "file"))
    with pytest.raises(BundleError, match=r"'other.onnx', which is unlisted"):
        bundle.read_bundle(folder)


def test_a_file_name_that_no_file_system_takes_counts_as_missing(folder: Path):
    edit(folder, put(dataclasses.asdict(FileEntry(1, "0" * 64)), "files", "x" * 5000))
    with pytest.raises(BundleError, match="is missing"):
        bundle.read_bundle(folder)


@pytest.mark.parametrize(
    ("read", "name", "command"),
    [(bundle.read_bundle, BUNDLE_MANIFEST, "llmc build"), (bundle.read_export, EXPORT_MANIFEST, "llmc export")],
)
def test_a_folder_of_someone_else_is_refused_with_the_command_to_use(tmp_path: Path, read, name: str, command: str):
    for place in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(BundleError, match=f"no {name} here.*{command}"):
            read(place)


def test_an_unreadable_manifest_is_named(folder: Path):
    (folder / BUNDLE_MANIFEST).unlink()
    (folder / BUNDLE_MANIFEST).mkdir()
    with pytest.raises(BundleError, match=r"llmc.json cannot be read \(Is a directory\)"):
        bundle.read_bundle(folder)


def test_an_export_without_its_graph_is_refused(tmp_path: Path, export_manifest: ExportManifest):
    bundle.write_manifest(export_manifest, tmp_path)
    with pytest.raises(BundleError, match=r"decoder.onnx is missing; export the checkpoint again"):
        bundle.read_export(tmp_path)


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_cache_bytes_follow_the_formula(manifest: Manifest):
    # 2 (keys and values) x 2 layers x 2 heads x 16 values x 4 bytes = 512 per position
    assert manifest.geometry.cache_bytes(positions=10) == 5120
    assert manifest.geometry.cache_bytes(positions=10, batch=3, bytes_per_value=2) == 7680


def test_a_memory_plan_is_the_sum_of_its_parts(manifest: Manifest):
    # engine + tokenizer + weights + embedding + workspace and its share per token + cache per token and row + logits
    expected = 500 + 50 + 1000 + 200 + (64 + 8 * 10) + 16 * 10 * 2 + 30 * 2
    assert manifest.memory.total(positions=10, batch=2) == expected
    assert sum(manifest.memory.parts(positions=10, batch=2).values()) == expected


@pytest.mark.parametrize(("name", "kind"), [("export.json", "an export"), ("config.json", "a checkpoint")])
def test_what_a_bundle_has_yet_to_be_built_of_is_named_with_the_command(tmp_path: Path, name: str, kind: str):
    (tmp_path / name).write_text("{}")
    with pytest.raises(BundleError) as caught:
        bundle.read_bundle(tmp_path)
    expected = f"{tmp_path} is {kind}, expected a bundle; build one with: llmc build {tmp_path} -o BUNDLE"
    assert str(caught.value) == expected


def test_an_export_whose_inventory_does_not_fit_together_is_refused(tmp_path: Path, export_manifest: ExportManifest):
    geometry = dataclasses.replace(export_manifest.geometry, linears=())
    bundle.write_manifest(dataclasses.replace(export_manifest, geometry=geometry), tmp_path)
    with pytest.raises(BundleError, match=r"the geometry in export.json cannot be right; export the checkpoint again"):
        bundle.read_export(tmp_path)
