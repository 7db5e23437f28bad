"""The page in a browser: a headless Chromium, a double of the server, and a page that may not complain."""

import shutil
from collections.abc import Iterator

import pytest
from doubles.chat_server import ChatServer, chat_serving

sync_api = pytest.importorskip("playwright.sync_api")

PATIENCE_MS = 20_000  # a machine that does much else shows things late
sync_api.expect.set_options(timeout=PATIENCE_MS)
# What a browser writes down itself when a server says no; everything else in its console is a fault of the page.
EXPECTED = ("Failed to load resource",)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    """One browser for a module's tests; each has a profile of its own in it.

    Not for more: while Playwright is there, its event loop counts as running in this thread, and nobody else's can.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium in the PATH")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


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
    complaints: list[str] = []
    found = context.new_page()
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    found.goto(server.url)
    sync_api.expect(found.locator("#model")).to_be_enabled()  # the last of what it does at first
    yield found
    assert [text for text in complaints if not text.startswith(EXPECTED)] == []
