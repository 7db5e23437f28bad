"""Run everything that needs a GPU, the most valuable items first; writes results.jsonl and a table to --out.

    python kit.py A --out OUT --deadline 190      # a call: A, B or C, or several
    python kit.py B --out OUT --only 'speed 1b*'  # some items, for example those that failed

Each item is a separate process with a time limit, and depends on no other. It prints lines of JSON, its result; its
other output is logged. An item that fails or hangs is recorded, and the rest goes on.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
# Results and logs are small: the part of an item's output that is kept, and the table's width and length.
KEPT, WIDTH, LINES = 20_000, 190, 60
DRY_SLACK = 6.0  # limits are for a GPU; a dry run computes on the CPU
SPEEDS = [
    (f"{model}-{precision}", fast)
    for model in ("1b", "0.5b")
    for precision in ("fp16", "int8", "int4")
    for fast in "01"[: 1 + (precision != "fp16")]
]
GOLDENS = (
    *("llama-g4-fp16", "llama-g4-int8", "llama-g4-int4", "qwen2.5-g7-int8", "smollm-g3-int4", "qwen3-norms-fp16"),
    *("gemma2-window-fp16", "phi3-partial-int8", "llama-untied-int4", "llama-long-fp16"),
)


@dataclass(frozen=True)
class Item:
    """``command``: a script of this folder and its arguments; ``limit`` is in seconds."""

    call: str
    name: str
    limit: float
    command: tuple[str, ...]


ITEMS = [
    Item("A", "assemble A", 30, ("assemble.py", "A")),
    Item("A", "start weights", 10, ("assemble.py", "start-weights")),
    Item("A", "machine", 20, ("device.py", "machine")),
    Item("A", "copies and launches", 30, ("device.py", "copies")),
    Item("A", "gpu tests", 40, ("device.py", "gpu_tests")),
    Item("A", "driver errors", 15, ("device.py", "errors")),
    Item("A", "torch 1b", 80, ("baseline.py", "1b")),
    Item("A", "torch 0.5b", 60, ("baseline.py", "0.5b")),
    Item("B", "assemble B", 45, ("assemble.py", "B")),
    Item("B", "library", 30, ("sessions.py", "library", "llama-g4-fp16")),
    *(Item("B", f"golden {name}", 25, ("sessions.py", "golden", name)) for name in GOLDENS),
    *(Item("B", f"speed {name} fpa={fast}", 40, ("sessions.py", "speed", name, fast)) for name, fast in SPEEDS),
    Item("B", "speed 1b-int8 no XQA", 40, ("sessions.py", "speed", "1b-int8", "1", "ORT_ENABLE_XQA=0")),
    Item("B", "first token 1b-int8", 30, ("sessions.py", "first_token", "1b-int8")),
    Item("B", "first token 0.5b-int8", 30, ("sessions.py", "first_token", "0.5b-int8")),
    Item("B", "first token 0.5b-int8 cuDNN", 30, ("sessions.py", "first_token", "0.5b-int8", "cudnn")),
    Item("B", "kernels 1b-int8", 40, ("sessions.py", "kernels", "1b-int8")),
    Item("B", "two threads", 25, ("sessions.py", "threads", "llama-g4-fp16", "qwen2.5-g7-int8")),
    Item("B", "two loads", 25, ("sessions.py", "loads", "llama-g4-int8")),
    Item("B", "build", 60, ("sessions.py", "build")),
    Item("B", "doctor", 60, ("sessions.py", "doctor")),
    Item("C", "assemble C", 45, ("assemble.py", "C")),
    Item("C", "tensorrt-rtx", 60, ("others.py", "rtx")),
    *(Item("C", f"nxrt {name}", 30, ("others.py", "nxrt", name)) for name in (*GOLDENS[:4], "1b-int4", "0.5b-int4")),
]


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    items = [item for item in ITEMS if item.call in args.calls and fnmatchcase(item.name, args.only)]
    results = []
    with (args.out / "results.jsonl").open("a") as file, (args.out / "log.txt").open("a") as log:
        for item in items:
            result, output = attempt(item, args)
            results.append(result)
            for stream, text in ((file, json.dumps(result)), (log, f"==== {item.name}: {result['state']}\n{output}")):
                stream.write(text + "\n")
                stream.flush()
                os.fsync(stream.fileno())
    table = format_table(results)
    (args.out / f"table-{''.join(args.calls)}.md").write_text(table + "\n")
    print(table)
    return int(any(result["state"] != "ok" for result in results))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="+", choices="ABC")
    parser.add_argument("--only", default="*", help="a pattern of names of items")
    parser.add_argument(
        "--parts", type=Path, default=CHECKOUT / ".gpu_kit", help="the folder that make_parts.py filled"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpu_kit", help="where parts go")
    parser.add_argument("--out", type=Path, default=Path("gpu_kit_results"), help="folder of results")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds; no item begins that may end later")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="cpu: bundles run on the CPU")
    parser.add_argument("--fake-device", action="store_true", help="a dry run: doubles of the driver and the provider")
    args = parser.parse_args(arguments)
    args.target = "cpu" if args.fake_device else args.target
    args.begin = time.monotonic()
    for name in ("parts", "work", "out"):
        setattr(args, name, getattr(args, name).resolve())
    return args


# ------------------------------------------------------------------------------------------------------ one item


def attempt(item: Item, asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run an item in a process group of its own; return its line of the results, and its output."""
    begin = time.monotonic()
    limit = item.limit * (DRY_SLACK if asked.fake_device else 1)
    left = asked.deadline - (begin - asked.begin)
    if limit > left:
        state, output = f"not begun: {left:.0f} s are left, its limit is {limit:g} s", ""
    else:
        state, output = run(item, asked, limit)
    result = read_result(output)
    if state == "ok":
        state = "; ".join(result.pop("problems", [])) or ("ok" if result else "printed no result")
    seconds = round(time.monotonic() - begin, 2)
    return {"call": item.call, "item": item.name, "state": state, "s": seconds, "result": result}, output[-KEPT:]


