"""``recipes/gpu_check.py`` in processes whose GPU and libraries are doubles, and where nothing takes long."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

from gpu_check import determinism, kernels, machine, main, measure, models, reference

if __name__ == "__main__":
    if "--step" in sys.argv:
        from doubles import gpu

        gpu.install()
        models.CONTEXTS["tiny"], machine.COPY_BYTES, reference.LONG_PROMPT = 512, 1 << 16, 40
        measure.PROMPTS, measure.NEW_TOKENS, measure.STEPS, measure.ROUNDS = (8, 40), 4, 2, 2
        determinism.NEW_TOKENS, kernels.STEPS = 4, 3
    sys.exit(main.main(sys.argv[1:], __doc__))
