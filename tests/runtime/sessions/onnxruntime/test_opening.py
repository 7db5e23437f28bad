"""Decode's graph is opened while the first prompt is computed: from the files as they were, with the same errors."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.bundle import read_bundle
from llmc.errors import BundleError
from llmc.runtime.runner.prefill import batch
from llmc.runtime.sessions import Batch, Phase, Session, open_session
from llmc.runtime.sessions.onnxruntime import cpu

PATIENCE_S = 30.0
PROMPT = np.random.default_rng(0).integers(3, 4096, 37)


class Gate:
    """Holds back graphs that are opened from memory, as decode's is, until it is set; then they ``fail`` if told so."""

    def __init__(self) -> None:
        self.opened, self.began, self.fail = threading.Event(), threading.Event(), False

    def __call__(self, runtime: Any, graph: str | bytes, options: Any) -> Any:
        if isinstance(graph, bytes):
            self.began.set()
            assert self.opened.wait(PATIENCE_S)
            graph = b"no graph" if self.fail else graph
        return inference_session(runtime, graph, options)


inference_session = cpu.inference_session


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(cpu, "inference_session", gate)
    yield gate
    gate.opened.set()


def opened(folder: Path) -> Session:
    session = open_session(folder, read_bundle(folder), 1)
    session.cache.reserve(1, 256)
    return session


def prefill(session: Session) -> bytes:
    return session.run(batch(Phase.PREFILL, PROMPT[None], [0], [len(PROMPT) - 1])).tobytes()


def decode(session: Session) -> bytes:
    token, nothing = np.full((1, 1), 7, np.int64), np.zeros((1, 1), np.int64)
    return session.run(Batch.of(Phase.DECODE, token, np.array([len(PROMPT)]), nothing)).tobytes()


@pytest.fixture(scope="module")
def wanted(split_bundle: Path) -> tuple[bytes, bytes]:
    """Logits after the prompt, and of a step, of graphs that are opened together, as for an older engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "IN_PLACE_SINCE", "999")
        patch.setattr(cpu, "open_later", None)
        session = opened(split_bundle)
    found = prefill(session), decode(session)
    session.close()
    return found


def test_a_prompt_is_computed_while_decodes_graph_is_opened(gate, split_bundle, wanted):
    session = opened(split_bundle)
    assert gate.began.wait(PATIENCE_S)
    assert prefill(session) == wanted[0]
    gate.opened.set()
    assert decode(session) == wanted[1]
    session.close()


def test_files_that_are_replaced_meanwhile_are_not_read(gate, split_bundle, tmp_path, wanted):
    folder = Path(shutil.copytree(split_bundle, tmp_path / "bundle"))
    session = opened(folder)
    shutil.rmtree(folder)
    gate.opened.set()
    assert (prefill(session), decode(session)) == wanted
    session.close()


def test_a_graph_that_cannot_be_opened_fails_every_step(gate, split_bundle):
    gate.fail = True
    session = opened(split_bundle)
    gate.opened.set()
    prefill(session)
    for _ in range(2):
        with pytest.raises(BundleError, match=r"decode.onnx: loading failed in ONNX Runtime .*; build"):
            decode(session)
    session.close()


def test_closing_waits_for_a_graph_that_is_opened(gate, split_bundle):
    session = opened(split_bundle)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    gate.opened.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert "llmc-open" not in {thread.name for thread in threading.enumerate()}
