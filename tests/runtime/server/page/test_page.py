"""The chat page as its user meets it: answers, versions, history, parameters, errors, keys."""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from doubles.chat_server import BREAK, WAIT, ChatServer, ends, says
from doubles.images import draw, encode
from PIL import Image

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

# What is typed into a field, and what the page says of it.
WRONG = [
    ("Top-p", "1.5", "Top-p is 1.5; expected a number, 0 to 1."),
    ("Top-k", "2.5", "Top-k is 2.5; expected a whole number, 0 or more, 0 is all."),
    ("Seed", "1e400", "Seed is 1e400; expected a whole number, 0 or more."),
    ("Temperature", "hot", "Temperature is hot; expected a number, 0 to 2, 0 is greedy."),
    ("Anything else, as JSON", "{", "“Anything else” is not JSON"),
    ("Anything else, as JSON", "[1]", "“Anything else” is not a JSON object"),
    ("Anything else, as JSON", '{"stream": false}', "“Anything else” holds stream"),
]
KEPT = """(text) => new Promise((resolve) => {
    indexedDB.open("llmc").onsuccess = ({ target: { result: database } }) => {
        const all = database.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => {
            database.close();
            resolve(JSON.stringify(all.result).includes(text));
        };
    };
})"""
# An event that a browser makes of a file from elsewhere.
HAND = """([kind, name, type, url, types]) => {
    const data = new DataTransfer();
    for (const each of types) data.setData(each, "text");
    const bytes = Uint8Array.from(atob(url.split(",")[1]), (each) => each.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
    const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
    const event = new Kind(kind, { clipboardData: data, dataTransfer: data, bubbles: true, cancelable: true });
    return !document.getElementById("prompt").dispatchEvent(event);
}"""
BRIGHTER = 50  # levels of 255: half of the slope that is drawn is 100, across its other side there are 27
HEARD = """() => {
    window.heard = [];
    const announcer = document.getElementById("announcer");
    new MutationObserver(() => window.heard.push(announcer.textContent)).observe(announcer, { childList: true });
}"""


@pytest.fixture
def ask(page) -> Callable[[str], Any]:
    """Send a message; gives back the message that answers it."""

    def ask(text: str) -> Any:
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        return page.locator(".message.assistant").last

    return ask


