"""``recipes/gpu_check.py`` in processes whose GPU and libraries are doubles, where nothing takes long, and with three
steps among the others that hang, die and print rubbish."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))

from gpu_check import main, steps


def hang(options: steps.Options) -> None:
    time.sleep(600)


def die(options: steps.Options) -> None:
    os.kill(os.getpid(), 11)


def rubbish(options: steps.Options) -> list[str]:
    sys.stdout.buffer.write(b'\xff\x00{"result": {}}\n')
    return ["no object"]


if __name__ == "__main__":
    sys.modules["gpu_check.doubled"] = sys.modules["__main__"]
    steps.STEPS[1:1] = [steps.Step(name, f"doubled:{name}", 4.0) for name in ("hang", "die", "rubbish")]
    steps.UNASKED.remove("tiny")
    if "--step" in sys.argv:
        from doubles import gpu
        from gpu_check import correctness, kernels, machine, measure, models

        gpu.install()
        models.CONTEXTS["tiny"], machine.COPY_BYTES, correctness.LONG_PROMPT = 512, 1 << 16, 40
        measure.PROMPTS, measure.NEW_TOKENS, measure.STEPS, measure.ROUNDS = (8, 40), 4, 2, 2
        correctness.NEW_TOKENS, kernels.STEPS = 4, 3
    sys.exit(main.main(sys.argv[1:], __doc__))
