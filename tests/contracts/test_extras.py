"""Every verb in environments of extras: it works with those that it needs, or one sentence names one that it lacks.

An environment holds the wheel and, as links to what is installed here, the distributions that the wheel declares for
its extras, and those that they declare, and nothing else. A verb is tried where no smaller environment has as many of
the extras that it needs.
"""

import json
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from doubles.shared import shared
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("", "cpu", "cpu guided", "cpu serve", "build", "cpu build", "cpu export")
LIMIT_S = 240.0  # for what takes some seconds on a machine without other work


@dataclass(frozen=True)
class Verb:
    """A command, with words for folders; the extras that it needs; its exit code with them; and what is typed."""

    command: str
    needs: str = ""
    code: int = 0
    stdin: str = ""

    @property
    def extras(self) -> set[str]:
        return set(self.needs.split())


VERBS = (
    Verb("plan BUNDLE"),
    Verb("plan CHECKPOINT", "build"),
    Verb("plan EXPORT", "build"),
    Verb("inspect BUNDLE"),
    Verb("inspect CHECKPOINT"),
    Verb("inspect EXPORT"),
    Verb("doctor BUNDLE"),
    Verb("serve --help"),
    Verb("serve BUNDLE --port 0 --upstream http://127.0.0.1:9/v1", "cpu serve"),
    Verb("run BUNDLE -p Once --max-tokens 2", "cpu"),
    Verb("run BUNDLE -p Once --regex a+ --max-tokens 2", "cpu guided"),
    Verb("chat BUNDLE --max-tokens 2", "cpu", stdin="Hello\n"),
    Verb("verify BUNDLE", "cpu"),
    Verb("bench BUNDLE --prompt-length 8 --new-tokens 2 --repeats 1", "cpu"),
    Verb("embed BUNDLE Once", code=2),  # it generates
    Verb("rank BUNDLE Once Twice", code=2),
    Verb("eval BUNDLE --window 16 --max-windows 1", "cpu build"),
    Verb("build EXPORT -o NEW", "cpu build"),
    Verb("export CHECKPOINT -o NEW", "export"),
)


def declared(requirements: Iterator[Requirement], extras: set[str]) -> Iterator[Requirement]:
    """Those that hold here with these extras."""
    for each in requirements:
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield each


def closure(asked: Iterator[Requirement], seen: dict[tuple[str, str], metadata.Distribution]) -> None:
    """Add the distributions of requirements, and of theirs, to ``seen``, once for each set of extras."""
    for each in asked:
        key = canonicalize_name(each.name), ",".join(sorted(each.extras))
        if key not in seen:
            seen[key] = metadata.distribution(each.name)
            closure(declared(map(Requirement, seen[key].requires or ()), each.extras), seen)


def with_nested(own: metadata.Distribution, extras: set[str]) -> set[str]:
    """Extras, and those of llmc's own that they bring."""
    found = declared(map(Requirement, own.requires or ()), extras)
    more = {extra for each in found if each.name == own.name for extra in each.extras} - extras
    return with_nested(own, extras | more) if more else extras


@cache
def owners() -> Counter[str]:
    """How many of the installed distributions have files below each name at the top."""
    return Counter(top for each in metadata.distributions() for top in {file.parts[0] for file in each.files or ()})


@cache
def linked(name: str) -> set[str]:
    """What is linked of a distribution: folders that are its own, which have compiled modules, and else files."""
    files = [file for file in metadata.files(name) or () if not {"..", "__pycache__"} & set(file.parts)]
    return {file.parts[0] if owners()[file.parts[0]] == 1 else str(file) for file in files}


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the wheel, unpacked once, so that Python compiles its modules once."""
    return shared(tmp_path_factory, "unpacked", lambda folder: wheel.extractall(folder))


def environment(folder: Path, unpacked: Path, extras: str) -> tuple[Path, metadata.Distribution]:
    """The interpreter of a new environment, and the wheel's distribution in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for path in unpacked.glob("llmc*"):
        (packages / path.name).symlink_to(path)
    own = metadata.PathDistribution(next(packages.glob("llmc*.dist-info")))
    requirements = declared(map(Requirement, own.requires or ()), with_nested(own, set(extras.split())))
    wanted = [each for each in requirements if each.name != own.name]
    found: dict[tuple[str, str], metadata.Distribution] = {}
    closure(iter(wanted), found)
    for distribution in found.values():
        for name in linked(distribution.name):
            place = packages / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                place.symlink_to(Path(distribution.locate_file(name)).resolve())
    return folder / "bin" / "python", own


# All commands in one process, for each costs half a second to start; what one finds missing is missing for all.
IN_TURN = """
import io, json, sys
from llmc.cli.main import main
ends, sys.stdout = [], open("/dev/null", "w")
for words, stdin in json.loads(sys.argv[1]):
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    sys.stderr = io.TextIOWrapper(said := io.BytesIO(), write_through=True)
    try:
        main(words)
    except SystemExit as end:
        ends.append((end.code, said.getvalue().decode()))
json.dump(ends, sys.__stdout__)
"""


def run(python: Path, orders: list[tuple[list[str], str]], home: Path) -> list[tuple[int, str]]:
    """Exit codes and stderr of commands, each with what is typed."""
    order = [python, "-c", IN_TURN, json.dumps(orders)]
    ran = subprocess.run(order, stdout=subprocess.PIPE, env=settings(home), cwd=home, timeout=LIMIT_S, check=True)
    return [tuple(end) for end in json.loads(ran.stdout)]


def settings(home: Path) -> dict[str, str]:
    return {"LLMC_CACHE": str(home / "cache"), "HOME": str(home), "ORT_DISABLE_TELEMETRY": "1"}


def serve(python: Path, words: list[str], home: Path) -> tuple[int, str]:
    """Exit code and stderr of a server, which is ended once it says that it is ready."""
    log = home / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, "-m", "llmc.cli", *words], stdout=subprocess.DEVNULL, stderr=stderr, env=settings(home), cwd=home
        )
    try:
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and "ready" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
    finally:
        process.kill()
    return process.returncode, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: extras or "none")
def test_every_verb_works_or_names_the_extra_that_it_lacks(
    extras, unpacked, tmp_path, one_layer, layer_export, tiny_bundle
):
    python, own = environment(tmp_path / "environment", unpacked, extras)
    held = with_nested(own, set(extras.split()))
    smaller = [other for each in EXTRAS if (other := with_nested(own, set(each.split()))) < held]
    places = {"CHECKPOINT": one_layer, "EXPORT": layer_export, "BUNDLE": tiny_bundle}
    tried = [verb for verb in VERBS if not any(verb.extras & held == verb.extras & each for each in smaller)]
    orders = [
        ([str({**places, "NEW": tmp_path / str(number)}.get(word, word)) for word in verb.command.split()], verb.stdin)
        for number, verb in enumerate(tried)
    ]
    serving = [verb.extras <= held and "--port" in verb.command for verb in tried]
    ends = iter(run(python, [order for order, serves in zip(orders, serving, strict=True) if not serves], tmp_path))
    wrong = []
    for verb, (words, _), serves in zip(tried, orders, serving, strict=True):
        code, said = serve(python, words, tmp_path) if serves else next(ends)
        lacking = verb.extras - held
        told = not lacking or any(f"it is in the extra '{extra}'" in said for extra in lacking)
        if code != (1 if lacking else verb.code) or not told or "a bug of llmc" in said or "Traceback" in said:
            wrong.append(f"llmc {verb.command} exits with {code}: {said}")
    assert wrong == []
