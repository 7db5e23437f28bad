"""Bundles that are built on first use: once, again where something changed, by one process of several."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.bundle import BUNDLE_MANIFEST
from llmc.errors import MissingExtraError, ResourceError, UsageError
from llmc.publish import staging_folder
from llmc.runtime import load
from llmc.sources import Kind, Located
from llmc.sources.built import find_bundle
from llmc.sources.shelf import list_bundles, lock, place_of, remove_bundle, shelf

LIMIT_S = 60.0  # for processes that take a second on a machine without other work


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint, as far as the table of kinds can tell."""
    folder = tmp_path / "My model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests of builds, which publish a manifest and nothing else."""
    requests: list[Any] = []

    def build(request: Any, progress: Callable[..., None]) -> Any:
        progress("hashing", 0.5)
        requests.append(request)
        with staging_folder(request.output) as folder:
            (folder / BUNDLE_MANIFEST).write_text("{}")
        manifest = SimpleNamespace(recipe=SimpleNamespace(precision="int8"))
        return SimpleNamespace(output=request.output, manifest=manifest, size=2_400_000)

    monkeypatch.setattr("llmc.export.export", lambda path, output, progress: SimpleNamespace(output=output))
    monkeypatch.setattr("llmc.optimize.build.build", build)
    return requests


# ------------------------------------------------------------------------------------------------------ on first use


def test_a_source_is_built_once_and_its_user_is_told_before_and_after(source: Path, builds: list[Any], cache: Path):
    said: list[str] = []
    steps: list[str] = []
    place = find_bundle(source, progress=lambda step, fraction=None: steps.append(step), say=said.append)
    assert place.parent == cache / "bundles" and place.name.startswith("My-model-")
    [request] = builds
    assert (request.decoder, request.precision, request.recipe) == (None, None, None)  # the defaults, uncalibrated
    assert said[0] == f"building {source} for this machine, once" and steps == ["hashing"]
    assert said[1].startswith("built int8 without calibration in ") and f"2 MB: {place}" in said[1]
    assert find_bundle(source, say=said.append) == place and len(builds) == 1 and len(said) == 2


def test_a_bundle_is_used_where_it_is(tiny_bundle: Path, builds: list[Any], cache: Path):
    assert find_bundle(tiny_bundle) == tiny_bundle
    assert not builds and not cache.exists()


def test_load_builds_of_an_export_and_logs_where(layer_export: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), load(layer_export, self_test=False) as model:
        assert model.folder.parent == shelf()
        assert len(model.generate([1, 2, 3], max_tokens=2).token_ids) == 2
    assert f"{model.folder}" in caplog.text
    caplog.clear()
    with load(str(layer_export), self_test=False) as again:
        assert again.folder == model.folder
    assert caplog.text == ""


# ------------------------------------------------------------------------------------------------------------ reuse


def test_a_changed_source_or_llmc_is_built_again_in_place_of_the_old(
    source: Path, builds: list[Any], monkeypatch: pytest.MonkeyPatch
):
    places = [find_bundle(source)]
    (source / "model.safetensors").write_bytes(b"longer weights")
    places.append(find_bundle(source))
    os.utime(source / "config.json", (1, 1))
    places.append(find_bundle(source))
    monkeypatch.setattr("llmc.sources.shelf.SCHEMA_VERSION", 1000)
    places.append(find_bundle(source))
    monkeypatch.setattr("llmc.sources.shelf.__version__", "1000.0")
    places.append(find_bundle(source))
    assert len(builds) == len(set(places)) == 5
    assert [place.exists() for place in places] == [False] * 4 + [True]
    (source / "README.md").write_text("no part of the model")
    assert find_bundle(source) == places[-1]


