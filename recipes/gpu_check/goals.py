"""From the results of steps to figures, ratios within the run, goals, and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpu_check.plan import GEOMETRIES, PRECISIONS, PROMPTS, TARGETS
from gpu_check.store import result

Document = dict[str, Any]
GPU_TARGETS = tuple(target for target in TARGETS if target != "cpu")
PASSED, MISSED, NOT_RUN, FAILED = "passed", "missed", "not run", "FAILED"


@dataclass(frozen=True)
class Row:
    """One bundle: states of its steps, and its figures; None where they were not measured.

    Attributes:
        ttft_s: seconds to the first token by length of prompt.
        tokens_per_s: of one request after the shortest prompt, the first token left out.
        share: of the copy bandwidth of the same run that the bytes of weights and cache make, that a step must read.
        speedup: the step of torch.compile over ours.
        prefill_ratio: the prefill of torch's SDPA over our time to first token.
        batch_tokens_per_s: of all rows together, decoding.
        device_bytes: taken from the GPU's free memory after the runs, without the context's own.
    """

    target: str
    geometry: str
    precision: str
    states: dict[str, str]
    ttft_s: dict[str, float]
    tokens_per_s: float | None
    share: float | None
    speedup: float | None
    prefill_ratio: float | None
    batch_tokens_per_s: float | None
    device_bytes: int | None

    @property
    def verified(self) -> str:
        """yes, FAILED or not run, of the golden prompts, the reference and determinism together."""
        states = [self.states.get(kind, NOT_RUN) for kind in ("verify", "determinism")]
        if any(state not in ("done", NOT_RUN) for state in states):
            return FAILED
        return "yes" if set(states) == {"done"} else NOT_RUN


def rows(document: Document) -> list[Row]:
    """A row for each bundle of which any step was tried."""
    names = dict.fromkeys(step["name"].rpartition("/")[0] for step in document["steps"] if step["name"].count("/") == 3)
    return [row(document, *name.split("/")) for name in names]


def row(document: Document, target: str, geometry: str, precision: str) -> Row:
    """The figures of one bundle."""
    name = f"{target}/{geometry}/{precision}"
    states = {
        step["name"].rpartition("/")[2]: step["state"]
        for step in document["steps"]
        if step["name"].rpartition("/")[0] == name
    }
    # What the CPU takes for a GPU's graph is no speed of anything.
    measured = ({} if is_emulated(document, target) else result(document, f"{name}/measure")) or {}
    compared = (result(document, f"{geometry}/baseline") or {}) if target != "cpu" else {}
    alone = {part["prompt"]: part for part in measured.get("alone", [])}
    first = next(iter(alone.values()), None)
    ttft = {str(length): part["ttft_s"] for length, part in alone.items()}
    batch, taken = measured.get("batch"), measured.get("device_bytes")
    return Row(
        target,
        geometry,
        precision,
        states,
        ttft,
        tokens_per_s=first and 1 / first["tpot_s"],
        share=_share(document, target, measured, first),
        speedup=_ratio(compared.get("step_s"), first and first["tpot_s"]),
        prefill_ratio=_ratio(compared.get("prefill_s"), ttft.get(str(compared.get("prefill_tokens")))),
        batch_tokens_per_s=batch and batch["decode_tokens_per_s"],
        device_bytes=taken and taken["after_runs"],
    )


def is_emulated(document: Document, target: str) -> bool:
    """Whether graphs of ``target`` were run on the CPU instead."""
    return target != "cpu" and bool(document["arguments"].get("emulate"))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _share(document: Document, target: str, measured: dict[str, Any], first: dict[str, Any] | None) -> float | None:
    """Bytes of weights and of valid cache positions per second of a mean step, over the bandwidth that was measured.

    A GPU's share is taken of a GPU's bandwidth, the CPU's of the host's.
    """
    found = result(document, "bandwidth")
    if found is None or first is None or (found["kind"] == "host") != (target == "cpu"):
        return None
    return step_bytes(measured, first["prompt"]) / first["tpot_s"] / float(found["bytes_per_s"])


def step_bytes(measured: dict[str, Any], prompt: int) -> float:
    """Bytes that the mean step reads: all weights, and the positions cached by then."""
    positions = prompt + measured["new_tokens"] / 2
    return float(measured["weight_bytes"] + measured["cache_bytes_per_position"] * positions)


# ------------------------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True)
class Goal:
    """What a figure of some bundles should reach."""

    name: str
    figure: str
    at_least: float
    geometries: tuple[str, ...]
    precisions: tuple[str, ...]


GOALS = (
    Goal("decode, share of the measured copy bandwidth", "share", 0.6, ("1b",), ("fp16", "int8")),
    Goal("decode, times as fast as torch.compile", "speedup", 1.5, ("0.5b", "1b"), ("fp16", "int8")),
    Goal("decode, tokens per second", "tokens_per_s", 700.0, ("0.5b",), ("int8",)),
    Goal("prefill of 2,048, times as fast as torch SDPA", "prefill_ratio", 1.0, ("0.5b", "1b"), ("fp16", "int8")),
)


def verdicts(document: Document) -> list[dict[str, Any]]:
    """Every goal for every bundle that it is about, of targets with a GPU; what was emulated has not been run."""
    return [
        {
            "name": goal.name,
            "target": target,
            "geometry": geometry,
            "precision": precision,
            "at_least": goal.at_least,
            **_verdict(goal, row(document, target, geometry, precision)),
        }
        for goal in GOALS
        for geometry in goal.geometries
        for precision in goal.precisions
        for target in GPU_TARGETS
    ]


def _verdict(goal: Goal, found: Row) -> dict[str, Any]:
    figure = getattr(found, goal.figure)
    if figure is None:
        return {"figure": None, "verdict": NOT_RUN}
    met = figure >= goal.at_least and found.verified == "yes"  # speed counts for nothing where results may be wrong
    return {"figure": figure, "verdict": PASSED if met else MISSED}


def summarize(document: Document) -> None:
    """Put rows, goals and facts into the document."""
    document["rows"] = [asdict(found) | {"verified": found.verified} for found in rows(document)]
    document["goals"] = verdicts(document)
    document["facts"] = facts(document)


def facts(document: Document) -> dict[str, Any]:
    """What nobody could know without a GPU: what TensorRT-RTX says of this one, whether attention with lengths computes
    the same as with a mask and how fast it is, and the time of a step by bucket of the cache."""
    steps = document["steps"]
    rtx = [step for step in steps if step["name"].startswith("tensorrt-rtx/")]
    by_kind = {
        kind: {step["name"]: step["result"] or step["message"] for step in steps if step["name"].endswith(f"/{kind}")}
        for kind in ("lengths", "buckets")
    }
    return {"tensorrt_rtx": {step["name"]: step["message"] or step["state"] for step in rtx}, **by_kind}


# ------------------------------------------------------------------------------------------------------------ tables

HEAD = (
    "target",
    "model",
    "weights",
    "verified",
    "TTFT 128 / 2,048",
    "decode",
    "of bandwidth",
    "to torch.compile",
    "prefill to SDPA",
    "8 rows",
    "GPU memory",
)


def markdown(document: Document, targets: Sequence[str] = GPU_TARGETS) -> str:
    """The README's table: a line about the machine, and a row for each bundle, whether it was run or not."""
    lines = [heading(document), "", _line(HEAD), "|---|---|---|---" + "|---:" * (len(HEAD) - 4) + "|"]
    for geometry in GEOMETRIES:
        for target in targets:
            for precision in PRECISIONS:
                shown = {**document, "steps": []} if is_emulated(document, target) else document
                found = row(shown, target, geometry, precision)
                lines.append(_line(cells(found)))
    return "\n".join(lines)


