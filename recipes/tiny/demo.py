"""The whole pipeline on the small model beside this file: export, build bundles, stream text from each, compare them.

    make demo            # or, where llmc is installed: python recipes/tiny/demo.py

The bundles stay in build/demo, to play with.
"""

import os
import sys
from pathlib import Path

from llmc.cli import output as show
from llmc.export import export
from llmc.optimize.build import build
from llmc.runtime import load
from llmc.runtime.bench.benchmark import benchmark

TINY = Path(__file__).resolve().parent
FOLDER = Path("build/demo")
PROMPT = "    for i in range("
NEW_TOKENS = 96
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
UNSEEN = TINY / "validation.txt"  # was kept out of the training


def main() -> None:
    """Run every step, and say which command would do the same."""
    step("export", f"llmc export recipes/tiny/checkpoint -o {FOLDER}/export")
    exported = export(TINY / "checkpoint", FOLDER / "export", force=True)
    print(f"{show.size(exported.new_bytes)} new on disk in {exported.seconds:.1f} s; the weights are linked")
    # fp32 is the unquantized model itself: what the others are measured against.
    rows = [bundle_row(precision) for precision in ("fp32", "int8", "int4")]
    print()
    columns = ("bundle", "size", "perplexity", "mean KL", "same choice", "prefill", "decode")
    show.print_table(columns, rows, numbers=True)
    print("\nThe decode path on text that the model was not trained on; the rest is in each manifest.")
    command = os.path.relpath(Path(sys.prefix) / "bin" / "llmc")
    print(f'Go on with: {command} run {FOLDER}/int8 -p "class " --temperature 0.8')


def step(name: str, command: str) -> None:
    """Head a step with the command that does the same."""
    print(f"\n== {name}: {command}", flush=True)


def bundle_row(precision: str) -> tuple[str, ...]:
    """Build one bundle, stream a completion from it, and measure it."""
    folder = FOLDER / precision
    step("build", f"llmc build {FOLDER}/export -o {folder} --{precision} --text recipes/tiny/{UNSEEN.name}")
    report = build(FOLDER / "export", folder, precision=precision, text=UNSEEN, force=True)
    print(f"{show.size(report.size)} in {report.seconds:.1f} s")
    step("run", f"llmc run {folder} -p {PROMPT!r} --temperature 0.8 --top-p 0.9 --seed 1 --max-tokens {NEW_TOKENS}")
    with load(folder) as model:
        print(PROMPT, end="", flush=True)
        for text in model.stream(PROMPT, max_tokens=NEW_TOKENS, **SAMPLING):
            print(text, end="", flush=True)
        print()
    speed = benchmark(folder, prompt_length=256, new_tokens=64)
    assert report.manifest.quality is not None
    decode = report.manifest.quality.phases["decode"]
    return (
        precision,
        show.size(report.size),
        f"{decode.perplexity:.2f}",
        f"{decode.mean_kl:.5f}",
        f"{decode.top1_agreement:.1%}",
        f"{speed.prefill_tokens_per_s:.0f} tok/s",
        f"{speed.decode_tokens_per_s:.0f} tok/s",
    )


if __name__ == "__main__":
    main()
