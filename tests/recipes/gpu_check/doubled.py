"""``recipes/gpu_check.py`` in processes whose GPU and libraries are doubles, and where nothing takes long."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))

from gpu_check import main

if __name__ == "__main__":
    if "--step" in sys.argv:
        from doubles import gpu
        from gpu_check import correctness, kernels, machine, measure, models

        gpu.install()
        models.CONTEXTS["tiny"], machine.COPY_BYTES, correctness.LONG_PROMPT = 512, 1 << 16, 40
        measure.PROMPTS, measure.NEW_TOKENS, measure.STEPS, measure.ROUNDS = (8, 40), 4, 2, 2
        correctness.NEW_TOKENS, kernels.STEPS = 4, 3
    sys.exit(main.main(sys.argv[1:], __doc__))
