"""From the results of steps to figures, ratios within the run, and a table."""

from typing import Any

from gpu_check.steps import BUNDLES, REFUSAL, UNASKED

NOT_RUN = "not run"
Document = dict[str, Any]
Figure = float | None


def result(document: Document, name: str) -> dict[str, Any]:
    """The result of a step that is done, empty for others."""
    step = document["steps"].get(name, {})
    return dict(step["result"]) if step.get("state") == "done" else {}


def figures(document: Document, bundle: str) -> dict[str, tuple[Figure, str]]:
    """The columns of one bundle's row: figures, None where they were not measured, and how they are shown.

    Bytes of a step are those of the weights and of the cache that the mean step attends to. A bucket's slope of 1 is
    what reading the cache at the measured bandwidth takes, 2 that and a copy.
    """
    target, model, _ = bundle.split("/")
    found, half = (result(document, f"measure/{name}") for name in (bundle, f"{target}/{model}/fp16"))
    torch, driver = (result(document, name) if target != "cpu" else {} for name in (f"baseline/{model}", "driver"))
    rate = driver["on_device"]["bytes_per_s"] if driver else None
    slopes = result(document, f"buckets/{bundle}")
    slope = ratio(slopes.get("s_per_position"), slopes.get("cache_bytes_per_position"))
    first, longest = (found["alone"][0], found["alone"][-1]) if found else ({}, {})
    tpot, ttft = first.get("tpot", {}).get("p50_s"), longest.get("ttft", {}).get("p50_s")
    step, moved, plain = found.get("step", {}), step_bytes(found), found.get("step_without_graphs", {})
    prefill = torch.get("prefill_s") if longest.get("prompt") == torch.get("prefill_tokens") else None
    return {
        "step p50": (ratio(step.get("p50_s"), 1e-3), "{:.2f} ms"),
        "p95": (ratio(step.get("p95_s"), 1e-3), "{:.2f} ms"),
        "to fp16": (ratio(step.get("p50_s"), half.get("step", {}).get("p50_s")), "{:.2f}"),
        "bytes": (ratio(moved, 1e6), "{:.0f} MB"),
        "bytes to fp16": (ratio(moved, step_bytes(half)), "{:.2f}"),
        "decode": (ratio(1.0, tpot), "{:.0f} tok/s"),
        "of bandwidth": (ratio(ratio(moved, tpot), rate), "{:.0%}"),
        "without graphs": (ratio(plain.get("p50_s"), step.get("p50_s")), "{:.2f}x"),
        "to torch.compile": (ratio(torch.get("step_s"), tpot), "{:.2f}x"),
        "TTFT 2,048": (ratio(ttft, 1e-3), "{:.1f} ms"),
        "prefill to SDPA": (ratio(prefill, ttft), "{:.2f}x"),
        "8 rows": ((found.get("batch") or {}).get("tokens_per_s"), "{:.0f} tok/s"),
        "bucket slope": (ratio(slope, ratio(1.0, rate)), "{:.2f}"),
        "GPU memory": (ratio(found.get("device_bytes", {}).get("after_runs"), 1e6), "{:.0f} MB"),
    }


def ratio(above: Figure, below: Figure) -> Figure:
    """The quotient, None where either is missing."""
    return above / below if above is not None and below else None


def step_bytes(measured: dict[str, Any]) -> Figure:
    """Bytes that the mean step after the shortest prompt reads: all weights, and the positions cached by then."""
    if not measured:
        return None
    positions = measured["alone"][0]["prompt"] + measured["new_tokens"] / 2
    return float(measured["weight_bytes"] + measured["cache_bytes_per_position"] * positions)


def verified(document: Document, bundle: str) -> str:
    """Yes, what is wrong, or not run: of the golden prompts, the reference and determinism together."""
    kinds = ("build", "measure", "verify", "determinism")
    states = {kind: document["steps"].get(f"{kind}/{bundle}", {}).get("state", NOT_RUN) for kind in kinds}
    wrong = [f"{kind} {state}" for kind, state in states.items() if state not in ("done", NOT_RUN)]
    return ", ".join(wrong) or ("yes" if states["verify"] == states["determinism"] == "done" else NOT_RUN)


def markdown(document: Document) -> str:
    """A line about the machine, and a row for each bundle, whether it was run or not."""
    rows = [["bundle", "verified", *figures(document, BUNDLES[0])]]
    rows.append(["---"] * len(rows[0]))
    known = {name.partition("/")[2] for name in document["steps"] if name != REFUSAL}
    for bundle in BUNDLES:
        if bundle in known or UNASKED.isdisjoint(bundle.split("/")):
            shown = [NOT_RUN if x is None else form.format(x) for x, form in figures(document, bundle).values()]
            rows.append([bundle, verified(document, bundle), *shown])
    return "\n".join([heading(document), "", *(f"| {' | '.join(row)} |" for row in rows), *answer(document)])


def answer(document: Document) -> list[str]:
    """Lines with TensorRT-RTX's own words about this GPU, once it was asked."""
    found = result(document, REFUSAL)
    if not found:
        return []
    known, taken = "lists" if found["listed"] else "does not list", "runs" if found["accepted"] else "refuses"
    return ["", f"TensorRT-RTX {known} this GPU and {taken} an engine on it: {' '.join(found['said'].split())}"]


def heading(document: Document) -> str:
    """GPU, driver, versions, date and commit, or that nothing was run on a GPU."""
    driver, step = result(document, "driver"), document["steps"].get("driver", {})
    if not driver:
        return "Not run on a GPU."
    device, packages = driver["device"], result(document, "machine").get("packages", {})
    machine = [
        f"{device['name']} (compute capability {device['compute_capability']})",
        f"driver for CUDA {device['driver_version']}",
        *(f"{name} {packages[name]}" for name in packages if name.startswith(("onnxruntime", "tensorrt", "torch"))),
    ]
    rate, commit = driver["on_device"]["bytes_per_s"] / 1e9, (step["commit"] or "unknown")[:12]
    return f"{', '.join(machine)}; copies {rate:.0f} GB/s; {step['ended'][:10]}, commit {commit}."
