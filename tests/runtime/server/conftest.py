"""What tests of the service share: one that runs, with the small model, and OpenAI's own client for it."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx2 as httpx
import openai
import pytest
from doubles.serving import retold, serving

from llmc.runtime import Model, load
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded

WAIT_S = 60.0  # for what happens at once, on a machine that does much else


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on a loop of its own, and fail where it waits for ever."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), WAIT_S))
    return True


@pytest.fixture(scope="session")
def address(tiny_bundle: Path) -> Iterator[str]:
    """Where a service answers; tests share it, so each leaves it as it was."""
    with serving(ServerConfig(models={"tiny": tiny_bundle}, threads=1), Guarded) as url:
        yield url


@pytest.fixture(scope="session")
def http(address: str) -> Iterator[httpx.Client]:
    """A plain client of that service."""
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client, unmodified."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="session")
def model(tiny_bundle: Path) -> Iterator[Model]:
    """The small model in this process, for what the service must answer."""
    with load(tiny_bundle, threads=1, self_test=False) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def able_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a chat template that teaches calls and thoughts."""
    return retold(tiny_bundle, tmp_path_factory.mktemp("able") / "bundle")


@pytest.fixture(scope="session")
def able_address(able_bundle: Path, encoder_bundles: dict[str, Path]) -> Iterator[str]:
    """Where a service with three models answers: the one that calls and thinks, one that embeds, and one that ranks."""
    with serving(ServerConfig(models={"able": able_bundle, **encoder_bundles}, threads=1), Guarded) as url:
        yield url


@pytest.fixture(scope="session")
def able_http(able_address: str) -> Iterator[httpx.Client]:
    """A plain client of that service."""
    with httpx.Client(base_url=able_address, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def able_openai(able_address: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that service, unmodified."""
    with openai.OpenAI(base_url=f"{able_address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="session")
def able_anthropic(able_address: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of that service, unmodified."""
    with anthropic.Anthropic(base_url=able_address, api_key="none", max_retries=0) as found:
        yield found
