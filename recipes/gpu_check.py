"""Build, verify and measure bundles for GPUs on this machine; results go into one JSON file, and a table.

    python recipes/gpu_check.py --out gpu_check.json                    # every bundle that is not done yet
    python recipes/gpu_check.py --out gpu_check.json 'cuda/1b/*'        # these, done or not
    python recipes/gpu_check.py --out gpu_check.json --markdown         # runs nothing: the file as a table
    python -m pytest -m gpu                                             # the tests that need a GPU

Each bundle, named ``target/model/precision``, is built, compared with the portable graph and timed in a process of its
own with a time limit: one that is refused, crashes or hangs is recorded with all that it said, and the rest goes on.
The file is written anew after each. The targets cpu and tensorrt-rtx and the model tiny run when they are named.

Needs the NVIDIA driver, llmc with the extras of its targets (see gpu.md), and for random models torch and transformers
(extra ``export``); ``--exports FOLDER`` takes exports that were made elsewhere, each in a folder of the model's name.

No bundle for a GPU has run on one yet.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECIPES = Path(__file__).resolve().parent
# Geometries of benchmarks/make_model.py; the small model that is trained lies in the repository. The first has groups
# of 4 heads, which ONNX Runtime's own kernel for steps takes, and the second of 7, which it does not.
MODELS = {"1b": "llama-3.2-1b", "0.5b": "qwen2.5-0.5b", "tiny": ""}
NAMES = [
    f"{target}/{model}/{precision}"
    for target in ("cuda", "tensorrt", "tensorrt-rtx", "cpu")
    for model in MODELS
    for precision in ("fp16", "int8", "int4")
]
UNASKED = {"tensorrt-rtx", "cpu", "tiny"}
CONTEXT, ROWS = 4096, 8
PROMPTS, NEW_TOKENS = (128, 1536), 64
# Relative distances from the portable graph beyond which something is wrong, and not only rounded: the root mean square
# of differences over the deviation of logits at the worst position. Seen on CPUs: float16 0.001, int8 0.07 and int4
# 0.58, the integers on random weights, which lose the most; logits of the position before are more than 1 away.
LIMITS = {"fp16": 0.02, "int8": 0.2, "int4": 0.9}
COMPARED = 320  # tokens: more than a chunk of an engine's prefill, and than the cache's smallest bucket
OUTPUT = 20_000  # characters of what a process said that are kept


def main(arguments: Sequence[str]) -> int:
    asked = parse(arguments)
    if asked.child:
        print(json.dumps(check(asked.child, asked.work, asked.exports)))
        return 0
    document = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {"bundles": {}}
    bundles = document["bundles"]
    wanted = [] if asked.markdown else [name for name in NAMES if is_wanted(name, asked.bundles, bundles)]
    asked.work.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(wanted, 1):
        bundles[name] = attempt(name, asked)
        document["machine"] = machine()
        write(document, asked.out)
        print(f"[{number}/{len(wanted)}] {name}: {bundles[name]['state']}", file=sys.stderr)
    print(markdown(document))
    return int(any(bundles[name]["state"] != "done" for name in wanted))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", help="patterns of bundles to run, done or not; default: all not done")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the JSON file (gpu_check.json)")
    parser.add_argument("--work", type=Path, help="folder for exports and bundles, up to 25 GB; default: OUT.work")
    parser.add_argument("--exports", type=Path, help="folder of exports by model; default: made here, with torch")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each bundle (300); a Jetson needs more")
    parser.add_argument("--markdown", action="store_true", help="run nothing; print --out as a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if not all(any(fnmatchcase(name, pattern) for name in NAMES) for pattern in asked.bundles):
        parser.error(f"no bundle is called so; there are {', '.join(NAMES)}")
    asked.work = (asked.work or Path(f"{asked.out}.work")).resolve()
    return asked


def is_wanted(name: str, patterns: Sequence[str], known: dict[str, Any]) -> bool:
    """True of a bundle that a pattern names; without patterns of those that are not done and need not be named."""
    if patterns:
        return any(fnmatchcase(name, pattern) for pattern in patterns)
    return UNASKED.isdisjoint(name.split("/")) and known.get(name, {}).get("state") != "done"


def attempt(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Check one bundle in a process of its own, and end that and its children when its time is up."""
    command = [sys.executable, os.path.abspath(__file__), "--child", name, "--work", str(asked.work)]
    command += ["--exports", str(asked.exports)] if asked.exports else []
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True, stdin=subprocess.DEVNULL
        )
        try:
            answer, _ = child.communicate(timeout=asked.limit)
            state = "done" if child.returncode == 0 else f"failed with {child.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            answer, _ = child.communicate()
            state = f"no end after {asked.limit:g} s"
        said.seek(0)
        output = said.read()[-OUTPUT:]
    result = json.loads(answer.splitlines()[-1]) if state == "done" else None
    if result and result["problems"]:
        state = "; ".join(result["problems"])
    ended = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"state": state, "ended": ended, "s": time.monotonic() - start, "result": result, "output": output}


