"""The renderer of answers: what becomes elements, and that nothing that a model writes becomes more than that."""

import re
from collections.abc import Callable

import pytest

RENDER = """async (text) => {
    const { showMarkdown } = await import("/page/markdown.js");
    const element = document.createElement("div");
    showMarkdown(element, text);
    for (const button of element.querySelectorAll("button")) button.remove();
    return element.innerHTML;
}"""
# What elements an answer may consist of, and which attributes they may have.
ALLOWED = """async (text) => {
    const { showMarkdown } = await import("/page/markdown.js");
    const element = document.createElement("div");
    document.body.append(element);
    showMarkdown(element, text);
    const found = [...element.querySelectorAll("*")].flatMap((each) => [each.localName, ...[...each.attributes].map(
        ({ name, value }) => `${each.localName} ${name}${name === "href" ? "=" + value : ""}`)]);
    element.remove();
    return [...new Set(found)];
}"""
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.fixture
def render(page) -> Callable[[str], str]:
    return lambda text: page.evaluate(RENDER, text)


RENDERED = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A *title* #\ntext": "<h3>A <em>title</em></h3><p>text</p>",
    "**bold** __bold__ *it* _it_ ~~no~~ `a*b*`": "<p><strong>bold</strong> <strong>bold</strong> <em>it</em> "
    "<em>it</em> <del>no</del> <code>a*b*</code></p>",
    "***both*** **a *b***": "<p><em><strong>both</strong></em> <strong>a <em>b</em></strong></p>",
    "snake_case_name 2 * 3 * 4 **open": "<p>snake_case_name 2 * 3 * 4 **open</p>",
    r"\*not\* `` a`b `` `open": "<p>*not* <code>a`b</code> `open</p>",
    "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d</li></ul>",
    "3. a\n4. b\n\nend": '<ol start="3"><li>a</li><li>b</li></ol><p>end</p>',
    "the year was\n1984. A book": "<p>the year was<br>1984. A book</p>",
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "a\n\n---\n* * *": "<p>a</p><hr><hr>",
    "```py\nif a < b:\n    `c`\n```\nend": '<figure class="code"><figcaption><span>py</span></figcaption>'
    '<pre tabindex="0"><code>if a &lt; b:\n    `c`</code></pre></figure><p>end</p>',
    "~~~\nnever closed\n\n# here": '<figure class="code"><figcaption><span>text</span></figcaption>'
    '<pre tabindex="0"><code>never closed\n\n# here</code></pre></figure>',
    "| a | b |\n|:-:|--:|\n| 1 | *2* |\n| 3 |": '<div class="table" tabindex="0"><table><thead><tr><th class="center">a'
    '</th><th class="right">b</th></tr></thead><tbody><tr><td class="center">1</td><td class="right"><em>2</em></td>'
    '</tr><tr><td class="center">3</td><td class="right"></td></tr></tbody></table></div>',
    "[a *b*](https://x.org/c_(d)) and https://x.org/e_f.": "<p>"
    f'<a href="https://x.org/c_(d)" title="https://x.org/c_(d)" {LINK}>a <em>b</em></a> and '
    f'<a href="https://x.org/e_f" title="https://x.org/e_f" {LINK}>https://x.org/e_f</a>.</p>',
    "![pixel](https://x.org/p)": f'<p><a href="https://x.org/p" title="https://x.org/p" {LINK}>pixel</a></p>',
    "a<br>b &amp; <!-- c -->": "<p>a&lt;br&gt;b &amp;amp; &lt;!-- c --&gt;</p>",
}


def test_markdown_becomes_elements(render):
    assert {text: render(text) for text in RENDERED} == RENDERED


HOSTILE = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    "<svg/onload=window.owned=1><iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "```<script>\n</code></pre><script>window.owned = 1</script>\n```",
    "[a](javascript:window.owned=1) [b](JaVaScRiPt:window.owned=1) [c](data:text/html,<script>1</script>)",
    "[d](\tjavascript:window.owned=1) [e](java\nscript:window.owned=1) [f](&#106;avascript:1) [g](//evil.example)",
    '[h](vbscript:1) [i](file:///etc/passwd) [j](/v1/models) [k](blob:https://x/1) [l](https://x.org/"onclick=1)',
    '![x](javascript:window.owned=1) ![y](x" onerror="window.owned=1)',
    "[<img src=x onerror=window.owned=1>](https://x.org/<img src=x onerror=window.owned=1>)",
    "| <b onmouseover=window.owned=1> | x |\n|--|--|\n| </table><script>window.owned=1</script> | y |",
    "# <style>*{display:none}</style>\n> <base href=//evil.example>\n- <form action=//evil.example><input name=q>",
    "`<script>` **<script>** _<iframe>_ ~~<object data=x>~~ <math><mtext><style><img src onerror=window.owned=1>",
    'https://x.org/"><script>window.owned=1</script>',
    "\u202e\u0000<\u0000script>window.owned=1</script>\ufeff",
]
ELEMENTS = set(
    re.findall(
        r"\w+",
        "p br h3 ul ol li blockquote hr em strong del a code pre figure figcaption span button svg use div "
        "table thead tbody tr th td",
    )
)
ATTRIBUTES = {"class", "title", "target", "rel", "tabindex", "start", "href", "aria-label", "aria-hidden", "type"}


