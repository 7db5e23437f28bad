"""Manifests: written, read back, and refused when anything about them or their files is wrong."""

import dataclasses
import json
import math
import os
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.geometries import VISION

from llmc import bundle
from llmc.bundle import BUNDLE_MANIFEST, EXPORT_MANIFEST, SCHEMA_VERSION, ExportManifest, FileEntry, Manifest, integrity
from llmc.errors import BundleError
from llmc.publish import file_entries

CONTENT = b"weights" * 1000
FILES = ["decode.onnx", "prefill.onnx", "weights.bin"]


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
    return ExportManifest(SCHEMA_VERSION, "0.1.0", bundle.GRAPH_CONTRACT_VERSION, *parts, {"float32": 4})


def edit(folder: Path, change: Any, name: str = BUNDLE_MANIFEST) -> None:
    """Apply ``change`` to the parsed manifest and write it back."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


# ------------------------------------------------------------------------------------------------------ round trips


def test_a_bundle_manifest_survives_the_disk(folder: Path, whole: Manifest):
    assert bundle.read_bundle(folder) == whole


def test_an_export_of_a_model_that_sees_survives_the_disk(tmp_path: Path, export_manifest: ExportManifest):
    geometry = dataclasses.replace(export_manifest.geometry, vision=VISION, vocab_size=1 << 16)
    seeing = dataclasses.replace(export_manifest, geometry=geometry)
    bundle.write_manifest(seeing, tmp_path)
    for name in ("decoder.onnx", "tokenizer.json"):
        (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(BundleError, match=r"vision.onnx is missing"):
        bundle.read_export(tmp_path)
    (tmp_path / "vision.onnx").write_bytes(CONTENT)
    assert bundle.read_export(tmp_path) == seeing


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
    (put(10**400, "quality", "phases", "decode", "mean_kl"), "an integer of 401 digits"),
    (put(0, "geometry", "layers"), "geometry.layers is 0, expected 1 ... 4095"),
    (put(1 << 31, "geometry", "hidden_size"), "geometry.hidden_size is 2147483648, expected 1 ... 1048575"),
    (put(-1, "geometry", "attentions", 0, "window"), r"geometry.attentions\[0\].window is -1, expected 0 ..."),
    (put(0, "limits", "prefill_chunk"), "limits.prefill_chunk is 0, expected 1 ..."),
    (put(1025, "limits", "max_batch"), "limits.max_batch is 1025, expected 1 ... 1024"),
    (put(-1, "memory", "uses", 0, "fixed"), r"memory.uses\[0\].fixed is -1, expected 0 ..."),
    (put(10**39, "memory", "uses", 0, "per_row"), r"memory.uses\[0\].per_row is 10{39}, expected 0 ..."),
    (put([{}] * 80_000, "golden"), r"golden is 80000 items, expected 0 ... 16"),
    (put([1] * 2049, "golden", 0, "prompt"), r"golden\[0\].prompt is 2049 items, expected 0 ... 2048"),
    (put(math.inf, "golden_tolerance"), "golden_tolerance is inf, expected a finite number"),
    (put("\x1b[2J", "source", "name"), r"source.name is '\\x1b\[2J', expected text without U\+001B"),
    (put({"size": 1, "sha256": ""}, "files", "a\nb"), r"files is 'a\\nb', expected text without U\+000A"),
    (put(1, "\x1b]0;x"), r"unknown field \\x1b\]0;x"),
]


@pytest.mark.threat("terminal-escapes", "bundle-numbers")
@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_manifest_is_refused_by_the_name_of_the_field(folder: Path, change: Any, message: str):
    edit(folder, change)
    with pytest.raises(BundleError, match=message) as caught:
        bundle.read_bundle(folder)
    assert caught.value.path == folder and caught.value.problem.startswith(BUNDLE_MANIFEST)
    assert "llmc build" in caught.value.advice


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe{}", b"[1]", b"null", b'"x"', b"[" * 100_000, b'{"schema_version": 1'], ids=repr
)
def test_a_manifest_that_is_no_json_object_is_refused(folder: Path, content: bytes):
    (folder / BUNDLE_MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match="corrupt"):
        bundle.read_bundle(folder)


# --------------------------------------------------------------------------------------------------------- versions


def test_a_newer_schema_is_refused_with_the_version_that_wrote_it(folder: Path):
    edit(folder, put(SCHEMA_VERSION + 1, "schema_version"))
    edit(folder, put("9.9.9", "llmc_version"))
    said = rf"version {SCHEMA_VERSION + 1}, written by llmc 9.9.9.*up to {SCHEMA_VERSION}; use that version"
    with pytest.raises(BundleError, match=said):
        bundle.read_bundle(folder)


def test_an_older_schema_is_refused_before_its_missing_fields_are(folder: Path):
    edit(folder, drop("recipe", "scheme"))
    edit(folder, put(SCHEMA_VERSION - 1, "schema_version"))
    said = rf"schema version {SCHEMA_VERSION - 1} of an older llmc \(0.1.0\), this one reads {SCHEMA_VERSION}; "
    with pytest.raises(
        BundleError, match=rf"{said}it was made of 'tiny' by the recipe 'default' in 'int8' for 'cpu'; make it"
    ):
        bundle.read_bundle(folder)


@pytest.mark.parametrize("origin", [{"source": None}, {"source": {"name": ["x"]}}, {"source": {"name": ""}}])
def test_an_older_schema_that_names_no_source_is_refused_all_the_same(folder: Path, origin: Any):
    edit(folder, lambda data: data.update(origin, schema_version=SCHEMA_VERSION - 1))
    with pytest.raises(BundleError, match=rf"reads {SCHEMA_VERSION}; make it again with: llmc"):
        bundle.read_bundle(folder)


GRAPH = dataclasses.asdict(bundle.Graph("decode.onnx", 1000, 900))
VISION_FIELDS: dict[str, Any] = {**dataclasses.asdict(VISION), "token_id": 319}
IMPOSSIBLE = [
    (put(3, "geometry", "attentions", 0, "kv_heads"), "geometry"),
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
    (put({}, "graphs"), "graphs"),
    (put({"decode": GRAPH, "prefill": GRAPH, "vision": GRAPH}, "graphs"), "graphs"),
    (put({**VISION_FIELDS, "tile": 500}, "geometry", "vision"), "geometry"),
    (put({**VISION_FIELDS, "tokens": 1025}, "geometry", "vision"), "geometry"),
    (put({**VISION_FIELDS, "token_id": 320}, "geometry", "vision"), "geometry"),
    (
        put({**VISION_FIELDS, "tiling": {**VISION_FIELDS["tiling"], "std": [1.0, 0.0, 1.0]}}, "geometry", "vision"),
        "geometry",
    ),
    (put({**VISION_FIELDS, "tile": 16, "tokens": 1}, "geometry", "vision"), "geometry"),
    (put("tea", "memory", "uses", 0, "name"), "memory"),
    (put(VISION_FIELDS, "geometry", "vision"), "graphs"),
    (put("int4", "cache"), "cache"),
    (put("1.x", "target", "engine_minimum"), "target"),
    (put("²", "target", "engine_minimum"), "target"),
    (put("9" * 5000, "target", "engine_minimum"), "target"),
    (put(-1.0, "generation", "temperature"), "generation"),
    (put(1.5, "generation", "top_p"), "generation"),
    (put([512], "generation", "eos_token_ids"), "generation"),
    (put([512], "generation", "banned_tokens"), "generation"),
    (put([[3, 512]], "generation", "bad_words"), "generation"),
    (put(0.0, "generation", "repetition_penalty"), "generation"),
]


@pytest.mark.parametrize(("change", "part"), IMPOSSIBLE, ids=[part for _, part in IMPOSSIBLE])
def test_numbers_that_no_build_writes_are_refused(folder: Path, change: Any, part: str):
    edit(folder, change)
    with pytest.raises(BundleError, match=rf"the {part} in llmc.json cannot be right; build the bundle again"):
        bundle.read_bundle(folder)


def test_another_graph_contract_is_refused(folder: Path):
    edit(folder, put(bundle.GRAPH_CONTRACT_VERSION + 1, "graph_contract"))
    with pytest.raises(BundleError, match="graph contract 8, not 7; make it again with: llmc build"):
        bundle.read_bundle(folder)


# ------------------------------------------------------------------------------------------------------------ files


def test_a_truncated_file_is_named_with_both_sizes(folder: Path):
    (folder / "weights.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(BundleError, match=r"weights.bin has 6999 bytes, 7000 expected"):
        bundle.read_bundle(folder)


def test_verify_notices_one_flipped_bit_that_reading_does_not(folder: Path):
    (folder / "weights.bin").write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:])
    manifest = bundle.read_bundle(folder)
    with pytest.raises(BundleError, match=r"weights.bin is corrupt"):
        list(bundle.verify_files(folder, manifest))


# Of a file with 250 chunks of 28 bytes, 10 are hashed.
SMALL = {"CHUNK": 28, "SAMPLED_CHUNKS": 10}


@pytest.fixture
def sampled(folder: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The bundle with one file so large that only samples of it are hashed."""
    for name, value in SMALL.items():
        monkeypatch.setattr(integrity, name, value)
    for name in FILES[:2]:
        (folder / name).write_bytes(CONTENT[:100])
    bundle.write_chunks(folder, FILES)
    return dataclasses.replace(whole, files=file_entries(folder, [*FILES, "chunks.json"]))