def test_other_processors_and_other_sources_have_bundles_of_their_own(
    source: Path, builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = shutil.copytree(source, tmp_path / "elsewhere" / source.name)  # with its times
    places = [find_bundle(source), find_bundle(other)]
    monkeypatch.setattr("llmc.sources.shelf.saturates", lambda: "otherwise")
    places.append(find_bundle(source))
    assert len(builds) == len(set(places)) == 3
    assert all(place.exists() for place in places)


def test_a_model_of_the_hub_has_its_name_and_every_part_of_a_model_counts(tmp_path: Path):
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.touch()
    model = Located("org/name:Q4_K_M", parts[0], Kind.GGUF)
    before = place_of(model)
    assert before.name.startswith("org-name-Q4_K_M-")
    (tmp_path / "m-other.gguf").touch()
    assert place_of(model) == before
    parts[1].write_bytes(b"1")
    assert place_of(model) != before


# -------------------------------------------------------------------------------------------------- several processes

BUILDER = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import llmc.optimize.build as room
from llmc import export
from llmc.publish import staging_folder
from llmc.sources import built

def build(request, progress):
    with staging_folder(request.output) as folder:
        with open(sys.argv[2], "a") as log:
            log.write("built\\n")
        if sys.argv[3] == "dies":
            (folder / "weights.bin").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        while sys.argv[3] == "waits" and not Path(sys.argv[4]).exists():
            time.sleep(0.02)
        (folder / "llmc.json").write_text("{}")
    manifest = SimpleNamespace(recipe=SimpleNamespace(precision="int8"))
    return SimpleNamespace(output=request.output, manifest=manifest, size=0)

room.build = build
export.export = lambda path, output, progress: SimpleNamespace(output=output)
built._require = lambda kind: None
print(built.find_bundle(sys.argv[1], say=lambda text: print(text, flush=True)))
"""


def start(source: Path, log: Path, *how: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(source), str(log), *map(str, how)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_builds_and_the_other_says_that_it_waits(source: Path, tmp_path: Path):
    log, go = tmp_path / "log", tmp_path / "go"
    with start(source, log, "waits", go) as first:
        assert "building" in first.stdout.readline()
        with start(source, log, "waits", go) as second:
            assert second.stdout.readline() == f"another process is building {source}: waiting for it\n"
            go.touch()
            places = [process.communicate(timeout=LIMIT_S)[0].splitlines()[-1] for process in (first, second)]
    assert places[0] == places[1] and Path(places[0]).exists()
    assert log.read_text() == "built\n"


def test_a_killed_build_is_never_used_and_the_next_one_removes_its_rest(
    source: Path, tmp_path: Path, builds: list[Any]
):
    killed = start(source, tmp_path / "log", "dies")
    killed.communicate(timeout=LIMIT_S)
    assert killed.returncode < 0 and list(shelf().glob(".*.work/new")) and list_bundles() == []
    (source / "config.json").write_text('{"changed": true}')  # its place is another now
    place = find_bundle(source)
    assert [path for path in shelf().iterdir() if not path.name.endswith(".lock")] == [place]


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_cache_that_cannot_be_written_is_named_with_the_variable(
    source: Path, builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match="set LLMC_CACHE to a folder that can") as refused:
        find_bundle(source)
    assert refused.value.parameter == "cache" and not builds


def test_a_disk_without_room_is_refused_before_the_build(layer_export: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(ResourceError, match="1 MB of the disk are free, and the bundle takes"):
        find_bundle(layer_export)
    assert list_bundles() == []


@pytest.mark.parametrize(
    ("kind", "lacking", "extra"), [("checkpoint", "torch", "export"), ("export", "onnx_ir", "build")]
)
def test_a_device_without_the_extra_is_told_the_command_for_another_machine(
    source: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lacking: str, extra: str
):
    if kind == "export":
        (source / "export.json").write_text("{}")
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(MissingExtraError) as refused:
        find_bundle(source)
    said = str(refused.value)
    assert f"it is in the extra '{extra}': pip install" in said and "rsync" in said
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in said) == (extra == "export")
    assert f"llmc build '{source}' -o BUNDLE" in said


def test_removing_a_bundle_leaves_no_lock_and_nothing_of_killed_builds(source: Path, tmp_path: Path, builds: list[Any]):
    place = find_bundle(source)
    other = shutil.copytree(source, tmp_path / "other")
    start(other, tmp_path / "log", "dies").communicate(timeout=LIMIT_S)
    assert list(shelf().glob(".*.work/new"))
    remove_bundle(place.name)
    assert [path.name[:6] for path in shelf().iterdir()] == [".other"]  # the killed build's lock


def test_a_lock_holds_although_its_bundle_is_removed_meanwhile(
    source: Path, builds: list[Any], monkeypatch: pytest.MonkeyPatch
):
    place = find_bundle(source)
    file = place.with_name(f".{place.name}.lock")
    with lock(place, lambda: None) as is_ours:
        remove_bundle(place.name)
        assert is_ours and file.exists()
    monkeypatch.setattr("llmc.sources.shelf.lock_file", lambda descriptor: file.unlink())
    with lock(place, lambda: None) as is_ours:  # of a file that nobody else can find
        assert not is_ours


def test_a_use_is_noted_beside_the_bundle(source: Path, builds: list[Any]):
    place = find_bundle(source)
    lock = place.with_name(f".{place.name}.lock")
    os.utime(lock, (1, 1))
    assert list_bundles()[0].used == 1
    find_bundle(source)
    assert list_bundles()[0].used > 1
