"""Other engines on the same models: TensorRT-RTX on a GPU that it does not list, and nxrt's plug-in provider."""

import importlib
import sys
from typing import Any

import numpy as np
from common import FAKE, LIMIT, WORK, distance, expect, main, middle, report, timed
from sessions import find

PROVIDER = "nxrt"


def rtx() -> None:
    """Build and run a tiny bundle; a refusal of this GPU is a result, too."""
    from llmc.errors import LlmcError
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest
    from llmc.runtime import load
    from llmc.runtime.sessions.tensorrt import library

    report(library=str(importlib.import_module("tensorrt_rtx").__version__))
    lists_gpu = library.lists_gpu
    for name, module in list(sys.modules.items()):  # skip the check of listed GPUs: test what the library does
        if name.startswith("llmc.") and getattr(module, "lists_gpu", None) is lists_gpu:
            module.lists_gpu = lambda *_: True  # type: ignore[attr-defined]
    known = np.load(WORK / "tiny" / "llama-g4-fp16.npz")
    ids, wanted = known["ids"].tolist(), known["logits"]
    try:
        build(
            BuildRequest(
                WORK / "export",
                WORK / "rtx-built",
                target="tensorrt-rtx",
                precision="fp16",
                max_context=1024,
                force=True,
            )
        )
        report(build="published")
        with load(WORK / "rtx-built", self_test=False) as model:
            logits = model.runner.prefill(ids[: 1 - len(wanted)])[0]
            report(prefill=distance(logits, wanted[:1]))
    except LlmcError as error:
        report(refused=f"{type(error).__name__}: {error}"[:600])


def nxrt(name: str) -> None:
    """Run a bundle's graph on the provider of nxrt-ep-cuda: distance from the CPU, and milliseconds of a prompt."""
    import onnxruntime
    from nxrt_ep_cuda import get_library_path

    from llmc.bundle import read_bundle

    folder = find(name)
    manifest = read_bundle(folder)
    settings = onnxruntime.SessionOptions()
    other_names = {device.ep_name for device in onnxruntime.get_ep_devices()}
    try:
        onnxruntime.register_execution_provider_library(PROVIDER, get_library_path())
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name not in other_names]
        report(devices=[str(device.ep_name) for device in devices])
        settings.add_provider_for_devices(devices[:1], {})
    except Exception as error:
        report(provider=f"{type(error).__name__}: {error}"[:300])
        if not FAKE:
            raise
    session = onnxruntime.InferenceSession(str(folder / manifest.graphs["decode"].file), settings)
    report(providers=session.get_providers())
    golden = WORK / "tiny" / f"{name}.npz"
    ids = np.load(golden)["ids"] if golden.exists() else np.arange(3, 19 if FAKE else 131)
    count = len(ids) - len(np.load(golden)["logits"]) + 1 if golden.exists() else len(ids)
    feeds = make_feeds(session, ids[:count], manifest.limits.max_context if golden.exists() else 256)
    logits = session.run(["logits"], feeds)[0]
    report(prompt_ms=middle(timed(lambda: session.run(["logits"], feeds), 1 if FAKE else 5)))
    if golden.exists():
        prefill = distance(logits[0], np.load(golden)["logits"][:1])
        report(prefill=prefill)
        expect(prefill <= LIMIT, f"prefill is {prefill:.3g} from the CPU")


def make_feeds(session: Any, ids: Any, capacity: int) -> dict[str, Any]:
    """Inputs of a prompt with an empty cache in host memory."""
    feeds = {"input_ids": ids[None], "past_lengths": np.zeros(1, np.int64), "logit_indices": np.array([[len(ids) - 1]])}
    for value in session.get_inputs():
        if value.name not in feeds:
            _, heads, _, width = value.shape
            feeds[value.name] = np.zeros((1, heads, capacity, width), np.float16)
    return feeds


ITEMS = {"rtx": rtx, "nxrt": nxrt}
if __name__ == "__main__":
    main(ITEMS)