@pytest.mark.threat("bundle-damage")
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_samples_notice_damage_as_often_as_the_formula_says(folder: Path, sampled: Manifest, share: float):
    damaged = bytearray(CONTENT)
    for chunk in range(int(250 * share)):
        damaged[chunk * 28] ^= 1
    (folder / "weights.bin").write_bytes(bytes(damaged))
    files = {name: sampled.files[name] for name in ("weights.bin", "chunks.json")}
    noticed = sum(notices(folder, dataclasses.replace(sampled, files=files), seed) for seed in range(200))
    expected = 1 - math.comb(250 - int(250 * share), 10) / math.comb(250, 10)
    assert noticed == pytest.approx(200 * expected, abs=4 * math.sqrt(200 * expected * (1 - expected)) + 1)


def notices(folder: Path, manifest: Manifest, seed: int) -> bool:
    try:
        list(bundle.verify_samples(folder, manifest, random.Random(seed)))
    except BundleError as error:
        assert "weights.bin is corrupt" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("content", "words"),
    [("{}", "does not cover weights.bin"), ("[", "cannot be read"), ('{"weights.bin": "0"}', "does not cover")],
)
def test_a_list_of_chunks_that_is_none_is_refused(folder: Path, sampled: Manifest, content: str, words: str):
    (folder / "chunks.json").write_text(content)
    manifest = dataclasses.replace(sampled, files=file_entries(folder, [*FILES, "chunks.json"]))
    with pytest.raises(BundleError, match=words):
        list(bundle.verify_samples(folder, manifest, random.Random(0)))


