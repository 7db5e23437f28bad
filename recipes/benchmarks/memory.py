"""Plans against measured peaks: build, load and run bundles in processes of their own, and print the ratios.

    python memory.py EXPORT ... [--precisions int4 int8] [--keep FOLDER] [--json FILE]

Runs a prompt of 512 tokens spread over the vocabulary and 64 new ones that are as well: text that reads few rows of
the embedding leaves some of its pages on disk, so it takes up to the plan's part ``embedding`` less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llmc.bundle import TOKENIZER_FILE, read_bundle, read_export
from llmc.optimize.plan.memory import plan_build
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime.host.machine import resident_bytes
from llmc.runtime.kv.budget import plan_load

PROMPT_TOKENS, NEW_TOKENS = 512, 64
# A prime, so that multiples of it reach every part of a vocabulary.
STRIDE = 7919


def run(bundle: Path) -> None:
    """Load and run; what a bundle's plan is for."""
    from llmc.runtime import load

    with load(bundle, self_test=False) as model:
        vocab = model.manifest.geometry.vocab_size
        ids = [i * STRIDE % vocab for i in range(PROMPT_TOKENS + NEW_TOKENS)]
        model.runner.prefill(ids[:PROMPT_TOKENS])
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS):
            model.runner.step(ids[position], position)


def build(export: Path, output: Path, precision: str) -> None:
    """Build; what a build's plan is for."""
    from llmc.optimize.build import build as make

    make(export, output, precision=precision, force=True)


def peak(*arguments: object) -> int:
    """Peak resident bytes of this script run with ``arguments`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    return int(done.stdout.splitlines()[-1])


def measure(export: Path, precision: str, folder: Path) -> list[dict[str, object]]:
    """Estimate and measured peak of building and of running one bundle."""
    manifest = read_export(export)
    recipe, limits = resolve(
        Request(precision=precision), capabilities("cpu"), manifest.geometry.max_positions, "default"
    )
    planned = plan_build(manifest.geometry, recipe, limits, (export / TOKENIZER_FILE).stat().st_size).total
    bundle = folder / f"{export.name}-{precision}"
    rows = [("build", planned, peak("--build", export, bundle, precision))]
    rows += [("run", plan_load(read_bundle(bundle), PROMPT_TOKENS + NEW_TOKENS).total, peak("--run", bundle))]
    return [
        {"model": manifest.source.name, "precision": precision, "stage": stage, "estimate": wanted, "measured": found}
        for stage, wanted, found in rows
    ]


def main() -> None:
    """Measure every export with every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["int4", "int8"])
    parser.add_argument("--keep", type=Path, help="keep the bundles here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for export in arguments.exports:
            for precision in arguments.precisions:
                for row in measure(export, precision, arguments.keep or Path(temporary)):
                    estimate, measured = int(str(row["estimate"])), int(str(row["measured"]))
                    rows.append(row)
                    print(
                        f"{row['model']:24} {precision:5} {row['stage']:6} estimate {estimate / 1e6:7.0f} MB  "
                        f"measured {measured / 1e6:7.0f} MB  ratio {estimate / measured:.3f}",
                        flush=True,
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    work = {"--run": run, "--build": build}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if work is None:
        main()
    else:
        paths = [Path(argument) for argument in sys.argv[2:4]]
        work(*paths, *sys.argv[4:])  # type: ignore[operator]
        print(resident_bytes()[1])  # ru_maxrss would begin with what the parent had when it forked
