"""A headless Chromium, and a page that may not complain."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

PATIENCE_MS = 20_000  # a machine that does much else shows things late
sync_api.expect.set_options(timeout=PATIENCE_MS)
# What a browser writes down itself when a server says no; everything else in its console is a fault of the page.
EXPECTED = ("Failed to load resource",)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser of the block. While Playwright is there, its event loop counts as running in this thread, and no
    other can: one module's tests share it."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium in the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def uncomplaining(page: Any) -> Iterator[None]:
    """Fail after the block if the page complained of anything, as its policy does."""
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    yield
    assert [text for text in complaints if not text.startswith(EXPECTED)] == []


def violations(page: Any) -> list[tuple[str, Any]]:
    """Rules of axe-core, the usual checker of accessibility, that are broken, and where; its best practices too."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [(rule["id"], node["html"]) for rule in found for node in rule["nodes"]]
