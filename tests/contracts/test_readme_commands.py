"""What the README shows can be typed: its Python runs, its commands and flags exist, its links lead somewhere."""

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import click
import httpx2 as httpx
import pytest

from llmc.cli.main import cli
from llmc.runtime import load

PAGES = [
    "README.md",
    "export/FAMILIES.md",
    "export/README.md",
    "optimize/README.md",
    "runtime/README.md",
    "runtime/server/README.md",
    "recipes/README.md",
    "recipes/benchmarks/README.md",
    "recipes/benchmarks/RESULTS.md",
    "recipes/gpu.md",
    "recipes/gpu_kit/README.md",
    "recipes/jetson.md",
    "recipes/serve/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
# What a fenced block or a span of code says about the command: the verb, and all that follows on the line.
COMMAND = re.compile(r"(?:^\s{4}|^\$ |`)llmc (?P<verb>[a-z]\w+)(?P<rest>[^`\n#]*)", re.M)
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / request.param


def commands(text: str) -> list[tuple[str, str]]:
    return [(found["verb"], found["rest"]) for found in COMMAND.finditer(text)]


def wrong_commands(text: str) -> list[str]:
    """Verbs and flags that the command line does not have."""
    context, wrong = click.Context(cli), []
    for verb, rest in commands(text):
        command = cli.get_command(context, verb)
        if isinstance(command, click.Group):
            command = command.get_command(context, rest.split()[0])
        if command is None:
            wrong.append(verb)
            continue
        known = {"--help"} | {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
        wrong += [f"{verb} {flag}" for flag in FLAG.findall(re.sub(r'"[^"]*"', "", rest)) if flag not in known]
    return wrong


def anchors(text: str) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def python_blocks(text: str) -> list[str]:
    return [textwrap.dedent(block) for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]


def test_commands_and_flags_exist(page):
    assert wrong_commands(page.read_text(encoding="utf-8")) == []


def test_a_command_or_flag_that_does_not_exist_would_be_seen():
    planted = '    llmc plant X\n    llmc build X --int9 -o Y\nand `llmc run B -p "x --y" --tempreature 1`'
    assert wrong_commands(planted) == ["plant", "build --int9", "run --tempreature"]


def test_the_readme_shows_every_verb(root):
    shown = {verb for verb, _ in commands((root / "README.md").read_text(encoding="utf-8"))}
    assert set(cli.list_commands(click.Context(cli))) <= shown


def test_links_lead_to_files_and_headings(page):
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_would_be_seen(root):
    planted = "[a](runtime/README.md#no-such-heading) [b](nowhere.md) [c](#embed-it)"
    assert broken_links(root / "README.md", planted) == ["runtime/README.md#no-such-heading", "nowhere.md"]


def test_python_in_the_readmes_runs(root, tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with load(tiny_bundle) as model:
        for page in ("README.md", "runtime/README.md"):
            for block in python_blocks((root / page).read_text(encoding="utf-8")):
                exec(compile(block.replace('"BUNDLE"', repr(str(tiny_bundle))), page, "exec"), {"model": model})


def test_the_service_of_the_runtimes_page_answers(root, tiny_bundle):
    page = (root / "runtime" / "README.md").read_text(encoding="utf-8")
    block = next(block for block in python_blocks(page) if "FastAPI" in block)
    names: dict[str, Any] = {"__name__": "service"}
    exec(compile(block.replace('"BUNDLE"', repr(str(tiny_bundle))), "service.py", "exec"), names)

    async def asked(text: str) -> httpx.Response:
        app = names["app"]
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
        ):
            return await client.post("/ask", json={"text": text, "max_tokens": 8})

    with load(tiny_bundle) as model:
        expected = model.chat([{"role": "user", "content": "Hello"}], max_tokens=8)
    answer = asyncio.run(asked("Hello"))
    assert (answer.status_code, answer.text) == (200, expected.text)
    assert asyncio.run(asked("\u6771" * 2000)).status_code == 400  # more tokens than the context holds
