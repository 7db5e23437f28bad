"""What is loaded is one whole bundle: every refusal is a sentence, and nothing is used that a hash does not cover."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.bundle import read_bundle, write_manifest
from llmc.errors import BundleError, LlmcError, UsageError
from llmc.runtime import load, model
from llmc.runtime.model import verify


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (None, UsageError, "bundle is None, expected the path of a folder"),
        (3, UsageError, "bundle is 3, expected the path"),
        (b"x", UsageError, "bundle is b'x', expected the path"),
        ("a\0b", UsageError, "is not text in UTF-8"),
        ("caf\udce9", UsageError, r"the path 'caf\\udce9' is not text in UTF-8; rename"),
        ("a" * 5000, UsageError, "cannot be looked at .File name too long"),
        (__file__, BundleError, "no llmc.json here"),
        ("/nowhere", BundleError, "there is no such folder"),
    ],
)
@pytest.mark.parametrize("call", [load, verify])
def test_what_is_no_bundle_is_refused_in_a_sentence(call: Any, path: Any, error: type[LlmcError], words: str):
    with pytest.raises(error, match=words):
        call(path)


def test_a_planted_chat_template_is_refused(folder: Path):
    secret = folder.parent / "secret"
    secret.write_text("the secret")
    manifest = read_bundle(folder)
    files = {name: entry for name, entry in manifest.files.items() if name != "chat_template.jinja"}
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(BundleError, match=r"chat_template.jinja is a link that leads out of the bundle"):
        load(folder)
    write_manifest(replace(manifest, files=files), folder)
    with pytest.raises(BundleError, match=r"chat_template.jinja is not in llmc.json"):
        load(folder)


def test_a_flipped_bit_is_found_by_hashing_and_at_the_first_load_but_not_where_nobody_looks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All of so small a file is hashed at a first load."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    flip(folder / "weights.bin")
    load(folder, self_test=False).close()
    load(folder, verify=False, self_test=False).close()
    for options in ({}, {"verify": True}, {"verify": True, "self_test": False}):
        with pytest.raises(BundleError, match=r"weights.bin is corrupt \(its SHA-256 changed\)"):
            load(folder, **options)


def test_a_bundle_that_is_replaced_while_it_is_loaded_is_loaded_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    published: list[int] = []
    closed: list[Path] = []
    opened = model.open_session

    def overtaken(*arguments: Any) -> Any:
        session = opened(*arguments)
        if not published:
            published.append(1)
            new = shutil.copytree(folder, folder.parent / "new")
            write_manifest(replace(read_bundle(folder), notes=("the new one",)), new)
            folder.rename(folder.parent / "old")
            new.rename(folder)
        return session

    close = model.Model.close
    monkeypatch.setattr(model, "open_session", overtaken)
    monkeypatch.setattr(model.Model, "close", lambda self, *how: (closed.append(self.folder), close(self, *how)))
    with load(folder, self_test=False) as loaded:
        assert loaded.manifest.notes == ("the new one",)
        assert closed == [folder]
        assert loaded.chat_template


def test_a_chat_template_is_never_that_of_another_bundle(folder: Path):
    with load(folder, self_test=False) as loaded:
        write_manifest(replace(read_bundle(folder), notes=("another",)), folder)
        with pytest.raises(BundleError, match="was replaced since it was loaded"):
            loaded.chat([{"role": "user", "content": "hello"}])
        assert loaded.generate([1, 2], max_tokens=1).token_ids  # what was loaded goes on


def test_a_removed_bundle_goes_on_running(folder: Path):
    with load(folder, self_test=False) as loaded:
        before = loaded.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids
        shutil.rmtree(folder)
        assert loaded.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids == before


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "words"), [("[" * 100_000, "nests more than"), ("[" + "9" * 5000 + "]", "an integer of 5000 digits")]
)
def test_json_beside_the_tokenizer_has_bounds(
    tiny_checkpoint: Path, tmp_path: Path, name: str, content: str, words: str
):
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).write_text(content)
    with pytest.raises(BundleError, match=words):
        model.Tokenizer.from_folder(folder)


def test_verify_names_files_that_are_not_the_bundles(folder: Path):
    (folder / "README.md").write_text("mine")
    assert verify(folder).unlisted == ("README.md",)
