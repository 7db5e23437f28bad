"""A service that the world's clients are pointed at."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.serving import serving

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.guard.guarded import guarded


@pytest.fixture(scope="session")
def service_url(able_bundle: Path) -> Iterator[str]:
    """The address of a model, ``able``, whose chat template teaches calls and thoughts."""
    with serving(ServerConfig(models={"able": able_bundle}, threads=1), guarded) as url:
        yield url