def test_files_that_are_not_the_bundles_are_named(folder: Path, whole: Manifest):
    for name in ("README.md", "a\x1b[2J", *(f"{number:02}" for number in range(20))):
        (folder / name).touch()
    (folder / "more").mkdir()
    (folder / "README.md").rename(folder / "0 README.md")
    found = bundle.list_unlisted_files(folder, whole)
    assert len(found) == 16 and found[0] == "0 README.md"
    assert not set(found) & {*FILES, BUNDLE_MANIFEST}


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "a/../../outside.bin"])
def test_a_manifest_that_leads_outside_its_folder_is_refused(folder: Path, name: str):
    edit(folder, put(dataclasses.asdict(FileEntry(1, "0" * 64)), "files", name))
    with pytest.raises(BundleError, match="lies outside"):
        bundle.read_bundle(folder)


def test_a_tokenizer_file_that_no_hash_covers_is_refused(folder: Path):
    (folder / "chat_template.jinja").symlink_to("nowhere yet")
    with pytest.raises(BundleError, match=r"chat_template.jinja is not in llmc.json.*remove it"):
        bundle.read_bundle(folder)


@pytest.mark.threat("bundle-files")
@pytest.mark.parametrize("name", ["weights.bin", BUNDLE_MANIFEST])
def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: Any, name: str):
    outside = tmp_path_factory.mktemp("outside") / "secret"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(BundleError, match=rf"{name} is a link that leads out of the bundle"):
        bundle.read_bundle(folder)


