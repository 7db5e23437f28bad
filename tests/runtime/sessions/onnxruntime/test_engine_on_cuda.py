"""The engine that serves requests, on the CUDA session behind doubles: its tokens, and a GPU lost under it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.cuda import FakeDriver
from doubles.onnxruntime_cuda import FakeOnnxRuntime

from llmc.bundle import read_bundle
from llmc.errors import EngineClosedError, GpuError, LlmcError
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Session, emulated, open_session
from llmc.runtime.sessions.onnxruntime.cuda import CudaSession
from llmc.runtime.text.tokenizer import Tokenizer

PATIENCE = 120
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 3, "seed": 1},
    {"temperature": 1.2, "top_p": 0.9, "seed": 2, "n": 2},
    {"temperature": 0.0, "max_tokens": 20, "repetition_penalty": 1.5},
]
# Calls of the driver until the context is lost: while requests are admitted, fed, decoded and recorded.
LOSSES = range(1, 120, 17)


def requests() -> list[Request]:
    return [
        Request([3 + 7 * i + 11 * j for j in range(4 + 3 * i)], SamplingParams(**{"max_tokens": 8, **given}))
        for i, given in enumerate(SETTINGS)
    ]


@pytest.fixture(scope="session")
def fp16_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llmc.optimize.build import build

    folder = tmp_path_factory.mktemp("cuda") / "fp16"
    return build(tiny_export, folder, target="cuda", precision="fp16", max_context=512, max_batch=4).output


@pytest.fixture
def serve(fp16_bundle: Path) -> Iterator[Callable[[Session], tuple[Engine, list[Any]]]]:
    """Serves all requests on a session, together; their tokens or errors."""
    engines: list[tuple[Engine, Session]] = []

    def outcomes(session: Session) -> tuple[Engine, list[Any]]:
        manifest, tokenizer = read_bundle(fp16_bundle), Tokenizer.from_folder(fp16_bundle)
        engine = Engine(
            session,
            manifest,
            tokenizer,
            max_context=128,
            prefill_chunk=12,
            options=EngineOptions(),
            memory=1 << 40,
            prefixes=PrefixCache("gpu", block=4, max_bytes=1 << 20),
        )
        engines.append((engine, session))
        handles: list[Any] = []
        engine.call(lambda: handles.extend(engine.submit(request) for request in requests()))
        return engine, [outcome(handle) for handle in handles]

    yield outcomes
    for engine, session in engines:
        engine.close(then=session.close)


def outcome(handle: Any) -> Any:
    try:
        return [list(output.token_ids) for output in handle.result(PATIENCE).outputs]
    except LlmcError as error:
        return error


def opened(folder: Path) -> CudaSession:
    driver = FakeDriver()
    return CudaSession(folder, read_bundle(folder), 1, driver=driver, runtime=FakeOnnxRuntime(driver))


def test_tokens_are_those_of_the_same_graph_on_the_cpu(fp16_bundle, serve):
    session = opened(fp16_bundle)
    _, found = serve(session)
    _, wanted = serve(open_session(fp16_bundle, emulated(read_bundle(fp16_bundle)), 1))
    assert found == wanted
    assert session._runtime.replays > 0


@pytest.mark.parametrize("calls", LOSSES)
def test_wherever_the_context_is_lost_requests_fail_and_the_engine_ends(fp16_bundle, serve, calls):
    _, wanted = serve(opened(fp16_bundle))
    session = opened(fp16_bundle)
    session._driver.lose = session._driver._count + calls
    engine, found = serve(session)
    lost = [item for item in found if isinstance(item, GpuError)]
    assert lost
    assert all(item.lost for item in lost)
    assert all(item == want for item, want in zip(found, wanted, strict=True) if not isinstance(item, GpuError))
    with pytest.raises(EngineClosedError, match="the GPU was lost"):
        engine.submit(requests()[0])
