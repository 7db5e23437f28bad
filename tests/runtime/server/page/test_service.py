"""The page in front of the service itself, with the small model behind it."""

import re

import pytest
from doubles.serving import serving

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

WHOLE = re.compile(r"TTFT [\d.]+ m?s ·( [\d.]+ tok/s ·)? 24 tokens · prompt \d+")


@pytest.fixture
def real_page(context, address: str):
    """The page as the service sends it; its policy is not broken."""
    complaints: list[str] = []
    found = context.new_page()
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: "violates" in message.text and complaints.append(message.text))
    found.goto(address)
    expect(found.locator("#model")).to_be_enabled()
    yield found
    assert complaints == []


def test_asks_the_service_and_shows_what_it_says(real_page):
    expect(real_page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    real_page.get_by_role("button", name="Parameters").click()
    real_page.get_by_label("Max tokens").fill("24")
    real_page.get_by_label("Temperature").fill("0")
    real_page.get_by_label("Anything else, as JSON").fill('{"ignore_eos": true}')
    message = real_page.get_by_label("Message", exact=True)
    message.fill("def add(a, b):")
    real_page.keyboard.press("Enter")
    answer = real_page.locator(".message.assistant").last
    expect(answer.locator(".words")).to_have_text(WHOLE)
    expect(answer.locator(".note")).to_contain_text("cut at the largest number of tokens")
    text = answer.locator(".text").last.inner_text()
    real_page.get_by_role("button", name="Regenerate").click()
    expect(answer.locator(".words")).to_have_text(WHOLE)
    assert answer.locator(".text").last.inner_text() == text != ""
    real_page.get_by_label("Anything else, as JSON").fill('{"min_p": 7, "ignore_eos": true}')
    message.fill("And?")
    real_page.keyboard.press("Enter")
    expect(real_page.get_by_role("alert").filter(has_text="HTTP 400")).to_contain_text("min_p")


def test_asks_for_a_key_that_the_guards_of_the_service_know(context, tiny_bundle, tmp_path):
    """The files need no key, the routes do, and requests of the page are no stranger's."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "sk-alice-0123456789"\n')
    keys.chmod(0o600)
    with serving(ServerConfig(models={"tiny": tiny_bundle}, threads=1, keys_file=keys), around=Guarded) as url:
        page = context.new_page()
        page.goto(url)
        page.get_by_label("Key", exact=True).fill("sk-alice-0123456789")
        page.keyboard.press("Enter")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny")
        page.get_by_label("Message", exact=True).fill("Hi")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .words")).to_contain_text(
            "tok/s"
        )  # tokens come; the answer may be long
        expect(page.locator(".problem:visible")).to_have_count(0)
        page.close()