def test_links_within_the_folder_and_within_a_download_cache_are_followed(folder: Path, tmp_path_factory: Any):
    (folder / "weights.bin").rename(folder / "elsewhere.bin")
    (folder / "weights.bin").symlink_to("elsewhere.bin")
    bundle.read_bundle(folder)
    repository = tmp_path_factory.mktemp("models--tiny")
    (repository / "snapshots").mkdir()
    folder.rename(repository / "blobs")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir()
    for name in (*FILES, BUNDLE_MANIFEST):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    bundle.read_bundle(snapshot)


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(folder: Path, whole: Manifest):
    """A build may publish at any moment; no mixture of two bundles is ever returned, nor taken for damage."""
    seen: list[str] = []

    def replace(version: str) -> None:
        bundle.write_manifest(dataclasses.replace(whole, llmc_version=version), folder)

    def work(place: Path) -> str:
        found = bundle.read_bundle(place).llmc_version
        seen.append(found)
        if len(seen) == 1:
            replace("0.2.0 begins")
        if len(seen) == 2:
            replace("0.3.0 has come")
            raise BundleError("a file of the old bundle is gone")
        return found

    thrown_away: list[str] = []
    assert bundle.read_undisturbed(folder, work, thrown_away.append) == "0.3.0 has come"
    assert thrown_away == ["0.1.0"]


def test_a_bundle_that_is_replaced_without_end_is_refused(folder: Path):
    ticks = iter(range(100))
    with pytest.raises(BundleError, match="was replaced 10 times while it was read"):
        bundle.read_undisturbed(folder, lambda place: (place / BUNDLE_MANIFEST).write_text("x" * next(ticks)))


@pytest.mark.threat("bundle-numbers")
def test_every_number_of_a_manifest_has_a_range():
    unbounded = {place for kind in (Manifest, ExportManifest) for place in numbers_without_range(kind)}
    assert not unbounded


def numbers_without_range(kind: Any, place: str = "") -> Iterator[str]:
    if kind is int:
        yield place
    if dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield from numbers_without_range(hint, f"{place}.{name}")
    if typing.get_origin(kind) is typing.Annotated and typing.get_args(kind)[0] is int:
        return
    for argument in typing.get_args(kind):
        yield from numbers_without_range(argument, place)


@pytest.mark.parametrize(
    ("read", "name", "command"),
    [(bundle.read_bundle, BUNDLE_MANIFEST, "llmc build"), (bundle.read_export, EXPORT_MANIFEST, "llmc export")],
)
def test_a_folder_of_someone_else_is_refused_with_the_command_to_use(tmp_path: Path, read, name: str, command: str):
    for place, said in (
        (tmp_path, f"no {name} here"),
        (Path(__file__), f"(no {name} here|is a file)"),
        (tmp_path / "nowhere", "no"),
    ):
        with pytest.raises(BundleError, match=f"{said}.*{command}"):
            read(place)


@pytest.mark.threat("bundle-numbers")
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_manifest_that_is_no_regular_file_is_refused_at_once(folder: Path, make: Any):
    (folder / BUNDLE_MANIFEST).unlink()
    make(folder / BUNDLE_MANIFEST)
    with pytest.raises(BundleError, match=r"llmc.json is corrupt \(it is not a regular file\)"):
        bundle.read_bundle(folder)


def test_a_checkpoint_in_the_place_of_an_export_is_refused_with_the_command_that_exports_it(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        BundleError, match=r"no export.json here, not written by llmc; make it with: llmc export CHECKPOINT -o DIR$"
    ):
        bundle.read_export(tmp_path)


def test_an_export_without_its_graph_is_refused(tmp_path: Path, export_manifest: ExportManifest):
    bundle.write_manifest(export_manifest, tmp_path)
    with pytest.raises(BundleError, match=r"decoder.onnx is missing; export the checkpoint again"):
        bundle.read_export(tmp_path)


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_an_export_whose_inventory_does_not_fit_together_is_refused(tmp_path: Path, export_manifest: ExportManifest):
    geometry = dataclasses.replace(export_manifest.geometry, linears=())
    bundle.write_manifest(dataclasses.replace(export_manifest, geometry=geometry), tmp_path)
    with pytest.raises(BundleError, match=r"the geometry in export.json cannot be right; export the checkpoint again"):
        bundle.read_export(tmp_path)
