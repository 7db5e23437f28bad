"""Rebuilding a bundle's engine on another machine: the new bundle is whole and passes, or the old one stays."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.machines import H200, NO_GPU, Probe
from doubles.recorded import PLAN, RecordedLibrary

from llmc.bundle import EngineConfig, Manifest, read_bundle, verify_files, write_manifest
from llmc.errors import BundleError, GpuError, UsageError
from llmc.optimize.build import build
from llmc.optimize.rebuild import rebuild
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.recipe.engine import EngineRequest
from llmc.publish import file_entries
from llmc.runtime import Model, load
from llmc.runtime.loading import verify
from llmc.runtime.sessions import Batch
from llmc.runtime.sessions.tensorrt.engine import platform_name

NAME = "qwen2-tied-bf16"
# Room for a long golden prompt of 96 tokens.
SMALL = {"max_context": 128, "max_batch": 2}
# Positions that the other golden prompts and their answers do not reach, and an error of logits beyond any tolerance.
FAR, WRONG = 48, 8.0
OLD_PLAN = b"an engine of the machine before"
ENGINE_FILES = ("engine.plan", "build-log.json")


def no_driver(*_: object, **__: object) -> None:
    raise GpuError("no NVIDIA driver was found; install it")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Whatever machine this is, it has no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.runtime.sessions.tensorrt.session.open_driver", no_driver)
        yield


@pytest.fixture(scope="module")
def built(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose engine is deferred, made once."""
    engine = EngineRequest(deferred=True, optimization_level=2)
    output = tmp_path_factory.mktemp("deferred") / "bundle"
    build(BuildRequest(exported(NAME).export, output, target="tensorrt", precision="fp16", engine=engine, **SMALL))
    return output


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a bundle, with its engine still to be made or, with ``engine``, as another machine made it."""

    def copy(*, engine: bool = False, **changes: Any) -> Path:
        folder = Path(shutil.copytree(built, tmp_path / "there" / "bundle"))
        manifest = read_bundle(folder)
        assert manifest.engine is not None
        if engine:
            for name in ENGINE_FILES:
                (folder / name).write_bytes(OLD_PLAN)
            plan = dataclasses.replace(
                manifest.engine,
                file="engine.plan",
                log="build-log.json",
                platform="plan9-mips",
                compute_capabilities=("5.2",),
                verified="device",
            )
            files = manifest.files | file_entries(folder, ENGINE_FILES)
            manifest = dataclasses.replace(manifest, engine=plan, files=files)
        write_manifest(dataclasses.replace(manifest, **changes), folder)
        return folder

    return copy


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordedLibrary]:
    """Make this a machine with TensorRT, and a GPU or none; the CPU stands in for the GPU."""

    def become(probe: Probe = NO_GPU, **options: Any) -> RecordedLibrary:
        library = RecordedLibrary(**options)
        once = iter([library])  # finding it may take seconds
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.load_library", lambda engine: next(once))
        monkeypatch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: probe.driver)
        if probe.driver.devices:
            monkeypatch.setattr(
                "llmc.optimize.rebuild.load", lambda folder, **_: load(folder, self_test=False, emulate=True)
            )
        return library

    return become


@pytest.fixture
def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library may be looked at."""
    for module in ("llmc.optimize.tensorrt.spec", "llmc.runtime.sessions.tensorrt.library"):
        monkeypatch.setattr(f"{module}.load_library", lambda engine: pytest.fail("the library was touched"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_whole(folder: Path) -> Manifest:
    """What the manifest lists is there as it is listed, nothing is beside it, and it computes what it should."""
    manifest = read_bundle(folder)
    assert list(verify_files(folder, manifest)) == list(manifest.files)
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "llmc.json"}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert verify(folder, emulate=True).equal_tokens == 96
    return manifest


def test_a_deferred_engine_is_made_in_place(bundle, machine):
    folder = bundle()
    before = read_bundle(folder)
    library = machine()
    report = rebuild(folder, folder, force=True)
    manifest = check_whole(folder)
    plan = manifest.engine
    assert plan is not None
    assert report.manifest == manifest
    assert manifest.target.engine_version == library.__version__
    assert (plan.file, plan.log) == ENGINE_FILES
    assert (folder / "engine.plan").read_bytes() == PLAN
    assert plan.optimization_level == 2, "as the bundle was asked"
    assert plan.verified == "cpu", "the golden prompts are of this very graph"
    assert (manifest.golden, manifest.quality, manifest.recipe) == (before.golden, before.quality, before.recipe)
    assert {name: manifest.files[name] for name in before.files} == before.files


def test_an_engine_of_another_machine_is_replaced_and_run(bundle, machine):
    folder = bundle(engine=True)
    machine(H200)
    steps: list[str] = []
    rebuild(folder, folder, force=True, progress=lambda step, _=None: steps.append(step))
    plan = check_whole(folder).engine
    assert plan is not None
    assert (plan.platform, plan.compute_capabilities) == (platform_name(), ("9.0",))
    assert plan.verified == "device"
    assert not [name for name, content in contents(folder).items() if content == OLD_PLAN]
    order = [
        next(i for i, step in enumerate(steps) if step.startswith(part)) for part in ("hashed", "building", "golden")
    ]
    assert order == sorted(order)


def spoil(monkeypatch: pytest.MonkeyPatch, borders: tuple[str, ...]) -> None:
    """Let engines with one of these borders compute steps far into a text wrongly, as TensorRT 11.2 was seen to do."""

    def load_spoiled(folder: Path, **_: Any) -> Model:
        model = load(folder, self_test=False, emulate=True)
        session, run = model.runner.session, model.runner.session.run

        def spoiled_run(batch: Batch) -> Any:
            logits = run(batch)
            far = batch.input_ids.shape[1] == 1 and batch.past_lengths.max() >= FAR
            return logits + WRONG * (np.arange(logits.shape[-1]) % 2) if far else logits

        if engine_of(model.manifest).border in borders:
            monkeypatch.setattr(session, "run", spoiled_run)
        return model

    monkeypatch.setattr("llmc.optimize.rebuild.load", load_spoiled)


def engine_of(manifest: Manifest) -> EngineConfig:
    assert manifest.engine is not None
    return manifest.engine


def test_an_engine_whose_steps_far_into_a_text_are_wrong_is_built_with_float32_at_attentions_border(
    bundle, machine, monkeypatch
):
    folder = bundle()
    machine(H200)
    spoil(monkeypatch, ("",))
    before = (folder / "decoder.onnx").read_bytes()
    other = folder.with_name("other")
    rebuild(folder, other)
    assert (folder / "decoder.onnx").read_bytes() == before, "the source stays, though files are shared with it"
    shutil.rmtree(folder)
    engine = engine_of(check_whole(other))
    assert (engine.border, engine.attention, engine.verified) == ("float32", "fused", "device")
    machine(H200)
    assert engine_of(rebuild(other, other, force=True).manifest).border == "float32", "it is tried first from now on"


def test_an_engine_that_is_wrong_with_any_border_is_refused(bundle, machine, monkeypatch):
    folder = bundle(engine=True)
    before = contents(folder)
    machine(H200)
    spoil(monkeypatch, ("", "float32"))
    with pytest.raises(BundleError, match=r"logits differ by 8 "):
        rebuild(folder, folder, force=True)
    assert contents(folder) == before


@pytest.mark.parametrize("links", [True, False])
def test_another_folder_shares_what_is_kept_and_leaves_the_source_alone(bundle, machine, tmp_path, monkeypatch, links):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder, output = bundle(engine=True), tmp_path / "here" / "bundle"
    before = contents(folder)
    machine(H200)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    rebuild(folder, output)
    manifest = check_whole(output)
    assert contents(folder) == before
    kept = manifest.files.keys() - set(ENGINE_FILES)
    assert kept >= {"decoder.onnx", "weights.bin", "tokenizer.json"}
    assert {(output / name).samefile(folder / name) for name in kept} == {links}
    assert not any((output / name).samefile(folder / name) for name in (*ENGINE_FILES, "llmc.json"))


@pytest.mark.parametrize("damage", [b"", OLD_PLAN[1:], bytes(len(OLD_PLAN))], ids=["empty", "truncated", "changed"])
def test_a_broken_engine_is_no_obstacle(bundle, machine, damage):
    folder = bundle(engine=True)
    (folder / "engine.plan").write_bytes(damage)
    machine()
    rebuild(folder, folder, force=True)
    check_whole(folder)


@pytest.mark.parametrize(("before", "after"), [("cpu", "cpu"), ("device", "no")])
def test_a_graph_that_cannot_be_replayed_on_the_cpu_is_rebuilt_with_a_warning(
    bundle, machine, monkeypatch, caplog, before, after
):
    def refuse(*_: object, **__: object) -> None:
        raise GpuError("not on this CPU")

    folder = bundle()
    manifest = read_bundle(folder)
    assert manifest.engine is not None
    old = dataclasses.replace(manifest.engine, verified=before)
    write_manifest(dataclasses.replace(manifest, engine=old), folder)
    machine()
    monkeypatch.setattr("llmc.optimize.rebuild.load", refuse)
    plan = rebuild(folder, folder, force=True).manifest.engine
    assert plan is not None
    assert plan.verified == after, "what was known of this very graph, but nothing of another machine's engine"
    assert "the golden prompts were not replayed (not on this CPU); llmc verify does so on the GPU" in caplog.text


@pytest.mark.slow
def test_tensorrt_rtx_rebuilds_its_own_engines(exported, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    monkeypatch.setattr("llmc.optimize.tensorrt.spec.probe_driver", lambda: NO_GPU.driver)
    folder = tmp_path / "there" / "bundle"
    engine = EngineRequest(compute_capabilities="8.9", optimization_level=1)
    build(BuildRequest(exported(NAME).export, folder, target="tensorrt-rtx", precision="int8", engine=engine, **SMALL))
    (folder / "engine.plan").unlink()
    rebuild(folder, folder, force=True)
    manifest = check_whole(folder)
    assert manifest.files["engine.plan"].size > 100_000
    assert manifest.engine is not None
    assert (manifest.engine.compute_capabilities, manifest.engine.optimization_level) == (("8.9",), 1)


@pytest.fixture
def whole(bundle: Callable[..., Path]) -> Iterator[Path]:
    """A bundle with another machine's engine, which afterwards must be what it was, with nothing beside it."""
    folder = bundle(engine=True)
    before = contents(folder.parent)
    yield folder
    assert contents(folder.parent) == before


@pytest.mark.usefixtures("untouchable")
def test_a_bundle_without_an_engine_is_refused(manifest, tmp_path):
    (tmp_path / "decode.onnx").write_bytes(b"graph")
    write_manifest(dataclasses.replace(manifest, files=file_entries(tmp_path, ["decode.onnx"])), tmp_path)
    with pytest.raises(UsageError, match="is for cpu, whose graphs need no engine; it runs as it is"):
        rebuild(tmp_path, tmp_path, force=True)


@pytest.mark.usefixtures("untouchable")
def test_corrupt_weights_are_refused_before_any_work(bundle):
    folder = bundle()
    content = bytearray((folder / "weights.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "weights.bin").write_bytes(content)
    before = contents(folder.parent)
    with pytest.raises(BundleError, match=r"weights\.bin is corrupt"):
        rebuild(folder, folder, force=True)
    assert contents(folder.parent) == before


@pytest.mark.usefixtures("untouchable")
def test_an_output_that_exists_is_refused_before_anything_is_hashed(whole):
    steps: list[str] = []
    with pytest.raises(UsageError, match="exists; choose another output folder, or pass --force"):
        rebuild(whole, whole, progress=lambda step, _=None: steps.append(step))
    assert steps == []


@pytest.mark.parametrize("probe", [H200, NO_GPU], ids=["on the GPU", "its graph on the CPU"])
def test_an_engine_that_computes_something_else_leaves_the_old_bundle(bundle, machine, probe):
    folder = bundle(engine=True)
    text = json.loads((folder / "llmc.json").read_text())
    text["golden"][3]["top_logits"][0] += 1.0  # as if this machine's logits were lower
    (folder / "llmc.json").write_text(json.dumps(text))
    before = contents(folder.parent)
    machine(probe)
    with pytest.raises(BundleError, match=r"logits differ by 1(\.\d+)? from those recorded"):
        rebuild(folder, folder, force=True)
    assert contents(folder.parent) == before
