"""Build, verify and measure llmc's GPU targets on this machine, and write everything into one JSON file.

    python recipes/gpu_check.py --out gpu_check.json                      # every step; again: those that are not done
    python recipes/gpu_check.py --out gpu_check.json driver '*/cuda/1b/*' # these, done or not
    python recipes/gpu_check.py --out gpu_check.json --markdown           # runs nothing: the file as a table

A step is a process of its own with a time limit, which is for a server (--patience 10 for a Jetson): what is refused,
crashes or hangs is recorded, with all that libraries said, and the rest goes on. No step needs another one: exports and
bundles lie in --work, and a step that misses one makes it. The file is written anew after each step. The steps are
listed in gpu_check/steps.py; those of tensorrt-rtx, of the small model and of the target cpu, which needs no GPU, run
when they are named.

What to install, in this order, on Linux with Python 3.10 ... 3.13; steps whose part is missing are recorded as not run:

1. The NVIDIA driver, or JetPack. ``nvidia-smi`` (on a Jetson ``tegrastats``) must answer.
2. Where torch is wanted for the comparison: torch with CUDA (``pip install torch``) and ``transformers``. Before
   onnxruntime-gpu, which finds the CUDA libraries that torch brings.
3. llmc in its folder: ``pip install -e '.[export,gpu,tensorrt-rtx]'`` for cuda, tensorrt-rtx and, with NVIDIA's own
   package ``tensorrt`` (JetPack has it), tensorrt. Without torch ``build`` takes the place of ``export``, and where
   onnxruntime-gpu has no wheel (aarch64) ``cpu`` that of ``gpu``: builds run the graph with onnxruntime in any case.

No step needs a network. What to carry to a machine that has none, and what to run where one has minutes only, is in
gpu_check/README.md::

    python recipes/gpu_check.py --prepare carry                           # where torch is installed
    python recipes/gpu_check.py --models carry --out gpu_check.json --commit REVISION --minutes 9 --skip '*/tensorrt/*'

None of the GPU steps has run on a GPU yet; tests run them on doubles.
"""

import sys

from gpu_check.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
