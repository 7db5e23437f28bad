"""Files are taken from their own folder only, and weights that somebody overwrote are known."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.bundle import GRAPH_CONTRACT_VERSION, SCHEMA_VERSION, ExportManifest, Origin
from llmc.errors import CheckpointError
from llmc.origin import check_unchanged, copy_tokenizer, find_own_file, fingerprint, read_origin

NAME = "chat_template.jinja"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the folder, which nobody meant to give away."""
    path = tmp_path / "id_ed25519"
    path.write_text("PRIVATE KEY")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder, whose tokenizer is all that it has."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    return path


def test_files_of_the_folder_are_its_own_and_so_are_links_within_it(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "template").write_text("x")
    (folder / NAME).symlink_to("inner/template")
    assert find_own_file(folder, "tokenizer.json") == folder / "tokenizer.json"
    assert find_own_file(folder, NAME) == folder / "inner" / "template"
    assert find_own_file(folder, "special_tokens_map.json") is None


def test_a_folder_that_is_reached_through_a_link_has_its_files(folder):
    folder.with_name("link").symlink_to(folder)
    assert find_own_file(folder.with_name("link"), "tokenizer.json") == folder / "tokenizer.json"


def test_the_hub_cache_keeps_files_as_links_to_its_blobs(tmp_path, secret):
    model = tmp_path / "hub" / "models--owner--name"
    snapshot, blob = model / "snapshots" / "0123abcd", model / "blobs" / "9f"
    snapshot.mkdir(parents=True), blob.parent.mkdir()
    blob.write_text("x")
    (snapshot / NAME).symlink_to("../../blobs/9f")
    assert find_own_file(snapshot, NAME) == blob
    for outside in (secret, tmp_path / "hub" / "models--owner--private"):
        outside.touch()
        (snapshot / NAME).unlink()
        (snapshot / NAME).symlink_to(outside)
        with pytest.raises(CheckpointError, match="outside its folder"):
            find_own_file(snapshot, NAME)


def test_the_hub_cache_keeps_files_of_several_models_in_a_store(tmp_path, secret):
    snapshot, store = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123abcd", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True), (store / "9f").mkdir(parents=True)
    (store / "9f" / "9f00").write_text("x")
    (snapshot / NAME).symlink_to(store / "9f" / "9f00")
    with pytest.raises(CheckpointError, match="outside its folder"):
        find_own_file(snapshot, NAME)
    (store / ".huggingface-shared-blobs").touch()
    assert find_own_file(snapshot, NAME) == store / "9f" / "9f00"


def test_a_path_in_the_hub_cache_names_repository_commit_and_gguf_file(tmp_path):
    model, commit = tmp_path / "models--owner--name", "0123456789" * 4
    snapshot, blob = model / "snapshots" / commit, model / "blobs" / "9f"
    (snapshot / "BF16").mkdir(parents=True), blob.parent.mkdir()
    blob.write_text("x")
    (snapshot / "BF16" / "tiny.gguf").symlink_to(blob)
    assert read_origin(snapshot) == Origin("owner/name", commit)
    assert read_origin(snapshot / "BF16" / "tiny.gguf") == Origin("owner/name", commit, "BF16/tiny.gguf")
    forged = tmp_path / "models--owner--\x1b[2J" / "snapshots" / commit  # a manifest could not be read with it
    for other in (tmp_path, blob, model, model / "snapshots" / "main", snapshot / "\x1b.gguf", forged):
        assert read_origin(other) is None


def through(inner: Path, secret: Path) -> None:
    inner.parent.joinpath("hop").symlink_to(secret)
    inner.symlink_to("hop")


PLANTED = {
    "a link out of it": (lambda path, secret: path.symlink_to(secret), "is a link to .*id_ed25519, outside its folder"),
    "a relative link out of it": (lambda path, secret: path.symlink_to("../id_ed25519"), "outside its folder"),
    "a link to a link": (through, "outside its folder"),
    "a link to nowhere": (lambda path, secret: path.symlink_to("nowhere"), "a broken link"),
    "a loop": (lambda path, secret: path.symlink_to(path.name), "cannot be followed"),
    "a FIFO": (lambda path, secret: os.mkfifo(path), "is not a regular file"),
    "a folder": (lambda path, secret: path.mkdir(), "is not a regular file"),
    "a device": (lambda path, secret: path.symlink_to("/dev/zero"), "outside its folder"),
}


@pytest.mark.threat("checkpoint-links")
@pytest.mark.parametrize(("plant", "words"), PLANTED.values(), ids=PLANTED)
def test_nothing_else_is_taken(folder, secret, tmp_path, plant, words):
    plant(folder / NAME, secret)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CheckpointError, match=words):
        copy_tokenizer(folder, target)
    assert "PRIVATE" not in "".join(path.read_text() for path in target.iterdir())


@pytest.mark.threat("weights-overwritten")
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_linked_weights_that_were_overwritten_are_known(tiny_checkpoint, tmp_path, manifest, name):
    """Somebody trains on, and saves over the checkpoint, whose files the export has a second name for."""
    weights = tmp_path / name
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    weights.write_bytes((tiny_checkpoint / "model.safetensors").read_bytes())  # any bytes do for a GGUF file
    identity = fingerprint((tmp_path / "config.json").read_bytes(), [weights])
    source = replace(manifest.source, fingerprint=identity)
    about = (SCHEMA_VERSION, "", GRAPH_CONTRACT_VERSION, manifest.geometry)
    export = ExportManifest(*about, source, manifest.generation, (), {})
    check_unchanged(tmp_path, export)
    os.link(weights, tmp_path / "of the checkpoint")
    check_unchanged(tmp_path, export)
    with (tmp_path / "of the checkpoint").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match="were overwritten after the export; export the checkpoint again"):
        check_unchanged(tmp_path, export)