@pytest.mark.threat("page-markup")
def test_hostile_text_stays_text(page):
    found = {name for text in HOSTILE for name in page.evaluate(ALLOWED, text)}
    assert {name for name in found if " " not in name} <= ELEMENTS
    attributes = {name.partition(" ")[2] for name in found if " " in name}
    assert {name.partition("=")[0] for name in attributes} <= ATTRIBUTES
    links = {name.partition("=")[2] for name in attributes if name.startswith("href=")}
    assert [link for link in links if not link.startswith(("https://x.org/", "page/icons.svg#"))] == []
    assert page.evaluate("window.owned") is None


# Each would take minutes, or all of the stack, if a step took more than linear time.
UNITS = (
    "|-",
    "|-\n",
    "a\n=\n",
    "a\n-\n",
    "a\n#\n",
    "|a|\n|-|\n",
    "a|b\n-|-\n",
    "```\n",
    "-\n",
    "a\n",
    "a  \n",
    "[a]\n",
)
LONG = [
    "*a " * 50_000,
    "[" * 100_000,
    "`" * 50_000 + " " + "a``b```c" * 10_000,
    "> " * 50_000,
    "- a\n1. b\n" * 20_000,
    "https://" * 12_000,
    "_" * 100_000,
    "a | b\n" * 20_000,
    "[a](" + "(" * 100_000,
    "h" * 100_000,
    "#" * 100_000,
    "- " * 50_000,
    "***a **b *c " * 10_000,
    "`a`" * 60_000,
    "\n" * 100_000 + " " * 100_000,
    *(unit * (96_000 // len(unit)) for unit in UNITS),
    *("- " + unit * (96_000 // len(unit)) for unit in UNITS),
    ("`a`" * 600 + "\n\n") * 50,
    "> " + "*\nxa>" * 20_000,  # on which marked 18 fails
]


@pytest.mark.threat("page-freeze")
def test_texts_made_to_take_long_are_rendered(page, render):
    assert [len(text) for text in LONG if not render(text) and text.strip()] == []


# Bounds of what the browser's one thread may be held by, on a machine that computes something else beside it.
LONGEST_MS = 500
MOST_ELEMENTS = 20_000
WIDE = "|" * 3_000 + "\n" + "|-" * 3_000 + "|\n" + "|\n" * 3_000  # 9 million cells if all were made


@pytest.mark.threat("page-freeze")
def test_no_answer_freezes_the_page(page):
    held = {}
    for text in (WIDE, "| a |\n|---|\n" + "| b |\n" * 3_900, "- a\n" * 1_900, *LONG):
        taken, elements = page.evaluate(
            """async (text) => {
            const { showMarkdown } = await import("/page/markdown.js");
            const element = document.createElement("div");
            const start = performance.now();
            showMarkdown(element, text);
            return [performance.now() - start, element.querySelectorAll("*").length];
        }""",
            text,
        )
        if taken >= LONGEST_MS or elements >= MOST_ELEMENTS:
            held[text[:16]] = taken, elements
    assert held == {}


@pytest.mark.threat("page-freeze")
def test_a_text_that_was_too_slow_stays_plain_while_more_of_it_comes(page):
    """Else each token would take as long again."""
    tried = """async (text) => {
        const { showMarkdown } = await import("/page/markdown.js");
        const element = document.createElement("div");
        showMarkdown(element, text);
        const start = performance.now();
        for (let token = 0; token < 20; token += 1) showMarkdown(element, text += " a");
        const took = performance.now() - start;
        const plain = element.querySelectorAll("pre").length;
        showMarkdown(element, "*b*");
        return [took, plain, element.querySelectorAll("em").length];
    }"""
    took, plain, others = page.evaluate(tried, "# a\n" * 5_000)
    assert (plain, others) == (1, 1) and took < LONGEST_MS


def test_blocks_that_did_not_change_stay_what_they_are(page):
    """So a selection in them, and the place where a block was scrolled to, outlive the next token."""
    same = """async ([before, after]) => {
        const { showMarkdown } = await import("/page/markdown.js");
        const element = document.createElement("div");
        showMarkdown(element, before);
        const old = [...element.children];
        showMarkdown(element, after);
        return [...element.children].map((child, at) => child === old[at]);
    }"""
    assert page.evaluate(same, ["# a\n\nb\n\nc", "# a\n\nb\n\nc d\n\ne"]) == [True, True, False, False]
    assert page.evaluate(same, ["a\n\nb\n\nc", "a"]) == [True]


def test_events_are_read_in_whatever_pieces_they_come(page):
    read = """async (pieces) => {
        const { readEvents } = await import("/page/api.js");
        const stream = new ReadableStream({ start(controller) {
            for (const piece of pieces) controller.enqueue(new Uint8Array(piece));
            controller.close();
        } });
        const found = [];
        for await (const data of readEvents(stream)) found.push(data);
        return found;
    }"""
    text = ': beat\r\n\r\ndata: é\r\ndata: two\r\n\r\nevent: x\nid: 1\ndata:{"a": 1}\n\ndata: [DONE]\r\r'
    expected = ["é\ntwo", '{"a": 1}', "[DONE]"]
    for size in (1, 3, 1000):
        data = list(text.encode())
        assert page.evaluate(read, [data[at : at + size] for at in range(0, len(data), size)]) == expected
