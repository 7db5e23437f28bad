"""Runs of the check of GPU targets: what becomes of steps that go wrong, of the file, and of a run that is cut off."""

import errno
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles.processes import running

HERE = Path(__file__).parent
SCRIPT = HERE.parents[2] / "recipes" / "gpu_check.py"
NINE_MINUTES_S = 540
# Seconds until a process that was interrupted must be gone.
PATIENCE_S = 120
# What a reader of the file may rely on: names and types.
NONE = type(None)
STEP = {
    "state": str,
    "message": str,
    "exit": (int, NONE),
    "seconds": float,
    "output": str,
    "result": (dict, NONE),
    "ended": str,
    "commit": (str, NONE),
}
Part = Callable[[str], ModuleType]


def called(folder: Path, *arguments: object, script: Path = HERE / "planted.py") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=PATIENCE_S)


def steps_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["steps"]
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """A whole run of steps that go wrong in every way."""
    folder = tmp_path_factory.mktemp("run")
    return folder / "x.json", called(folder, "--out", "x.json", "--commit", "planted")


def test_whatever_becomes_of_a_step_the_rest_goes_on(finished):
    path, done = finished
    found = steps_of(path)
    assert done.returncode == 1
    assert {name: step["state"] for name, step in found.items()} == {
        "fine": "done",
        "hang": "timed out",
        "die": "crashed",
        "rubbish": "failed",
        "leave": "failed",
        "fail": "failed",
        "lack": "not run",
        "raises": "failed",
        "last": "done",
    }
    assert found["raises"]["message"] == "ValueError: a bug" and "Traceback" in found["raises"]["output"]
    assert found["rubbish"]["message"] == "it wrote no result" and '{"result": {}}' in found["rubbish"]["output"]
    assert found["fail"]["result"] == {"problems": ["a", "b"]} and found["lack"]["message"] == "no torch"
    assert "[7/9] lack: not run: no torch" in done.stderr.splitlines()


def test_a_step_is_recorded_with_all_that_is_promised(finished):
    for step in steps_of(finished[0]).values():
        assert step.keys() >= STEP.keys() and step["commit"] == "planted"
        assert {name: step[name] for name, kind in STEP.items() if not isinstance(step[name], kind)} == {}
    fine = steps_of(finished[0])["fine"]
    assert fine["result"] == {"times": 1, "nan": None} and "a library says { nothing" in fine["output"]
    assert fine["resident_bytes"] > 1_000_000 and "missing" in fine["clocks"]


def test_steps_that_are_done_are_skipped_unless_they_are_asked_for(finished, tmp_path):
    out = tmp_path / "x.json"
    out.write_text(finished[0].read_text())
    before = steps_of(out)
    again = called(tmp_path, "--out", "x.json", "--minutes", "0")
    assert again.returncode == 1 and again.stderr.splitlines()[:2] == [
        "[1/7] lack: not run: no time was left",
        "[2/7] hang: not run: no time was left",
    ]
    assert steps_of(out) == before  # what was learnt before is not lost where there is no time
    named = called(tmp_path, "--out", "x.json", "fi*", "lack")
    assert named.stderr.splitlines() == ["[1/2] fine: done", "[2/2] lack: not run: no torch"]
    assert named.returncode == 0 and steps_of(out)["fine"]["ended"] >= before["fine"]["ended"]
    assert steps_of(out)["last"] == before["last"]


