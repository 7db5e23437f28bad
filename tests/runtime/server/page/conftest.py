"""The page in a browser: a headless Chromium, a double of the server, and a page that may not complain."""

from collections.abc import Iterator

import pytest
from doubles.browsing import PATIENCE_MS, chromium, sync_api, uncomplaining
from doubles.chat_server import ChatServer, chat_serving


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    """One browser for a module's tests; each has a profile of its own in it."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def the_server() -> Iterator[ChatServer]:
    with chat_serving() as found:
        yield found


@pytest.fixture
def server(the_server: ChatServer) -> Iterator[ChatServer]:
    """The double of the server, as if no test had used it."""
    the_server.reset()
    yield the_server
    the_server.gate.set()


@pytest.fixture
def context(browser: "sync_api.Browser", request: pytest.FixtureRequest) -> Iterator["sync_api.BrowserContext"]:
    """A profile without a past; a test may give options of it."""
    found = browser.new_context(**getattr(request, "param", {}))
    found.set_default_timeout(PATIENCE_MS)
    yield found
    found.close()


@pytest.fixture
def page(context: "sync_api.BrowserContext", server: ChatServer) -> Iterator["sync_api.Page"]:
    """The chat page, loaded; whatever it complains of (its policy is strict) fails the test."""
    found = context.new_page()
    with uncomplaining(found):
        found.goto(server.url)
        sync_api.expect(found.locator("#model")).to_be_enabled()  # the last of what it does at first
        yield found
