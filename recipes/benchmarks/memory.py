"""Plans against measured peaks: build and run bundles in processes of their own, and print the ratios.

    python memory.py EXPORT ... [--precisions int4 int8] [--json FILE]

Runs a prompt of 512 tokens spread over the vocabulary and 64 new ones that are as well: text that reads few rows of
the embedding leaves some of its pages on disk, so it takes up to the plan's part ``embedding`` less.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from machine import publish, table

from llmc.bundle import TOKENIZER_FILE, read_bundle, read_export
from llmc.optimize.build import build
from llmc.optimize.plan.memory import plan_build
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime import load
from llmc.runtime.host.machine import resident_bytes
from llmc.runtime.kv.budget import plan_load

PROMPT_TOKENS, NEW_TOKENS = 512, 64
STRIDE = 7919  # a prime, so that multiples of it reach every part of a vocabulary


def run(bundle: str) -> None:
    """Load and run; what a bundle's plan is for."""
    with load(bundle, self_test=False) as model:
        vocab = model.manifest.geometry.vocab_size
        ids = [i * STRIDE % vocab for i in range(PROMPT_TOKENS + NEW_TOKENS)]
        model.runner.prefill(ids[:PROMPT_TOKENS])
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS):
            model.runner.step(ids[position], position)


def peak(*arguments: object) -> int:
    """Peak resident bytes of this script run with ``arguments`` in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measure(export: Path, precision: str, folder: Path) -> Iterator[tuple[str, int, int]]:
    """The name, the planned and the measured peak, in bytes, of building and of running one bundle."""
    manifest, bundle = read_export(export), folder / f"{export.name}-{precision}"
    recipe, limits = resolve(
        Request(precision=precision), capabilities("cpu"), manifest.geometry.max_positions, "default"
    )
    planned = plan_build(manifest.geometry, recipe, limits, (export / TOKENIZER_FILE).stat().st_size).total
    yield f"{bundle.name}, build", planned, peak("--build", export, bundle, precision)
    yield f"{bundle.name}, run", plan_load(read_bundle(bundle), PROMPT_TOKENS + NEW_TOKENS).total, peak("--run", bundle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["int4", "int8"])
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(export, precision) for export in args.exports for precision in args.precisions]
        rows = [row for pair in pairs for row in measure(*pair, Path(folder))]
    lines = [(name, f"{a / 1e6:.0f}", f"{b / 1e6:.0f}", f"{a / b:.3f}") for name, a, b in rows]
    publish(args.json, None, [table(("MB", "planned", "measured", "ratio"), *lines)], rows=rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2])
        print(resident_bytes()[1])  # ru_maxrss would begin with what the parent had when it forked
    elif sys.argv[1:2] == ["--build"]:
        build(Path(sys.argv[2]), Path(sys.argv[3]), precision=sys.argv[4], force=True)
        print(resident_bytes()[1])
    else:
        main()