def test_a_run_that_is_cut_off_leaves_a_whole_file_and_no_process(tmp_path):
    out = tmp_path / "x.json"
    command = [sys.executable, str(HERE / "planted.py"), "--out", str(out), "fine", "hang", "die"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S
    while not (out.exists() and steps_of(out)) and time.monotonic() < until:
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert next(iter(steps_of(out))) == "fine" and "die" not in steps_of(out)
    assert not any(map(running, children))


def test_a_step_that_is_cut_off_by_the_end_of_the_run_was_not_run(tmp_path):
    done = called(tmp_path, "--out", "x.json", "--minutes", "0.04", "--patience", "100", "hang", "last")
    found = steps_of(tmp_path / "x.json")
    assert done.returncode == 0 and {step["state"] for step in found.values()} == {"not run"}
    assert found["hang"]["message"].startswith("the run's time was up: no end after 2 s; its last line: ")
    assert found["last"]["message"] == "no time was left" and found["last"]["seconds"] == 0.0
    assert called(tmp_path, "--out", "x.json", "--skip", "[!l]*", "--skip", "le*").returncode == 0
    assert steps_of(tmp_path / "x.json")["last"]["state"] == "done"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/dev/full"], "--out /dev/full: no file"),
        (["--out", "."], "no file; name one that a run has written"),
        (["--out", "no/x.json"], "no/x.json: cannot be written (No such file"),
        (["--out", "new.json", "--work", "text"], "text: a folder is needed"),
        (["--prepare", "/proc/w"], "/proc/w: a folder is needed"),
        (["--markdown", "--out", "none.json"], "--out none.json: no file"),
        (["--markdown", "--out", "text"], "--out text: not a file that a run has written"),
        (["--out", "text"], "text: not a file that a run has written"),
        (["--out", "other.json"], "other.json: not written by this version"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value).replace("/", "_"),
)
def test_files_that_cannot_be_used_are_refused_in_a_sentence_before_any_work(tmp_path, arguments, words):
    before = {"text": "no JSON", "other.json": '{"schema": 2, "steps": {"machine": {}}}'}
    for name, content in before.items():
        (tmp_path / name).write_text(content)
    done = called(tmp_path, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("gpu_check.py: ") and words in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "new.json"} == before


@pytest.mark.parametrize(
    "given", ["--minutes=nan", "--minutes=-1", "--patience=0", "--patience=inf", "--skip=*", "nothing"]
)
def test_arguments_that_are_none_are_refused(tmp_path, given):
    done = called(tmp_path, given, script=SCRIPT)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 2 and ": error: " in last and given.partition("=")[0].replace("--skip", "without *") in last
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_the_old_one(part, tmp_path, monkeypatch):
    main, path = part("main"), tmp_path / "x.json"
    document = {"schema": main.SCHEMA, "started": "now", "steps": {}}
    main.write(document, path)
    with pytest.raises(ValueError, match="JSON"):
        main.write(document | {"x": float("nan")}, path)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(main.RefusedError, match="No space left"):
        main.write(document | {"started": "later"}, path)
    assert main.read(path) == document and list(tmp_path.iterdir()) == [path]


def test_a_link_to_the_file_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to("x.json")
    (tmp_path / "x.json").write_text('{"schema": 2, "started": "", "steps": {}}')
    assert called(tmp_path, "--out", "link.json", "--minutes", "0").returncode == 0
    assert (tmp_path / "link.json").is_symlink() and "fine" in steps_of(tmp_path / "x.json")


# --------------------------------------------------------------------------------------------------------------- steps


def test_every_step_comes_once_with_a_function_that_takes_what_its_name_says(part):
    steps = part("steps")
    assert len({step.name for step in steps.STEPS}) == len(steps.STEPS)
    for step in steps.STEPS:
        module, _, function = step.function.partition(":")
        found = getattr(importlib.import_module(f"gpu_check.{module}"), function)
        inspect.signature(found).bind(*step.name.split("/")[1:], None)
        assert 0 < step.limit_s <= NINE_MINUTES_S / 3  # one that hangs leaves most of a run to the others


def test_what_is_worth_most_comes_first_and_what_few_need_not_at_all(part):
    names = [step.name for step in part("steps").chosen([])]
    assert names[:4] == ["machine", "driver", "build/cuda/0.5b/fp16", "measure/cuda/0.5b/fp16"]
    kinds = list(dict.fromkeys(name.partition("/")[0] for name in names if name.count("/") < 3 or "build" not in name))
    assert kinds[:3] == ["machine", "driver", "measure"] and kinds[-2:] == ["kernels", "refusal"]
    order = [names.index(f"{kind}/cuda/1b/int4") for kind in ("measure", "verify", "determinism", "buckets")]
    assert order == sorted(order) and names.index("baseline/1b") < order[1]
    rare = [name for name in names if {"cpu", "tiny", "tensorrt-rtx"} & set(name.split("/"))]
    assert rare == ["refusal/tensorrt-rtx/tiny/fp16"]
    assert [step.name for step in part("steps").chosen(["measure/cpu/*/int8", "driver"])] == [
        "driver",
        *(f"measure/cpu/{model}/int8" for model in ("0.5b", "1b", "tiny")),
    ]


