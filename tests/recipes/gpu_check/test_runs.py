"""Runs of the check of GPU targets: without a GPU, on the small model, and what becomes of steps that fail."""

import errno
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from doubles.processes import running

RECIPES = Path(__file__).parents[3] / "recipes"
SCRIPT = RECIPES / "gpu_check.py"
# Quotients of the same float64 in another order.
CLOSE = 1e-12
# Seconds until a process that was interrupted must be gone.
PATIENCE_S = 120
STATES = {"done", "failed", "crashed", "timed out", "not run"}
# What a reader of the file may rely on: names and types.
NONE = type(None)
NUMBER = (int, float)
FIGURE = (*NUMBER, NONE)
DOCUMENT = {
    "schema": int,
    "command": str,
    "arguments": dict,
    "started": str,
    "ended": (str, NONE),
    "complete": bool,
    "steps": list,
    "rows": list,
    "goals": list,
    "facts": dict,
}
STEP = {
    "name": str,
    "ended": str,
    "state": str,
    "message": str,
    "exit": (int, NONE),
    "seconds": NUMBER,
    "resident_bytes": (int, NONE),
    "anonymous_bytes": (int, NONE),
    "output": str,
    "result": (dict, NONE),
}
ROW = {
    "target": str,
    "geometry": str,
    "precision": str,
    "states": dict,
    "ttft_s": dict,
    "tokens_per_s": FIGURE,
    "share": FIGURE,
    "speedup": FIGURE,
    "prefill_ratio": FIGURE,
    "batch_tokens_per_s": FIGURE,
    "device_bytes": (int, NONE),
    "verified": str,
}
GOAL = {
    "name": str,
    "target": str,
    "geometry": str,
    "precision": str,
    "at_least": NUMBER,
    "figure": FIGURE,
    "verdict": str,
}
Part = Callable[[str], ModuleType]


def check_entry(entry: dict[str, Any], schema: dict[str, Any]) -> None:
    assert entry.keys() == schema.keys()
    assert {name: value for name, value in entry.items() if not isinstance(value, schema[name])} == {}


