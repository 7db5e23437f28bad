"""One encoder under test: reads requests as lines of JSON and answers each with one line.

    python encoder_runners.py SYSTEM MODEL --threads N

Runs in the system's interpreter, which need not have llmc; each import is done where it is needed. All systems get
token ids and give mean-pooled vectors of length one.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_ID, LAST_ID = 2000, 20_000  # of random tokens: ordinary ones of BERT's vocabulary
Vectors = NDArray[np.float32]


class Llmc:
    """A bundle, as :meth:`llmc.runtime.Embedder.encode` runs it."""

    def __init__(self, model: Path, threads: int) -> None:
        from llmc.runtime import Embedder, load

        self._model = load(model, kind=Embedder, threads=threads, self_test=False)

    def encode(self, rows: list[list[int]]) -> Vectors:
        return self._model.encode(rows)


class Padded:
    """A graph of transformers' inputs, whose rows are padded to the longest."""

    inputs: list[str]

    def run(self, feeds: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        """Hidden states [B, S, H]."""
        raise NotImplementedError

    def encode(self, rows: list[list[int]]) -> Vectors:
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self.run({name: given[name] for name in self.inputs})
        means = np.einsum("bsh,bs->bh", hidden, mask.astype(np.float32)) / mask.sum(1, keepdims=True)
        vectors: Vectors = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors


class OnnxRuntime(Padded):
    def __init__(self, model: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        (path,) = model.glob("*.onnx")
        self._session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.inputs = [value.name for value in self._session.get_inputs()]

    def run(self, feeds: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._session.run(None, feeds)[0]
        return found


class OpenVino(Padded):
    def __init__(self, model: Path, threads: int) -> None:
        import openvino

        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._compiled = openvino.Core().compile_model(model / "openvino_model.xml", "CPU", settings)
        self.inputs = [value.get_any_name() for value in self._compiled.inputs]

    def run(self, feeds: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._compiled(feeds)[0]
        return found


RUNNERS = {"llmc": Llmc, "onnxruntime": OnnxRuntime, "openvino": OpenVino}


def time_batch(system: Any, batch: int, tokens: int, seconds: float) -> float:
    """Documents per second: the median of calls that take ``seconds`` in all, at least three, after one untimed."""
    ids = np.random.default_rng(batch * tokens).integers(FIRST_ID, LAST_ID, (batch, tokens)).tolist()
    system.encode(ids)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        started = time.perf_counter()
        system.encode(ids)
        taken.append(time.perf_counter() - started)
    return batch / statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=RUNNERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    system = RUNNERS[args.system](args.model, args.threads)
    for line in sys.stdin:
        asked = json.loads(line)
        if "rows" in asked:
            print(json.dumps([system.encode([row])[0].tolist() for row in asked["rows"]]), flush=True)
        else:
            print(json.dumps(time_batch(system, **asked)), flush=True)


if __name__ == "__main__":
    main()