class Machine:
    """A machine on which steps take a time or hang; its clock is all that passes."""

    def __init__(self, hangs: Callable[[str], bool], takes_s: float) -> None:
        self.hangs, self.takes_s = hangs, takes_s
        self.seconds, self.ran = 0.0, list[str]()

    def monotonic(self) -> float:
        return self.seconds

    def run(self, command: list[str], limit_s: float, cache: Path) -> dict[str, Any]:
        name = command[-1]
        took = float("inf") if self.hangs(name) else self.takes_s
        self.seconds += min(took, limit_s)
        self.ran.append(name)
        state, message = ("done", "") if took <= limit_s else ("timed out", f"no end after {limit_s:.0f} s")
        done = {"problems": []} if state == "done" else None
        return {"state": state, "message": message, "exit": None, "seconds": 1.0, "output": "", "result": done}


def simulated(part: Part, patch: pytest.MonkeyPatch, hangs: Callable[[str], bool], takes_s: float) -> Machine:
    """Put such a machine in the place of time and processes; nothing is measured there, so no table is printed."""
    machine = Machine(hangs, takes_s)
    for name, value in {"time": machine, "run": machine.run, "markdown": lambda document: ""}.items():
        patch.setattr(part("main"), name, value)
    return machine


def first_skips() -> list[str]:
    """The patterns that the page has the first run leave out."""
    page = (SCRIPT.with_suffix("") / "README.md").read_text(encoding="utf-8")
    return re.findall(r"--skip '(.+?)'", page.partition("## Thirty minutes")[2])[:4]


@pytest.mark.parametrize("hanging", ["", "build/cuda/1b/fp16", "measure/cuda/0.5b/fp16"])
def test_two_runs_of_nine_minutes_are_enough_though_one_step_hangs(part, monkeypatch, tmp_path, hanging):
    main = part("main")
    takes_s = 20.0  # what steps may take on average
    machine = simulated(part, monkeypatch, lambda name: name == hanging, takes_s)
    skipped = [f"--skip={pattern}" for pattern in first_skips()]
    for patterns in (skipped, skipped[:-1]):
        start = machine.seconds
        main.main(["--out", str(tmp_path / "x.json"), "--minutes", "9", *patterns], None)
        assert machine.seconds - start <= NINE_MINUTES_S
    states = {name: step["state"] for name, step in steps_of(tmp_path / "x.json").items()}
    assert [name for name, state in states.items() if state != "done"] == [hanging] * bool(hanging)
    assert states.get(hanging, "timed out") == "timed out"
    assert len(states) == 2 + 6 * 6 + 2  # six bundles, each built, measured, verified ...; and torch's


def test_the_page_shows_what_the_first_run_says(part):
    page = (SCRIPT.with_suffix("") / "README.md").read_text(encoding="utf-8")
    left = [step.name for step in part("steps").chosen([], first_skips()) if step.name not in ("machine", "driver")]
    number, total, name = re.findall(r"`\[(\d+)/(\d+)\] (\S+/\S+): done`", page)[0]
    assert (left[int(number) - 1], len(left)) == (name, int(total))


def test_a_run_goes_on_where_the_last_one_ended_and_tries_again_at_the_end(part, monkeypatch, tmp_path):
    main = part("main")
    machine = simulated(part, monkeypatch, lambda name: name == "driver", 60.0)
    arguments = ["--out", str(tmp_path / "x.json"), "--minutes", "4.5", "--skip", "*/tensorrt/*"]
    main.main(arguments, None)
    wanted = [step.name for step in part("steps").chosen([], ["*/tensorrt/*"])]
    assert machine.ran == wanted[:5]
    found = steps_of(tmp_path / "x.json")
    assert found[wanted[4]]["message"].startswith("the run's time was up: no end after 30 s")
    assert [found[name]["state"] for name in wanted[:5]] == ["done", "timed out", "done", "done", "not run"]
    machine.ran.clear()
    main.main([*arguments, "--minutes", "60"], None)
    assert machine.ran == [*wanted[4:], "driver"]


def test_a_step_without_its_bundle_may_take_the_time_to_build_it(part, tmp_path):
    steps = part("steps")
    by_name = {step.name: step for step in steps.STEPS}
    build, verify = by_name["build/cuda/1b/int8"], by_name["verify/cuda/1b/int8"]
    assert steps.allowed(build, tmp_path) == build.limit_s
    assert steps.allowed(by_name["baseline/1b"], tmp_path) == by_name["baseline/1b"].limit_s
    assert steps.allowed(verify, tmp_path) == verify.limit_s + build.limit_s
    (tmp_path / "cuda-1b-int8").mkdir()
    (tmp_path / "cuda-1b-int8" / "llmc.json").touch()
    assert steps.allowed(verify, tmp_path) == verify.limit_s
