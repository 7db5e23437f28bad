"""The service that foreign clients speak to."""

import pytest


@pytest.fixture(scope="session")
def service_url(able_address: str) -> str:
    """Where a service answers whose model, ``able``, calls tools and thinks."""
    return able_address
