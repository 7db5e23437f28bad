"""What axe-core, the usual checker of accessibility, finds in each state of the page: nothing."""

import pytest
from doubles.browsing import violations
from doubles.chat_server import WAIT, ends, says
from doubles.images import draw, encode

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

# One of everything that an answer can hold.
RICH = (
    "# A\n\n[link](https://x.org) `code` **b**\n\n1. a\n   - b\n\n> q\n\n```py\nx\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |"
)
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
PHONE = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
DESKTOP = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}


@pytest.mark.parametrize("context", [DESKTOP, PHONE], indirect=True, ids=["desktop, light", "phone, dark"])
def test_axe_finds_nothing(page, server):
    states = {}

    def check(state: str) -> None:
        states[state] = violations(page)

    check("empty")
    server.seeing = ("tiny",)
    page.reload()
    picture = {"name": "cat.png", "mimeType": "image/png", "buffer": encode(draw("RGB", 40, 30))}
    page.locator("#image-file").set_input_files([picture, picture])
    expect(page.get_by_role("img", name="cat.png")).to_have_count(2)
    check("images")
    server.script = [{"reasoning_content": "Hm."}, *says(RICH)[:-1], {"content": "\n\nand"}, {"content": " so"}, WAIT]
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    expect(page.get_by_text("and so")).to_be_visible()
    check("streaming")
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped.").last).to_be_visible()
    page.locator("summary:visible").click()
    check("stopped, reasoning open")
    server.script = [{"tool_calls": [CALL]}, ends("tool_calls")]
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Result of weather")).to_be_visible()
    check("a tool, and versions")
    server.refusal = (429, {"message": "busy"}, {})
    page.get_by_role("button", name="Send results").click()
    expect(page.get_by_role("alert").filter(has_text="busy")).to_be_visible()
    check("an error")
    page.get_by_role("button", name="Edit").first.click()
    check("editing")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label("Top-p").fill("3")
    check("parameters")
    page.get_by_role("button", name="API key").click()
    check("the dialog for the key")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    if page.locator("#history").is_hidden():  # where there is no room for it
        page.keyboard.press("Alt+h")
    expect(page.get_by_role("button", name="Rename")).to_be_visible()
    check("the history")
    page.get_by_role("button", name="Rename").click()
    check("the dialog for a title")
    assert {state: found for state, found in states.items() if found} == {}
