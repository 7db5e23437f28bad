"""Build, verify and measure llmc's GPU targets on this machine, and write everything into one JSON file.

    python recipes/gpu_check.py --out gpu_check.json                  # everything: about an hour on a server's GPU
    python recipes/gpu_check.py --out gpu_check.json --quick          # the small model and 0.5B, fewer rounds
    python recipes/gpu_check.py --out gpu_check.json --markdown       # runs nothing: the file as a table

Every step is a process of its own with a time limit: what is refused, crashes or hangs is recorded, and the rest goes
on. The file is written anew after each step, so a run that is cut off loses nothing, and ``--resume`` continues it;
without that an older file is kept as ``NAME.bak``.

What to install, in this order, on Linux with Python 3.10 ... 3.13; steps whose part is missing are recorded as not run:

1. The NVIDIA driver, or JetPack. ``nvidia-smi`` (on a Jetson ``tegrastats``) must answer.
2. Where torch is wanted for the comparison: torch with CUDA (``pip install torch``) and ``transformers``. Before
   onnxruntime-gpu, which finds the CUDA libraries that torch brings.
3. llmc in its folder: ``pip install -e '.[export,gpu,tensorrt-rtx]'`` for cuda, tensorrt-rtx and, with NVIDIA's own
   package ``tensorrt`` (JetPack has it), tensorrt. Without torch ``build`` takes the place of ``export``, and where
   onnxruntime-gpu has no wheel (aarch64) ``cpu`` that of ``gpu``: builds run the graph with onnxruntime in any case.

No step needs a network. Where the machine has none, carry wheels along and install them with
``pip install --no-index --find-links FOLDER ...``. Without torch there is no export, so carry exports too; with random
weights they are a few megabytes, for the weights are made from a seed where they are used::

    python recipes/gpu_check.py --prepare exports                     # where torch is installed
    python recipes/gpu_check.py --exports exports --out gpu_check.json --commit REVISION

Without a GPU ``--targets cpu`` runs the same steps with the CPU target, and ``--emulate`` runs the graphs of a GPU's
bundles on the CPU, of which no speeds are shown: both check this script and nothing else. None of the GPU steps has run
on a GPU yet.
"""

import sys

from gpu_check.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
