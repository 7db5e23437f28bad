"""What is loaded is one whole bundle: every refusal is a sentence, and nothing is used that a hash does not cover."""

import json
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.bundle import read_bundle, write_manifest
from llmc.errors import BundleError, LlmcError, UsageError
from llmc.publish import file_entries
from llmc.runtime import Generator, load, loading
from llmc.runtime.loading import verify


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


@pytest.mark.threat("wrong-paths")
@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (None, UsageError, "bundle is None, expected the path of a folder"),
        (3, UsageError, "bundle is 3, expected the path"),
        (b"x", UsageError, "bundle is b'x', expected the path"),
        ("a\0b", UsageError, "is not text in UTF-8"),
        ("caf\udce9", UsageError, r"bundle is 'caf\\udce9', which is not text in UTF-8; rename"),
        ("a" * 5000, UsageError, "cannot be looked at .File name too long"),
        (__file__, LlmcError, "has none of llmc.json|no llmc.json here"),
        ("/nowhere", LlmcError, "does not exist|no llmc.json here"),
    ],
)
@pytest.mark.parametrize("call", [load, verify])
def test_what_is_no_bundle_is_refused_in_a_sentence(call: Any, path: Any, error: type[LlmcError], words: str):
    with pytest.raises(error, match=words):
        call(path)


@pytest.mark.threat("bundle-files")
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


@pytest.mark.threat("bundle-damage")
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


@pytest.mark.threat("bundle-replaced")
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_loaded_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    published: list[int] = []
    closed: list[Path] = []
    opened = loading.open_session

    def overtaken(*arguments: Any) -> Any:
        session = opened(*arguments)
        if not published:
            published.append(1)
            new = shutil.copytree(folder, folder.parent / "new")
            write_manifest(replace(read_bundle(folder), notes=("the new one",)), new)
            folder.rename(folder.parent / "old")
            new.rename(folder)
        return session

    close = Generator.close
    monkeypatch.setattr(loading, "open_session", overtaken)
    monkeypatch.setattr(Generator, "close", lambda self, *how: (closed.append(self.folder), close(self, *how)))
    with load(folder, self_test=False) as loaded:
        assert loaded.manifest.notes == ("the new one",)
        assert closed == [folder]
        assert loaded.chat_template


@pytest.fixture(scope="module")
def other(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another whole bundle: with other weights, tokenizer and notes."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("other") / "bundle"))
    weights = np.memmap(folder / "weights.bin", np.uint8, "r+")
    weights[::5] ^= 2
    weights.flush()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    manifest = read_bundle(tiny_bundle)
    write_manifest(replace(manifest, files=file_entries(folder, manifest.files), notes=("other",)), folder)
    return folder


def parts_of(folder: Path) -> tuple[tuple[str, ...], tuple[int, ...], bytes]:
    """What tells which bundle manifest, tokenizer and weights are of."""
    with load(folder, self_test=False, verify=False, threads=1) as loaded:
        logits = loaded.runner.prefill(np.array([1, 2, 3]))
        return loaded.manifest.notes, tuple(loaded.tokenizer.encode("a")), logits.tobytes()


def exchange(place: Path, aside: Path, other: Path) -> None:
    """Move a folder away, and another one into its place."""
    place.rename(aside)
    other.rename(place)


@pytest.mark.threat("bundle-replaced")
@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
def test_a_bundle_that_stands_in_another_ones_place_for_a_moment_lends_it_nothing(
    folder: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
):
    copy, aside = Path(shutil.copytree(other, tmp_path / "copy")), tmp_path / "aside"
    place = tmp_path / "link" if linked else folder
    if linked:
        place.symlink_to(folder)
        copy, real = tmp_path / "second", copy
        copy.symlink_to(real)
    expected, opened, times = parts_of(folder), loading.open_session, []

    def overtaken(*arguments: Any) -> Any:
        times.append(1)
        if len(times) > 1:
            return opened(*arguments)
        exchange(place, aside, copy)
        try:
            return opened(*arguments)
        finally:
            exchange(place, copy, aside)

    monkeypatch.setattr(loading, "open_session", overtaken)
    assert parts_of(place) == expected
    assert len(times) == (1 if linked else 2)  # what a link led to stays where it is


@pytest.mark.threat("bundle-replaced")
@pytest.mark.slow
def test_while_folders_change_places_each_load_is_of_one_of_them(folder: Path, other: Path, tmp_path: Path):
    copy, aside = Path(shutil.copytree(other, tmp_path / "copy")), tmp_path / "aside"
    whole = [parts_of(folder), parts_of(copy)]
    chance, ended = random.Random(0), threading.Event()

    def swap() -> None:
        while not ended.is_set():
            time.sleep(chance.uniform(0, 0.6))  # a load takes a quarter of that
            exchange(folder, aside, copy)
            time.sleep(chance.choice([0, 0.001, 0.01, 0.1, 0.4]))
            exchange(folder, copy, aside)

    swapping = threading.Thread(target=swap)
    swapping.start()
    found, refused = [], []
    try:
        while len(found) < 20:
            try:
                found.append(parts_of(folder))
            except (BundleError, UsageError) as error:
                refused.append(str(error))
    finally:
        ended.set()
        swapping.join()
    assert all(one in whole for one in found)
    assert all("was replaced 10 times" in said or "does not exist" in said for said in refused), refused
    assert set(found) == set(whole)


@pytest.mark.threat("bundle-replaced")
def test_a_chat_template_is_never_that_of_another_bundle(folder: Path):
    with load(folder, self_test=False) as loaded:
        write_manifest(replace(read_bundle(folder), notes=("another",)), folder)
        with pytest.raises(BundleError, match="was replaced since it was loaded"):
            loaded.chat([{"role": "user", "content": "hello"}])
        assert loaded.generate([1, 2], max_tokens=1).token_ids  # what was loaded goes on


@pytest.mark.threat("bundle-replaced")
def test_a_removed_bundle_goes_on_running(folder: Path):
    with load(folder, self_test=False) as loaded:
        before = loaded.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids
        shutil.rmtree(folder)
        assert loaded.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids == before