def heading(document: Document) -> str:
    """GPU, driver, versions and date, or that nothing was run on a GPU."""
    machine, device = result(document, "machine") or {}, (result(document, "bandwidth") or {}).get("device")
    if device is None:
        return "Not run on a GPU."
    libraries = [result(document, f"{target}/library") for target in GPU_TARGETS]
    versions = [f"{found['library']} {found['version']}" for found in libraries if found]
    packages = machine.get("packages", {})
    versions += [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    rate = result(document, "bandwidth") or {}
    return (
        f"{device['name']} (compute capability {device['compute_capability']}), driver for CUDA "
        f"{device['driver_version']}, {', '.join(versions)}; copies {rate['bytes_per_s'] / 1e9:.0f} GB/s; "
        f"{document['started'][:10]}, commit {(machine.get('commit') or 'unknown')[:12]}."
    )


def cells(found: Row) -> list[str]:
    """A row of the table; "not run" where nothing was measured, and what went wrong where something did."""
    first = [found.target, found.geometry, found.precision]
    trouble = [f"{kind} {state}" for kind, state in found.states.items() if state not in ("done", NOT_RUN)]
    if not found.ttft_s:
        return [*first, ", ".join(trouble) or found.verified, *[NOT_RUN] * (len(HEAD) - 4)]
    times = [found.ttft_s.get(str(length)) for length in (PROMPTS[0], PROMPTS[-1])]
    return [
        *first,
        ", ".join(trouble) or found.verified,
        " / ".join("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times) + " ms",
        _shown(found.tokens_per_s, "{:.0f} tok/s"),
        _shown(found.share, "{:.0%}"),
        _shown(found.speedup, "{:.2f}x"),
        _shown(found.prefill_ratio, "{:.2f}x"),
        _shown(found.batch_tokens_per_s, "{:.0f} tok/s"),
        _shown(found.device_bytes and found.device_bytes / 1e6, "{:.0f} MB"),
    ]


def _shown(figure: float | None, form: str) -> str:
    return NOT_RUN if figure is None else form.format(figure)


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def report(document: Document) -> Iterator[str]:
    """What is printed at the end: figures, goals, and every step that is not done."""
    yield heading(document)
    yield ""
    yield from (_line(parts) for parts in (HEAD, ["---"] * len(HEAD), *(cells(found) for found in rows(document))))
    yield ""
    known = [goal for goal in document["goals"] if goal["verdict"] != NOT_RUN]
    for goal in known:
        about = f"{goal['target']} {goal['geometry']} {goal['precision']}"
        yield f"{goal['verdict']} {goal['figure']:.3g} (at least {goal['at_least']:g}): {goal['name']}, {about}"
    yield f"goals not run: {len(document['goals']) - len(known)} of {len(document['goals'])}"
    for step in document["steps"]:
        if step["state"] != "done":
            yield f"{step['state']}: {step['name']}: {step['message']}"
        elif step["name"].endswith("/reference"):
            yield from (f"not run: {step['name']}: {way}" for way in (step["result"] or {}).get("missing", []))