def done(page) -> None:
    """Wait until no answer is under way."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def texts(page) -> list[str]:
    return page.locator("#messages .text:visible").all_inner_texts()


def button(page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


class TestAnswers:
    def test_stream_with_their_timing(self, page, server, ask):
        server.script = [*says("Hel", "lo **there**")[:-1], WAIT, {"content": "!"}, ends("stop")]
        answer = ask("Hi")
        expect(answer.locator(".text").last).to_have_text("Hello there")
        expect(button(page, "Stop")).to_be_visible()
        server.gate.set()
        expect(answer.locator("strong")).to_have_text("there")
        expect(answer.locator(".words")).to_contain_text("3 tokens · prompt 12, 8 cached")
        expect(answer.locator(".words")).to_contain_text("TTFT")
        assert server.requests == [
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]

    def test_stop_when_told_and_free_the_server(self, page, server, ask):
        server.script = [*says("So far")[:-1], WAIT]
        answer = ask("Hi")
        expect(answer.locator(".text").last).to_have_text("So far")
        page.keyboard.press("Escape")
        expect(answer.locator(".note")).to_have_text("Stopped.")
        assert server.gone.wait(10)
        done(page)
        server.script = says("Again.")
        ask("Go on")
        done(page)
        assert [message["content"] for message in server.requests[-1]["messages"]] == ["Hi", "So far", "Go on"]

    def test_keep_reasoning_apart_and_closed(self, page, server, ask):
        server.script = [{"reasoning_content": "Let me"}, {"reasoning_content": " see"}, *says("42")]
        answer = ask("Why?")
        done(page)
        expect(answer.get_by_text("Let me see")).to_be_hidden()
        answer.locator("summary").click()
        expect(answer.get_by_text("Let me see")).to_be_visible()
        ask("And?")
        done(page)
        assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "42"}

    def test_call_tools_and_take_their_results(self, page, server, ask):
        def part(text: str) -> dict[str, Any]:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}

        start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        server.script = [{"tool_calls": [start]}, part('{"city": '), part('"Oslo"}'), ends("tool_calls")]
        answer = ask("Weather?")
        expect(answer.locator(".call figcaption")).to_have_text("Calls weather")
        expect(answer.locator(".call code")).to_have_text('{\n  "city": "Oslo"\n}')
        server.script = says("Four degrees.")
        page.get_by_label("Result of weather").fill("4 °C")
        button(page, "Send results").click()
        expect(page.get_by_text("Four degrees.", exact=True).last).to_be_visible()
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        assert server.requests[-1]["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4 °C", "tool_call_id": "call_1"},
        ]

    @pytest.mark.threat("page-freeze")
    @pytest.mark.parametrize("index", ["__proto__", "constructor", "length", -1, 1.5, 1, 10**9, None, [], {}])
    def test_leave_out_calls_that_an_upstream_puts_nowhere(self, page, server, ask, index):
        start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        wild = {"index": index, "id": "call_2", "function": {"name": "wild", "arguments": "{}"}}
        server.script = [{"tool_calls": [wild]}, {"tool_calls": [start]}, ends("tool_calls")]
        expect(ask("Weather?").locator(".call figcaption")).to_have_text("Calls weather")
        assert page.evaluate("[].id ?? [].function ?? ({}).id ?? null") is None

    def test_are_said_to_screen_readers_once_and_whole(self, page, server, ask):
        page.evaluate(HEARD)
        ask("Hi")
        done(page)
        assert page.evaluate("window.heard") == ["The model is answering.", "Answer: Hello there, you."]

    @pytest.mark.threat("page-markup")
    def test_never_become_markup(self, page, server, ask):
        evil = "<img src=x onerror=window.owned=1><script>window.owned=1</script>"
        call = {"index": 0, "id": evil, "type": "function", "function": {"name": evil, "arguments": evil}}
        server.names = [evil]
        page.reload()
        server.script = [
            {"reasoning_content": evil},
            {"content": evil},
            {"tool_calls": [call]},
            {"error": {"message": evil}},
        ]
        answer = ask(evil)
        expect(answer.get_by_role("alert")).to_contain_text(evil)
        expect(page.locator("#conversations")).to_contain_text(evil)
        assert page.locator("#messages img:not(svg), #messages script, #conversations img, #model img").count() == 0
        assert page.evaluate("window.owned") is None

    def test_code_can_be_copied(self, page, context, server, ask):
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        server.script = says("```py\nprint(1)\n```")
        ask("Code")
        button(page, "Copy code").click()
        expect(button(page, "Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
        # Without TLS a page has no clipboard, but may copy what is selected.
        page.evaluate("navigator.clipboard.writeText('')")
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.get_by_role("button", name="Copy", exact=True).last.click()
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Control+v")
        expect(page.get_by_label("Message", exact=True)).to_have_value("```py\nprint(1)\n```")


class TestVersions:
    def test_of_an_edited_question_stay(self, page, server, ask):
        ask("First")
        done(page)
        server.script = says("Other.")
        button(page, "Edit").first.click()
        page.get_by_label("Edit the message").fill("Second")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_text("Other.", exact=True).last).to_be_visible()
        assert texts(page) == ["Second", "Other."]
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        assert server.requests[-1]["messages"] == [{"role": "user", "content": "Second"}]
        done(page)
        button(page, "Version before").click()
        assert texts(page) == ["First", "Hello there, you."]
        expect(button(page, "Version after")).to_be_focused()

    def test_of_an_answer_stand_side_by_side(self, page, server, ask):
        ask("Hi")
        done(page)
        server.script = says("Good day.")
        button(page, "Regenerate").click()
        expect(page.locator(".versions:visible")).to_have_text("Version 2/2")
        assert texts(page) == ["Hi", "Good day."]
        done(page)
        button(page, "Version before").click()
        assert texts(page) == ["Hi", "Hello there, you."]
        page.reload()
        page.locator("#conversations .open").click()
        assert texts(page) == ["Hi", "Hello there, you."]

    def test_of_an_edited_answer_need_no_server(self, page, server, ask):
        ask("Hi")
        done(page)
        button(page, "Edit").last.click()
        page.get_by_label("Edit the message").fill("My own words")
        button(page, "Save").click()
        assert texts(page) == ["Hi", "My own words"]
        assert len(server.requests) == 1
        ask("And?")
        done(page)
        assert server.requests[-1]["messages"][1]["content"] == "My own words"


class TestHistory:
    @pytest.mark.threat("page-history")
    def test_outlives_the_page_and_is_deleted_when_asked(self, page, server, ask):
        for text in ("One", "Two", "Three"):
            page.keyboard.press("Alt+n")
            ask(text)
            done(page)
        page.reload()
        entries = page.locator("#conversations .open")
        expect(entries).to_have_text(["Three", "Two", "One"])
        entries.last.click()
        assert texts(page) == ["One", "Hello there, you."]
        button(page, "Delete “Two”").click()
        button(page, "Cancel").click()
        expect(entries).to_have_count(3)
        button(page, "Delete “Two”").click()
        button(page, "Delete").click()
        expect(entries).to_have_text(["Three", "One"])
        button(page, "Delete all").click()
        button(page, "Delete").click()
        expect(entries).to_have_count(0)
        page.reload()
        expect(page.get_by_text("the server keeps none")).to_be_visible()

    def test_is_exported_whole(self, page, server, ask):
        ask("Hi")
        done(page)
        with page.expect_download() as download:
            button(page, "Export as JSON").click()
        (found,) = json.loads(download.value.path().read_text(encoding="utf-8"))
        assert [message["content"] for message in found["messages"]] == ["Hi", "Hello there, you."]

    def test_is_renamed_by_keyboard_and_keeps_its_title(self, page, server, ask):
        ask("Hi")
        done(page)
        rename = button(page, "Rename “Hi”")
        rename.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Rename conversation")).to_be_visible()
        expect(page.get_by_label("Title")).to_be_focused()
        page.keyboard.press("Escape")
        expect(rename).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_label("Title").fill("  Greetings <b>  ")
        page.keyboard.press("Enter")
        expect(button(page, "Rename “Greetings <b>”")).to_be_focused()
        page.reload()
        expect(page.locator("#conversations .open")).to_have_text(["Greetings <b>"])

    def test_keeps_what_came_of_an_answer_that_the_page_was_left_in(self, page, server, ask):
        server.script = [*says("So far")[:-1], WAIT]
        expect(ask("Hi").locator(".text").last).to_have_text("So far")
        while not page.evaluate(KEPT, "So far"):
            page.wait_for_timeout(50)
        page.reload()
        expect(page.locator(".assistant .note")).to_have_text("Stopped.")  # the conversation is in view again
        assert texts(page) == ["Hi", "So far"]

    def test_of_another_tab_is_shown_and_followed_and_goes_with_it(self, page, context, server, ask):
        other = context.new_page()
        other.goto(server.url)
        expect(other.locator("#model")).to_be_enabled()
        ask("Hi")
        done(page)
        other.locator("#conversations .open").click()
        expect(other.locator(".message.assistant .text").last).to_have_text("Hello there, you.")
        ask("And you?")
        expect(other.locator(".message.assistant")).to_have_count(2)
        button(page, "Delete “Hi”").click()
        button(page, "Delete").click()
        expect(other.locator("#conversations .open")).to_have_count(0)
        expect(other.locator(".message")).to_have_count(0)


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def file_of(name: str, content: bytes, kind: str = "png") -> dict[str, Any]:
    return {"name": name, "mimeType": f"image/{kind}" if kind else "", "buffer": content}


def opened(part: dict[str, Any]) -> Image.Image:
    """The image that a part of a request holds."""
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


class TestImages:
    SMALL = encode(draw("RGB", 40, 30))

    @pytest.fixture
    def pick(self, page, server: ChatServer) -> Callable[..., None]:
        """Choose files, of a model that sees."""
        server.seeing = ("tiny",)
        page.reload()
        expect(button(page, "Add images")).to_be_visible()
        return lambda *files: page.locator("#image-file").set_input_files(list(files))

    @pytest.fixture
    def hand(self, page) -> Callable[..., bool]:
        """Paste or drop a file, with texts of the given types beside it; gives back if the page took it."""
        return lambda kind, file, *types: page.evaluate(
            HAND, [kind, file["name"], file["mimeType"], url_of(file["buffer"]), types]
        )

    def test_go_with_their_turn_and_with_later_ones(self, page, server, ask, pick, hand):
        with page.expect_file_chooser() as chooser:
            button(page, "Add images").press("Enter")
        chooser.value.set_files([file_of("cat.png", self.SMALL)])
        jpeg, webp = encode(draw("RGB", 30, 40), "JPEG"), encode(draw("RGB", 20, 20), "WEBP")
        assert hand("paste", file_of("dog.jpg", jpeg, "jpeg"), "text/plain")
        assert hand("drop", file_of("bird.webp", webp, "webp"), "text/plain", "text/html")
        shown = page.get_by_role("list", name="Images of this message").get_by_role("img")
        expect(shown).to_have_count(3)
        assert [image.get_attribute("alt") for image in shown.all()] == ["cat.png", "dog.jpg", "bird.webp"]
        button(page, "Take off “dog.jpg”").click()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        ask("Which?")
        done(page)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in (url_of(self.SMALL), url_of(webp, "webp"))]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
        assert server.requests[-1]["messages"] == [turn]
        expect(shown).to_have_count(0)
        page.reload()
        kept = page.locator(".message.user").get_by_role("img")
        expect(kept).to_have_count(2)
        assert kept.first.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 40
        ask("Sure?")
        done(page)
        assert server.requests[-1]["messages"][0] == turn and len(server.requests[-1]["messages"]) == 3

    def test_that_are_still_read_go_with_the_message_that_is_sent(self, page, server, ask, pick):
        page.evaluate(
            "() => { const decode = createImageBitmap; const wait = () => new Promise((go) => setTimeout(go, 500));"
            " window.createImageBitmap = async (file) => { await wait(); return decode(file); }; }"
        )
        pick(file_of("cat.png", self.SMALL))
        ask("Which?")
        expect(page.locator(".message.user")).to_have_count(1)
        done(page)
        assert [part["type"] for part in server.requests[-1]["messages"][0]["content"]] == ["image_url", "text"]

    def test_are_not_offered_where_the_model_sees_none(self, page, server, pick, hand):
        picture = file_of("cat.png", self.SMALL)
        page.get_by_role("combobox", name="Model").select_option("small")
        expect(page.locator("#attach")).to_be_hidden()
        assert not hand("paste", picture) and not hand("drop", picture)
        page.get_by_role("combobox", name="Model").select_option("tiny")
        assert not hand("paste", picture, "text/plain", "text/html")  # a copy of a document, which is text
        assert hand("drop", picture)
        expect(page.get_by_role("img", name="cat.png")).to_have_count(1)

    def test_are_made_no_larger_than_is_useful_and_upright(self, page, server, ask, pick):
        turned = Image.Exif()
        turned[0x0112] = 6
        pick(
            file_of("wide.png", encode(draw("RGB", 3000, 2))),
            file_of("photo.jpg", encode(draw("RGB", 2000, 1000), "JPEG", exif=turned), "jpeg"),
        )
        expect(page.locator("#shelf img")).to_have_count(2)
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Enter")  # an image may be all of a message
        done(page)
        wide, photo = map(opened, server.requests[-1]["messages"][0]["content"])
        assert (wide.format, wide.size, photo.format, photo.size) == ("PNG", (1536, 1), "JPEG", (768, 1536))
        top, bottom = (photo.resize((1, 2), Image.Resampling.BOX).convert("L").getpixel((0, row)) for row in (0, 1))
        assert bottom - top > BRIGHTER  # as it is brighter to the right before it is turned
        expect(page.locator("#conversations .open")).to_have_text(["wide.png"])

    def test_that_cannot_be_sent_are_named_and_nothing_is_lost(self, page, server, pick):
        page.get_by_label("Message", exact=True).fill("Look:")
        noise = np.random.default_rng(0).integers(0, 256, (1450, 1450, 3), np.uint8)
        large = encode(Image.fromarray(noise), compress_level=0)
        film, damaged = encode(draw("RGB", 9, 9), "GIF"), file_of("c.png", b"no image")
        pick(
            *(file_of("a.gif", film, "gif"), file_of("b.png", self.SMALL), damaged),
            *(file_of("d", b"?", ""), file_of("e.png", large)),
        )
        expect(page.locator("#notice")).to_have_text(
            "“a.gif” was left out: it is no PNG, JPEG or WebP. “c.png” was left out: it cannot be decoded. "
            "“d” was left out: it is no PNG, JPEG or WebP. "
            "“e.png” was left out: it has 6.3 MB, at most 6 can be sent; save it as a JPEG."
        )
        expect(page.get_by_label("Message", exact=True)).to_have_value("Look:")
        expect(page.locator("#shelf").get_by_role("img")).to_have_count(1)

    def test_of_a_message_that_the_server_refuses_can_be_taken_off(self, page, server, ask, pick):
        server.refusal = (413, {"message": "the body has more than 8388608 bytes; send less"}, {})
        pick(file_of("cat.png", self.SMALL), file_of("dog.png", self.SMALL))
        expect(page.locator("#shelf img")).to_have_count(2)
        expect(ask("Which?").get_by_role("alert")).to_contain_text("send less")
        server.refusal = None
        button(page, "Edit").click()
        page.locator("form.edit").get_by_role("button", name="Take off “cat.png”").click()
        page.keyboard.press("Control+Enter")
        done(page)
        (turn,) = server.requests[-1]["messages"]
        assert [part["type"] for part in turn["content"]] == ["image_url", "text"]
        expect(page.locator(".message.user").get_by_role("img", name="dog.png")).to_be_visible()


class TestParameters:
    def test_are_sent_as_typed_and_otherwise_left_to_the_server(self, page, server, ask):
        page.keyboard.press("Alt+p")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.3")
        page.get_by_label("Max tokens").fill("7")
        page.get_by_label("Stop texts, one a line").fill("END\nSTOP")
        page.get_by_label("Anything else, as JSON").fill('{"logprobs": true}')
        page.get_by_role("combobox", name="Model").select_option("small")
        ask("Hi")
        done(page)
        system = {"role": "system", "content": "Be brief."}
        assert server.requests[-1] == {
            "model": "small", "messages": [system, {"role": "user", "content": "Hi"}], "temperature": 0.3,
            "max_tokens": 7, "stop": ["END", "STOP"], "logprobs": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        page.reload()
        button(page, "Parameters").click()
        expect(page.get_by_label("Temperature")).to_have_value("0.3")
        button(page, "Leave all to the server").click()
        ask("Hi")
        done(page)
        assert server.requests[-1].keys() == {"model", "messages", "stream", "stream_options"}
        assert server.requests[-1]["messages"][0] == system

    def test_out_of_range_are_named_and_nothing_is_sent(self, page, server, ask):
        button(page, "Parameters").click()
        for label, text, notice in WRONG:
            page.get_by_label(label).fill(text)
            ask("Hi")
            expect(page.locator("#notice")).to_contain_text(notice)
            expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
            page.get_by_label(label).fill("")
        assert server.requests == [] and texts(page) == []


class TestErrors:
    def test_of_the_server_are_shown_and_can_be_retried(self, page, server, ask):
        error = {"message": "8 requests wait already", "type": "rate_limit_error", "param": "n", "code": "queue_full"}
        server.refusal = (429, error, {"Retry-After": "3"})
        alert = ask("Hi").get_by_role("alert")
        expect(alert).to_contain_text("8 requests wait already")
        facts = "HTTP 429 · rate_limit_error · code queue_full · parameter n · try again in 3 s"
        expect(alert.locator("small")).to_have_text(facts)
        server.refusal = None
        button(page, "Try again").click()
        done(page)
        assert texts(page) == ["Hi", "Hello there, you."]
        expect(page.locator(".versions:visible")).to_have_count(0)

    @pytest.mark.parametrize(
        ("last", "said"),
        [
            ({"error": {"message": "the deadline passed", "code": 504}}, "the deadline passed"),
            (BREAK, "The connection ended before the answer did."),
        ],
    )
    def test_within_an_answer_keep_what_came(self, page, server, ask, last, said):
        server.script = [*says("So far")[:-1], last]
        answer = ask("Hi")
        expect(answer.get_by_role("alert")).to_contain_text(said)
        assert texts(page) == ["Hi", "So far"]

    def test_a_model_without_a_chat_template_is_refused_at_the_start(self, page, server):
        server.chats = False
        page.reload()
        expect(page.locator("#notice")).to_contain_text("llmc run")
        expect(page.locator("#send")).to_be_disabled()

    def test_of_the_network_are_words(self, page, server, ask):
        page.route("**/v1/**", lambda route: route.abort())
        expect(ask("Hi").get_by_role("alert")).to_contain_text("The server cannot be reached. Is it running?")
        page.reload()
        expect(page.locator("#notice")).to_contain_text("The models cannot be listed")
        page.unroute("**/v1/**")
        page.locator("#notice").get_by_role("button", name="Try again").click()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny")

    @pytest.mark.threat("page-history")
    def test_of_a_missing_key_ask_for_it_and_keep_it_with_the_tab(self, page, server, ask):
        server.key = "sk-1"
        ask("Hi")
        page.get_by_label("Key", exact=True).fill("sk-1")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Hello there, you.", exact=True).last).to_be_visible()
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny")
        assert page.evaluate("sessionStorage.getItem('llmc.key')") == "sk-1"
        assert "sk-1" not in page.evaluate("JSON.stringify(localStorage)")


class TestKeyboard:
    def test_writes_lines_and_moves_about(self, page, server):
        field = page.get_by_label("Message", exact=True)
        page.keyboard.press("Alt+m")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(field).to_have_value("one\ntwo")
        assert server.requests == []
        page.keyboard.press("Alt+p")
        expect(page.get_by_label("System prompt")).to_be_focused()
        page.keyboard.press("Alt+p")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        expect(button(page, "Parameters")).to_be_focused()


class TestLooks:
    def test_of_light_and_dark_follow_the_system(self, page, server):
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert grounds[0] != grounds[1]