def check_schema(document: dict[str, Any]) -> None:
    check_entry(document, DOCUMENT)
    for kind, schema in {"steps": STEP, "rows": ROW, "goals": GOAL}.items():
        for entry in document[kind]:
            check_entry(entry, schema)
    assert {step["state"] for step in document["steps"]} <= STATES
    assert {goal["verdict"] for goal in document["goals"]} <= {"passed", "missed", "not run"}


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def exports(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports as they are carried along: the small model, and a broken one in the place of the larger."""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "tiny").symlink_to(tiny_export)
    (folder / "0.5b").mkdir()
    (folder / "0.5b" / "export.json").write_text("{}")
    return folder


def command(out: Path, exports: Path, *more: str) -> list[str]:
    options = ["--targets", "cpu", "--geometries", "0.5b", "tiny", "--precisions", "int8", "--quick", "--rounds", "1"]
    return [sys.executable, str(SCRIPT), "--out", str(out), "--exports", str(exports), *options, *more]


@pytest.fixture(scope="module")
def finished(exports: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A whole run in which the export of one model is broken."""
    out = tmp_path_factory.mktemp("run") / "gpu_check.json"
    return out, subprocess.run(command(out, exports, "--commit", "planted"), capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_without_a_gpu_writes_everything_that_it_promises(finished):
    document = json.loads(finished[0].read_text())
    check_schema(document)
    assert document["complete"] and document["ended"]
    results = {step["name"]: step["result"] for step in document["steps"] if step["state"] == "done"}
    assert results["machine"]["commit"] == "planted"
    reference = results["tiny/reference"]
    assert reference["source"] == "transformers" and reference["difference_of_both"] > 0
    verified = results["cpu/tiny/int8/verify"]
    assert verified["golden"]["equal_tokens"] == verified["golden"]["tokens"] > 0
    assert verified["reference"]["paths"].keys() == {"prefill", "decode"}
    assert results["cpu/tiny/int8/determinism"]["tokens"]["equal_again"] == 8
    assert results["cpu/tiny/int8/build"]["bytes"] > 5_000_000
    measured = results["cpu/tiny/int8/measure"]
    assert [entry["prompt"] for entry in measured["alone"]] == [128, 512, 1920]  # the small model ends at 2,048
    assert measured["batch"]["rows"] == 8


@pytest.mark.slow
def test_rows_of_a_run_follow_from_its_steps(finished):
    document = json.loads(finished[0].read_text())
    results = {step["name"]: step["result"] for step in document["steps"]}
    row = next(row for row in document["rows"] if row["geometry"] == "tiny")
    measured = results["cpu/tiny/int8/measure"]
    alone = measured["alone"][0]
    read = measured["weight_bytes"] + measured["cache_bytes_per_position"] * (128 + 64)
    assert row["verified"] == "yes"
    assert row["tokens_per_s"] == pytest.approx(1 / alone["tpot_s"], rel=CLOSE)
    assert row["share"] == pytest.approx(read / alone["tpot_s"] / results["bandwidth"]["bytes_per_s"], rel=CLOSE)
    assert row["speedup"] is row["prefill_ratio"] is row["device_bytes"] is None
    assert {goal["verdict"] for goal in document["goals"]} == {"not run"}  # they are about GPUs


@pytest.mark.slow
def test_a_step_that_fails_is_recorded_and_the_rest_goes_on(finished):
    path, done = finished
    states = {step["name"]: (step["state"], step["message"]) for step in json.loads(path.read_text())["steps"]}
    assert done.returncode == 1
    assert states["cpu/0.5b/int8/build"][0] == "failed" and "export.json" in states["cpu/0.5b/int8/build"][1]
    assert states["cpu/0.5b/int8/verify"] == ("not run", "cpu/0.5b/int8/build is not done")
    assert states["cpu/tiny/int8/measure"] == ("done", "")
    assert "failed: cpu/0.5b/int8/build: " in done.stdout and "Traceback" not in done.stdout


@pytest.mark.slow
def test_a_resumed_run_keeps_what_is_done(finished, exports, tmp_path):
    before = json.loads(finished[0].read_text())
    out = tmp_path / "again.json"
    out.write_text(json.dumps(before))
    done = subprocess.run(command(out, exports, "--resume"), capture_output=True, text=True)
    after = json.loads(out.read_text())
    kept = [step for step in before["steps"] if step["state"] == "done" and not step["name"].startswith("0.5b")]
    assert all(step in after["steps"] for step in kept)
    assert {step["name"] for step in after["steps"]} == {step["name"] for step in before["steps"]}
    assert "tiny/int8" not in done.stderr and "cpu/0.5b/int8/build: failed" in done.stderr


def test_a_run_that_is_cut_off_leaves_a_whole_file_and_no_process(exports, tmp_path):
    out = tmp_path / "cut.json"
    run = subprocess.Popen(command(out, exports), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE_S) == 128 + signal.SIGTERM
    document = json.loads(out.read_text())
    check_schema(document)
    assert not document["complete"] and document["ended"] is None
    assert 0 < len(document["steps"]) < 12
    assert not any(map(running, children))


def test_no_step_begins_when_the_time_is_up(exports, tmp_path):
    out = tmp_path / "late.json"
    assert subprocess.run(command(out, exports, "--minutes", "0"), capture_output=True).returncode == 0
    document = json.loads(out.read_text())
    check_schema(document)
    assert {step["state"] for step in document["steps"]} == {"not run"}
    assert document["steps"][0]["message"] == "no time was left"


def test_arguments_that_contradict_each_other_exit_with_2(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "--keep"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--keep needs --work" in done.stderr
    assert list(tmp_path.iterdir()) == []


def called(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The script with some arguments; if they are taken, every step is found to be too late."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/dev/full"], "--out /dev/full: a folder or a device"),
        (["--out", "/dev/null"], "--out /dev/null: a folder or a device"),
        (["--out", "."], "a folder or a device"),
        (["--out", "no/x.json"], "no/x.json: cannot be written (No such file"),
        (["--work", "text"], "--work text: not a folder"),
        (["--work", "/proc/w"], "--work /proc/w: not a folder"),
        (["--prepare", "/proc/w"], "--prepare /proc/w: not a folder"),
        (["--markdown", "--out", "none.json"], "--out none.json: there is no such file"),
        (["--resume", "--out", "none.json"], "none.json: there is no such file"),
        (["--markdown", "--out", "text"], "--out text: not a file that a run has written"),
        (["--resume", "--out", "text"], "text: not a file that a run has written"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value).replace("/", "_"),
)
def test_files_that_cannot_be_used_are_refused_in_a_sentence_before_any_work(tmp_path, arguments, words):
    (tmp_path / "text").write_text("no JSON")
    done = called(tmp_path, "--minutes", "0", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("gpu_check.py: ") and words in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"text": "no JSON"}


@pytest.mark.parametrize("given", ["--minutes=nan", "--minutes=-1", "--minutes=inf", "--limit=nan", "--limit=inf"])
def test_times_that_are_none_are_refused(tmp_path, given):
    done = called(tmp_path, given)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("gpu_check.py: error: ") and given.partition("=")[0] in last
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_keeps_the_result_of_the_one_before(tmp_path):
    late = ["--minutes", "0", "--targets", "cpu", "--geometries", "tiny", "--out", "x.json"]
    (tmp_path / "link.json").symlink_to("x.json")
    for more in (["--rounds", "3"], ["--rounds", "4"], ["--rounds", "5", "--out", "link.json"]):
        assert called(tmp_path, *late, *more).returncode == 0
    rounds = {
        name: json.loads((tmp_path / name).read_text())["arguments"]["rounds"] for name in ("x.json", "x.json.bak")
    }
    assert rounds == {"x.json": 5, "x.json.bak": 4}
    assert (tmp_path / "link.json").is_symlink()
    assert called(tmp_path, *late, "--resume").returncode == 0
    assert json.loads((tmp_path / "x.json.bak").read_text())["arguments"]["rounds"] == 4
    refused = called(tmp_path, *late, "--resume", "--emulate")
    assert refused.returncode == 2 and "do not go into one file" in refused.stderr
    (tmp_path / "x.json.bak").unlink()
    (tmp_path / "x.json.bak").mkdir()
    refused = called(tmp_path, *late)
    assert refused.returncode == 2 and "cannot be kept as x.json.bak" in refused.stderr


def test_progress_names_the_step_its_end_and_why(tmp_path):
    done = called(
        tmp_path, "--minutes", "0", "--targets", "cpu", "--geometries", "tiny", "--precisions", "int8", "--quick"
    )
    first = done.stderr.splitlines()[0]
    assert first == "[1/9] machine: not run: no time was left"


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.fixture
def options(part: Part, tmp_path: Path) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        plan = part("plan")
        given = {
            "targets": plan.TARGETS,
            "geometries": plan.GEOMETRIES,
            "precisions": plan.PRECISIONS,
            "exports": None,
            "work": tmp_path,
            "rounds": 1,
            "emulate": False,
            "probes": True,
        }
        return plan.Options(**(given | changes))

    return make


def test_every_step_comes_once_and_after_what_it_needs(part, options):
    plan = part("plan")
    seen: set[str] = set()
    for step in plan.steps(options()):
        assert step.name not in seen and {*step.needs, *step.uses} <= seen
        seen.add(step.name)
    assert {f"{target}/{model}/int4/measure" for target in plan.TARGETS for model in ("tiny", "1b")} <= seen
    compared = {f"{target}/tiny/{precision}/lengths" for target in plan.ENGINES for precision in plan.PRECISIONS}
    assert {name for name in seen if name.endswith("/lengths")} == compared
    assert {name for name in seen if name.endswith("/baseline")} == {"tiny/baseline", "0.5b/baseline", "1b/baseline"}


def test_steps_say_what_their_workers_take(part, options):
    workers = part("work").WORKERS
    tried = set()
    for step in part("plan").steps(options()):
        if "--worker" in step.command:
            *_, name, arguments = step.command
            module, _, function = workers[name].partition(":")
            inspect.signature(getattr(importlib.import_module(module), function)).bind(**json.loads(arguments))
            tried.add(name)
    assert tried == workers.keys()


def test_builds_are_commands_that_llmc_knows(part, options):
    from llmc.cli.build import build_command

    known = {name for option in build_command.params if isinstance(option, click.Option) for name in option.opts}
    builds = [step.command for step in part("plan").steps(options(targets=("tensorrt",))) if "build" in step.kind]
    assert any("--form" in build for build in builds)
    for build in builds:
        assert build[:4] == (sys.executable, "-m", "llmc.cli", "build")
        assert {word for word in build[4:] if word.startswith("-")} <= known


def test_a_gpu_is_needed_to_run_what_is_built_for_one(part, options):
    by_name = {step.name: step for step in part("plan").steps(options(targets=("tensorrt-rtx",)))}
    assert by_name["tensorrt-rtx/tiny/int8/build"].needs == ("tensorrt-rtx/library", "tiny/export")
    assert "bandwidth" in by_name["tensorrt-rtx/tiny/int8/verify"].needs
    emulated = {step.name: step for step in part("plan").steps(options(targets=("tensorrt-rtx",), emulate=True))}
    assert "bandwidth" not in emulated["tensorrt-rtx/tiny/int8/verify"].needs
    assert "tiny/baseline" not in emulated and "tensorrt-rtx/tiny/int8/lengths" not in emulated


# --------------------------------------------------------------------------------------------------------------- store


def test_a_file_that_cannot_be_written_leaves_the_old_one(part, tmp_path):
    store, path = part("store"), tmp_path / "x.json"
    document = store.fresh("x", {})
    store.write(document, path)
    with pytest.raises(ValueError, match="JSON"):
        store.write(document | {"arguments": {"x": float("nan")}}, path)
    assert store.read(path) == document
    check_schema(document)


def test_files_of_others_are_refused(part, tmp_path):
    (tmp_path / "x.json").write_text('{"schema": 99}')
    store = part("store")
    with pytest.raises(store.RefusedError, match="not written by this version"):
        store.read(tmp_path / "x.json")
    store.write(store.fresh("x", {}) | {"steps": [{"name": "machine"}]}, tmp_path / "x.json")
    with pytest.raises(store.RefusedError, match="not written by this version"):
        store.read(tmp_path / "x.json")


def test_a_full_disk_ends_a_run_with_a_sentence_and_the_old_file(part, tmp_path, monkeypatch):
    store, path = part("store"), tmp_path / "x.json"
    store.write(store.fresh("old", {}), path)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(store.RefusedError, match="No space left"):
        store.write(store.fresh("new", {}), path)
    assert store.read(path)["command"] == "old"


def test_folders_go_when_nothing_that_is_left_needs_them(part, tmp_path):
    plan, main = part("plan"), part("main")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "kept.npz").write_text("")
    made = plan.Step("build", (), makes=tmp_path / "bundle")
    reference = plan.Step("reference", (), makes=tmp_path / "kept.npz")
    last = plan.Step("measure", (), ("build",), uses=("reference",))
    main.discard([made, reference, last], [last])
    assert (tmp_path / "bundle").exists() and (tmp_path / "kept.npz").exists()
    main.discard([made, reference, last], [])
    assert list(tmp_path.iterdir()) == []


def test_a_build_is_repeated_when_its_bundle_is_gone_and_still_needed(part, tmp_path):
    plan, main, store, process = part("plan"), part("main"), part("store"), part("process")
    made = plan.Step("build", (), makes=tmp_path / "bundle")
    last = plan.Step("measure", (), ("build",))
    document = store.fresh("", {})
    store.put(document, store.record("build", process.Outcome("done")))
    assert not main.reusable(made, [made, last], document)
    (tmp_path / "bundle").mkdir()
    assert main.reusable(made, [made, last], document)
    (tmp_path / "bundle").rmdir()
    store.put(document, store.record("measure", process.Outcome("done")))
    assert main.reusable(made, [made, last], document)


def test_a_report_without_what_is_kept_of_it_fails_the_step(part, monkeypatch):
    main, plan = part("main"), part("plan")
    monkeypatch.setattr(main, "run", lambda command, limit: part("process").Outcome("done", result={"seconds": 1.0}))
    found = main.attempt(plan.Step("x/y/z/build", (), digest=plan.built), part("store").fresh("", {}), 9.0)
    assert (found.state, found.message) == ("failed", "its result lacks 'manifest'")
