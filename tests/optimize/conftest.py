"""Random tiny exports of every family, taken through the passes step by step, and run in ONNX Runtime."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import modules
from doubles.lowerings import Lowering, long_texts, open_session
from doubles.tiny import tiny

from llmc.bundle import DECODER_FILE, Geometry, Limits, read_export
from llmc.optimize.judge.reference import empty_caches
from llmc.optimize.lower.context import Float32, LoweringContext, PerToken, QuantConfig, QuantConfigs, WeightOnly
from llmc.optimize.passes import PASSES
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.targets import OLD
from llmc.optimize.weights.store import Calibrated

CAPACITY = 24
TOKENS = 20
Cache = dict[str, np.ndarray]


random_checkpoints = modules.random_checkpoints()
Case = random_checkpoints.Case
exported = random_checkpoints.exported
traced_once = random_checkpoints.traced_once
# Gemma 4 is lowered for CPUs alone: see tests/optimize/test_shared_caches.py. The others consist of parts that the
# cases here prove.
ELSEWHERE = ("gemma4", "glm4_moe_lite", "granite_swa", "granitemoe_swa", "qwen3_next", "youtu")
CASES: tuple[str, ...] = tuple(name for name in random_checkpoints.CASES if not name.startswith(ELSEWHERE))


@pytest.fixture(scope="session")
def random_checkpoint_writer() -> Callable[..., Path]:
    """Writes a random checkpoint by its name, with changes, into a folder."""

    return lambda folder, name, **changes: tiny(folder, **{**random_checkpoints.CASES[name], **changes})


@pytest.fixture
def write_random(tmp_path: Path, random_checkpoint_writer: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a random checkpoint by its name, with changes, for its own test alone."""
    return partial(random_checkpoint_writer, tmp_path / "own")


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest, exported: Callable[[str], Any]) -> Any:
    """Each of the random checkpoints in turn."""
    return exported(request.param)


@pytest.fixture(scope="session")
def ids() -> list[int]:
    """Tokens to feed, more than any sliding window of the random checkpoints."""
    return np.random.default_rng(1).integers(0, 96, TOKENS).tolist()


class CpuLowering(Lowering):
    """One export on its way through the passes of the CPU."""

    def __init__(self, export: Path, folder: Path, forms: QuantConfigs, calibrated: Calibrated, cache: str) -> None:
        opsets = {"": OLD[0], "com.microsoft": 1}
        super().__init__(export, folder, PASSES["cpu"], opsets, OLD[1])
        limits = Limits(max_context=CAPACITY, max_batch=1, prefill_chunk=CAPACITY)
        self.context = LoweringContext("prefill", self.geometry, limits, forms, self.weights, calibrated, cache)


@pytest.fixture
def lowering(tmp_path: Path) -> Iterator[Callable[..., CpuLowering]]:
    """Starts the lowering of an export; a body of integer activations has a head of 8 bits in blocks of 32."""
    started: list[CpuLowering] = []

    def start(
        export: Path,
        body: QuantConfig | None = None,
        head: QuantConfig | None = None,
        *,
        layers: dict[str, QuantConfig] | None = None,
        calibrated: Calibrated | None = None,
        cache: str = "float32",
        rotated: bool | None = None,
    ) -> CpuLowering:
        body = body or Float32()
        folder = tmp_path / f"lowering-{len(started)}"
        folder.mkdir()
        head = head or (WeightOnly(Grid(8, 32)) if isinstance(body, PerToken) else body)
        forms = QuantConfigs(body, head, tuple((layers or {}).items()))
        started.append(begun := CpuLowering(export, folder, forms, calibrated or Calibrated(), cache))
        asked = isinstance(body, PerToken) if rotated is None else rotated
        begun.context = replace(begun.context, rotated=asked and begun.geometry.rotates)
        return begun

    yield start
    for each in started:
        each.weights.close()


class Decoder:
    """A decoder graph in ONNX Runtime, fed as a runtime would, and a cache for it."""

    def __init__(self, folder: Path, geometry: Geometry, compute: str = "float32") -> None:
        self.geometry, self.compute = geometry, compute
        self.session = open_session(folder / DECODER_FILE)

    def empty_cache(self) -> Cache:
        """A cache of one row that holds nothing yet."""
        return empty_caches(self.geometry.caches, 1, CAPACITY, self.compute)

    def run(self, ids: Sequence[Sequence[int]], past: Sequence[int], cache: Cache) -> tuple[np.ndarray, Cache]:
        """Logits [B, S, V] after every one of the new tokens [B, S], and the cache with them in it."""
        feeds = {
            "input_ids": np.array(ids, np.int64),
            "past_lengths": np.array(past, np.int64),
            "logit_indices": np.tile(np.arange(len(ids[0])), (len(ids), 1)),
        }
        if any(value.name == "new_lengths" for value in self.session.get_inputs()):
            feeds["new_lengths"] = np.full(len(ids), len(ids[0]))
        feeds |= long_texts(self.session, len(ids))
        logits, *presents = self.session.run(None, feeds | cache)[: 1 + len(cache)]  # behind them is what replays read
        return logits, dict(zip(cache, presents, strict=True))

    def __call__(self, ids: Sequence[int], pieces: Sequence[int] | None = None) -> np.ndarray:
        """Logits [S, V] after every token of one row, fed in ``pieces`` (default: in one)."""
        cache, outputs, position = self.empty_cache(), [], 0
        for size in pieces or [len(ids)]:
            logits, cache = self.run([ids[position : position + size]], [position], cache)
            outputs.append(logits[0])
            position += size
        return np.concatenate(outputs)


@pytest.fixture(scope="session")
def session() -> Callable[[Path | bytes], Any]:
    """Opens a model in ONNX Runtime with one thread."""
    return open_session


@pytest.fixture(scope="session")
def decoder() -> type[Decoder]:
    """Opens the decoder of a folder in ONNX Runtime with one thread."""
    return Decoder


@pytest.fixture(scope="session")
def portable_logits(ids: list[int]) -> Callable[[Any], np.ndarray]:
    """Logits of a case's portable graph for all ``ids`` in one piece."""
    made: dict[str, np.ndarray] = {}

    def get(case: Any) -> np.ndarray:
        if case.name not in made:
            made[case.name] = Decoder(case.export, read_export(case.export).geometry)(ids)
        return made[case.name]

    return get


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files included."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def source(exported: Callable[[str], Any], tmp_path: Path) -> Path:
    """A copy of an export, to be broken."""
    return Path(shutil.copytree(exported("llama-biases").export, tmp_path / "in" / "export"))


@pytest.fixture
def untouched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An output folder with an old bundle, or, where a test asks for False, nothing; afterwards it must be what it was,
    with nothing beside it."""
    output = tmp_path / "out" / "bundle"
    output.parent.mkdir()
    if getattr(request, "param", True):
        output.mkdir()
        (output / "llmc.json").write_text("the old one")
        (output / "decode.onnx").write_text("its graph")
    before = contents(output.parent)
    yield output
    assert contents(output.parent) == before