def run(item: Item, asked: argparse.Namespace, limit: float) -> tuple[str, str]:
    script, *arguments = item.command
    command = [sys.executable, str(HERE / script), *arguments]
    with tempfile.TemporaryFile() as file:  # not a pipe, which a leftover process could hold open
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=environment(asked)
        )
        try:
            code = child.wait(limit)
            state = "ok" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            state = f"no end after {limit:g} s"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the item's own group, with its leftover processes
        child.wait()
        file.seek(0)
        output = file.read().decode(errors="replace")
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("{")]
    return (f"{state}: {lines[-1][:200]}" if state != "ok" and lines else state), output


def environment(asked: argparse.Namespace) -> dict[str, str]:
    """Environment variables of every item; assembled packages, if any, come first."""
    folders = [asked.work / name for name in ("ort", "site", "rtx") if (asked.work / name).exists()]
    source = asked.work if (asked.work / "llmc").exists() else CHECKOUT / ".typing"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, source))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "LLMC_CACHE": str(asked.work / "cache"),
        "GPU_KIT_PARTS": str(asked.parts),
        "GPU_KIT_WORK": str(asked.work),
        "GPU_KIT_TARGET": asked.target,
        "GPU_KIT_FAKE": str(int(asked.fake_device)),
    }


def read_result(output: str) -> dict[str, Any]:
    """All lines of JSON that an item printed, merged; later lines win, and non-finite numbers become text."""
    result: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                result |= json.loads(line, parse_constant=str)
            except ValueError:  # other output
                continue
    # ONNX Runtime names each attention node's kernel if ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO is set.
    if kernels := sorted(set(re.findall(r"SdpaKernel=(\w+)", output))):
        result["attention"] = kernels
    return result


# ----------------------------------------------------------------------------------------------------- the table


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line per item, short enough for the end of a command's output."""
    counts = sum(result["state"] == "ok" for result in results)
    rows = [f"{counts} of {len(results)} items ok", "| item | state | s | result |", "|---|---|---:|---|"]
    for result in results[: LINES - len(rows)]:
        state = result["state"].replace("\n", " ").replace("|", "/")
        start = f"| {result['item']} | {state[:70]} | {result['s']:.1f} | "
        rows.append(start + ", ".join(figures(result["result"])).replace("|", "/")[: WIDTH - len(start) - 2] + " |")
    return "\n".join(rows)


def figures(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            yield f"{prefix}{name} {value:.4g}" if isinstance(value, float) else f"{prefix}{name} {value}"
        elif value:
            yield f"{prefix}{name} {' '.join(map(str, value))}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