# ---------------------------------------------------------------------------------------------------- in the child


def check(name: str, work: Path, exports: Path | None) -> dict[str, Any]:
    """Build a bundle anew, replay its golden prompts, compare it with the portable graph, and time it."""
    from llmc.optimize.build import build
    from llmc.runtime import load
    from llmc.runtime.bench.benchmark import benchmark

    target, model, precision = name.split("/")
    source = export(model, work, exports)
    folder = work / "bundles" / name
    context = CONTEXT if MODELS[model] else CONTEXT // 2
    report = build(source, folder, target=target, precision=precision, max_context=context, max_batch=ROWS, force=True)
    manifest = json.loads((folder / "llmc.json").read_text(encoding="utf-8"))
    with load(folder, self_test=True, prefix_cache_bytes=0) as loaded:
        distances = compare(loaded, source)
    speeds = [asdict(benchmark(folder, prompt_length=length, new_tokens=NEW_TOKENS)) for length in PROMPTS]
    kept = {key: manifest.get(key) for key in ("target", "engine", "quality", "device", "notes")}
    limit = LIMITS[precision]
    far = [
        f"{phase} is {found:.3g} from the portable graph" for phase, found in distances.items() if not found <= limit
    ]
    return {**kept, "bytes": report.size, "distances": distances, "speeds": speeds, "problems": far}


def export(model: str, work: Path, exports: Path | None) -> Path:
    """The export of a model: one that was made elsewhere, or made here once."""
    if exports is not None:
        return exports / model
    folder = work / "exports" / model
    if (folder / "export.json").is_file():
        return folder
    from llmc.export import export as export_checkpoint

    checkpoint = RECIPES / "tiny" / "checkpoint"
    if MODELS[model]:
        checkpoint = work / "checkpoints" / model
        shutil.rmtree(checkpoint, ignore_errors=True)
        script = RECIPES / "benchmarks" / "make_model.py"
        subprocess.run([sys.executable, script, MODELS[model], checkpoint], check=True, stdout=sys.stderr)
    return export_checkpoint(checkpoint, folder, force=True).output


def compare(model: Any, source: Path) -> dict[str, float]:
    """The distance of each phase's logits from the portable graph's after arbitrary tokens, at the worst position."""
    from llmc.optimize.judge.reference import Reference
    from llmc.runtime.sessions import Phase

    ids = np.random.default_rng(0).integers(10, min(model.manifest.geometry.vocab_size, 4000), COMPARED).tolist()
    reference = Reference(source)
    [rows] = reference.compute_normed([ids])
    wanted = reference.project(rows)
    return {phase.value: distance(model.runner.logits(ids, phase), wanted) for phase in Phase}


def distance(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest relative difference of any position, NaN where something is not finite.

    It is the root mean square of the differences over the deviation of the wanted logits. Both are centred first, for a
    constant that is added to all logits means nothing.
    """
    x, y = (np.asarray(a, np.float64) - np.asarray(a, np.float64).mean(axis=-1, keepdims=True) for a in (found, wanted))
    return float(np.sqrt(((x - y) ** 2).mean(axis=-1) / (y**2).mean(axis=-1)).max())


# -------------------------------------------------------------------------------------------------------- the file


def machine() -> str:
    doctor = [sys.executable, "-m", "llmc.cli", "doctor"]
    return subprocess.run(doctor, capture_output=True, text=True, check=False).stdout


def write(document: dict[str, Any], path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def markdown(document: dict[str, Any]) -> str:
    head = ["bundle", "state", "MB", "prefill (tok/s)", "decode (tok/s)"]
    rows = [head, ["---"] * len(head)]
    for name, found in document["bundles"].items():
        cells = ["-"] * 3
        if result := found["result"]:
            short, long = result["speeds"]
            speeds = long["prefill_tokens_per_s"], short["decode_tokens_per_s"]
            cells = [f"{result['bytes'] / 1e6:.0f}", *(f"{speed:.1f}" for speed in speeds)]
        rows.append([name, found["state"], *cells])
    return "\n".join([document.get("machine", ""), *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
