"""The page's files over HTTP: their headers, what browsers keep, and that there is nothing else."""

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from llmc.runtime.server.page import mount, read_page

PATHS = sorted(read_page())
ADDRESS = re.compile(r"(?:src|href)=\"([^\"#]+)|(?:from|import) \"([^\"]+)\"|href: `([^`#]+)")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    mount(app)
    with TestClient(app) as found:
        yield found


@pytest.mark.threat("page-markup", "page-files")
@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_shut_in(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy)
    assert "require-trusted-types-for 'script'" in policy
    assert "img-src 'self' data:" in policy and sum("data:" in part for part in policy) == 1
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_files_have_the_types_that_browsers_ask_for(client):
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/page/icons.svg").headers["content-type"] == "image/svg+xml"


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    first = client.get("/page/app.js")
    again = client.get("/page/app.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert first.headers["cache-control"] == "no-cache"
    assert client.get("/page/app.js", headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.threat("page-files")
def test_nothing_else_is_served(client):
    for path in ("/page/", "/page/__init__.py", "/page/index.html", "/page/../__init__.py", "/page/%2e%2e/app.py"):
        assert client.get(path).status_code == 404
    assert client.get("/openapi.json").json()["paths"] == {}


def test_the_page_names_only_files_of_its_own_and_holds_no_inline_script_or_style():
    files = read_page()
    for path, content in files.items():
        text = content.decode()
        found = () if path == "/page/marked.esm.js" else ADDRESS.finditer(text)  # whose writer of markup is not used
        named = {name.removeprefix("./") for each in found for name in each.groups() if name}
        assert named <= {name.removeprefix("/") for name in files} | {name.rpartition("/")[2] for name in files}, path
        assert "innerHTML" not in text and "eval(" not in text
    markup = files["/"].decode()
    assert re.findall(r"<style|style=|\son\w+=|javascript:|<script(?! [^>]*src=)", markup) == []
