"""``recipes/gpu_check.py`` with steps that go wrong in every way, and two that do not."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))

from gpu_check import main, steps


def fine(work: Path) -> dict[str, object]:
    sys.stdout.write("a library says { nothing\n")
    with (work / "times").open("a") as file:
        file.write("x")
    return {"times": len((work / "times").read_text()), "nan": float("nan")}


def hang(work: Path) -> None:
    time.sleep(600)


def die(work: Path) -> None:
    os.kill(os.getpid(), 11)


def rubbish(work: Path) -> list[str]:
    sys.stdout.buffer.write(b'\xff\x00{"result": {}}\n')
    return ["no object"]


def leave(work: Path) -> None:
    os._exit(0)


def fail(work: Path) -> dict[str, object]:
    return {"problems": ["a", "b"]}


def lack(work: Path) -> None:
    raise steps.NotHereError("no torch")


def raises(work: Path) -> None:
    raise ValueError("a bug")


if __name__ == "__main__":
    sys.modules["gpu_check.planted"] = sys.modules["__main__"]
    names = ("fine", "hang", "die", "rubbish", "leave", "fail", "lack", "raises")
    limits = {"hang": 2.0}
    steps.STEPS[:] = [steps.Step(name, f"planted:{name}", limits.get(name, 120.0)) for name in names]
    steps.STEPS.append(steps.Step("last", "planted:fine", 120.0))
    sys.exit(main.main(sys.argv[1:], __doc__))
