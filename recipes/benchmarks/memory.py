"""Plans against measured peaks: build, load and run bundles in processes of their own, and print the ratios.

    python memory.py EXPORT ... [--precisions int4 int8] [--keep FOLDER] [--json FILE]

Runs a prompt of 512 tokens spread over the vocabulary and 64 new ones that are as well: text that reads few rows of
the embedding leaves some of its pages on disk, so it takes up to the plan's part ``embedding`` less.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmc.bundle import TOKENIZER_FILE, read_bundle, read_export
from llmc.optimize.plan.memory import plan_build
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime.host.machine import resident_bytes
from llmc.runtime.kv.budget import plan_load

PROMPT_TOKENS, NEW_TOKENS = 512, 64
# A prime, so that multiples of it reach every part of a vocabulary.
STRIDE = 7919


def run(bundle: str) -> None:
    """Load and run; what a bundle's plan is for."""
    from llmc.runtime import load

    with load(bundle, self_test=False) as model:
        vocab = model.manifest.geometry.vocab_size
        ids = [i * STRIDE % vocab for i in range(PROMPT_TOKENS + NEW_TOKENS)]
        model.runner.prefill(ids[:PROMPT_TOKENS])
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS):
            model.runner.step(ids[position], position)


def build(export: str, output: str, precision: str) -> None:
    """Build; what a build's plan is for."""
    from llmc.optimize.build import build as make

    make(Path(export), Path(output), precision=precision, force=True)


def peak(*arguments: object) -> int:
    """Peak resident bytes of this script run with ``arguments`` in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measure(export: Path, precision: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Estimate and measured peak of building and of running one bundle, in bytes."""
    manifest, bundle = read_export(export), folder / f"{export.name}-{precision}"
    wanted = Request(precision=precision)
    recipe, limits = resolve(wanted, capabilities("cpu"), manifest.geometry.max_positions, "default")
    named = {"model": manifest.source.name, "precision": precision}
    planned = plan_build(manifest.geometry, recipe, limits, (export / TOKENIZER_FILE).stat().st_size).total
    yield {**named, "stage": "build", "estimate": planned, "measured": peak("--build", export, bundle, precision)}
    planned = plan_load(read_bundle(bundle), PROMPT_TOKENS + NEW_TOKENS).total
    yield {**named, "stage": "run", "estimate": planned, "measured": peak("--run", bundle)}


def main() -> None:
    """Measure every export with every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["int4", "int8"])
    parser.add_argument("--keep", type=Path, help="keep the bundles here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for export, precision in itertools.product(args.exports, args.precisions):
            for row in measure(export, precision, args.keep or Path(temporary)):
                rows.append(row)
                ratio = row["estimate"] / row["measured"]
                mb = f"estimate {row['estimate'] / 1e6:7.0f} MB  measured {row['measured'] / 1e6:7.0f} MB"
                print(f"{row['model']:24} {precision:5} {row['stage']:6} {mb}  ratio {ratio:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    work = {"--run": run, "--build": build}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if work is None:
        main()
    else:
        work(*sys.argv[2:])
        print(resident_bytes()[1])  # ru_maxrss would begin with what the parent had when it forked
