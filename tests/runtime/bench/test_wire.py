"""The client of event streams: every way in which an answer can come, or not, is told by the reply and never raised."""

import asyncio
import threading
from pathlib import Path

import pytest
from doubles.planted_server import END, RESET, STREAM, Asked, chunked, event, planted_server, response, whole

from llmc.errors import UsageError
from llmc.runtime.bench.wire import Client, EventReader, Reply, run, server_at

PATIENCE = 60.0


def posted(url: str, times: int = 1, timeout_s: float = PATIENCE) -> list[tuple[Reply, list[bytes]]]:
    """The replies to so many requests, one after the other, each with its events."""

    async def main() -> list[tuple[Reply, list[bytes]]]:
        client, found = Client(server_at(url), timeout_s), []
        for _ in range(times):
            events: list[bytes] = []
            body = b'{"max_tokens": 2, "prompt": "a"}'
            reply = await client.send("POST", "/completions", body, lambda at, data, events=events: events.append(data))
            found.append((reply, events))
        client.close()
        return found

    return run(main())


# ------------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_stream_is_cut(size: int):
    stream = b": heartbeat\n\ndata: one\r\n\r\nevent: x\nid: 3\ndata:two\ndata: more\n\n\n\ndata: [DONE]\n\ndata: lost"
    reader = EventReader()
    found = [e for start in range(0, len(stream), size) for e in reader.feed(stream[start : start + size])]
    assert found == [b"one", b"two\nmore", b"[DONE]"]


# ------------------------------------------------------------------------------------------------------------ answers


def test_a_stream_comes_event_by_event_and_the_connection_is_used_again():
    with planted_server(whole) as server:
        first, second = posted(server.url, 2)
    assert [event for event in first[1] if event == b"[DONE]"] == [b"[DONE]"]
    assert (first[0].status, first[0].failure, len(second[1])) == (200, None, len(first[1]))
    assert server.connections == 1


def test_an_error_of_the_server_is_an_answer_with_its_words():
    with planted_server(lambda asked: [response(429, {"error": {"message": "full"}})]) as server:
        [(reply, events)] = posted(server.url)
    assert (reply.status, reply.failure, events) == (429, None, [])
    assert b"full" in reply.body


@pytest.mark.parametrize(
    ("pieces", "kind", "events"),
    [
        ([RESET], "connection lost", 0),
        ([STREAM, event(b"{}"), RESET], "connection lost", 1),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "malformed HTTP", 0),
        ([STREAM, b"not a length\r\n"], "malformed HTTP", 0),
    ],
)
def test_what_breaks_off_is_told_by_its_kind(pieces: list[bytes], kind: str, events: int):
    with planted_server(lambda asked: pieces) as server:
        [(reply, found)] = posted(server.url)
    assert reply.failure is not None and reply.failure.kind == kind
    assert len(found) == events


def test_nobody_listening_is_a_failure_of_its_own():
    with planted_server(whole) as server:
        url = server.url
    [(reply, _)] = posted(url)
    assert reply.failure is not None and reply.failure.kind == "no connection"


def test_a_server_that_says_nothing_more_is_given_up():
    with planted_server(lambda asked: [STREAM, event(b"{}")]) as server:
        [(reply, events)] = posted(server.url, timeout_s=0.2)
    assert reply.failure is not None and reply.failure.kind == "timeout"
    assert events == [b"{}"]


def test_a_kept_connection_that_the_server_gave_up_is_replaced_without_a_failure():
    answers = iter([[*whole(Asked("", {}, {"max_tokens": 1, "prompt": ""}))], [RESET]])

    def answer(asked: Asked) -> list[bytes]:
        return next(answers, whole(asked))

    with planted_server(answer) as server:
        replies = posted(server.url, 2)
    assert [reply.failure for reply, _ in replies] == [None, None]
    assert (server.connections, len(server.asked)) == (2, 3)


def test_bytes_that_nobody_asked_for_close_the_connection():
    said = threading.Event()

    def answer(asked: Asked) -> list[bytes]:
        said.set()
        return [STREAM, END + b"HTTP/1.1 200 OK\r\n\r\n"]

    async def main(url: str) -> list[Reply]:
        client = Client(server_at(url), PATIENCE)
        found = []
        for _ in range(2):
            found.append(await client.send("POST", "/completions", b"{}"))
            await asyncio.sleep(0)
        client.close()
        return found

    with planted_server(answer) as server:
        replies = run(main(server.url))
    assert [reply.failure for reply in replies] == [None, None]


# --------------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [
        ("http://localhost:8000", "localhost", 8000, "/v1"),
        ("http://localhost:8000/v1/", "localhost", 8000, "/v1"),
        ("https://example.org/llm", "example.org", 443, "/llm/v1"),
        ("http://[::1]:80", "::1", 80, "/v1"),
    ],
)
def test_urls_are_read_with_and_without_the_version(url: str, host: str, port: int, base: str):
    server = server_at(url)
    assert (server.host, server.port, server.base, server.tls is not None) == (host, port, base, url[4] == "s")


def test_the_key_is_a_header_and_never_in_the_address():
    request = server_at("http://[::1]:81", key="sk-1").request("POST", "/x", b"{}").decode()
    assert request.startswith("POST /v1/x HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert "Authorization: Bearer sk-1\r\n" in request and request.endswith("\r\n\r\n{}")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://a b", "http://x/\r\n"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str):
    with pytest.raises(UsageError, match="expected for example http://localhost:8000"):
        server_at(url)


@pytest.mark.parametrize("key", ["", "a\r\nX: y", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(key: str):
    with pytest.raises(UsageError, match="the API key"):
        server_at("http://x", key=key)


def test_certificates_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(UsageError, match="expected certificates in PEM"):
        server_at("https://x", ca_file=tmp_path / "ca.pem")


def test_chunks_of_the_double_are_what_http_says():
    assert chunked(b"0123456789abcdef") == b"10\r\n0123456789abcdef\r\n"
