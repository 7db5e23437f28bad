"""Connections of clients that are slow, too many, or send no HTTP, against uvicorn on a real socket."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from doubles.listening import listening, make_certificate

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded, uvicorn_options

PATIENCE_S = 30  # of these clients; nothing here waits so long unless it is broken
Address = tuple[str, int]


async def pieces(scope: Any, receive: Any, send: Any) -> None:
    """Answer with as many kilobytes as the path says, without waiting for anything but the client."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"].strip("/") or 0)):
        await send({"type": "http.response.body", "body": b"x" * 1024, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(**settings: Any) -> Iterator[Address]:
    config = ServerConfig(**settings)
    with listening(Guarded(pieces, config), **uvicorn_options(config)) as address:
        yield address


@contextmanager
def connected(address: Address, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, PATIENCE_S) as client:
        client.sendall(sent)
        yield client


def everything(client: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


def get(address: Address, path: str = "/0") -> int:
    client = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    client.request("GET", path)
    status = client.getresponse().status
    client.close()
    return status


class TestHeaders:
    @pytest.mark.threat("http-headers")
    @pytest.mark.parametrize("sent", [b"GET /" + b"a" * 40_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000])
    def test_that_go_on_beyond_the_limit_are_refused(self, sent):
        with served() as address, connected(address, sent) as client:
            assert everything(client).startswith(b"HTTP/1.1 400")

    def test_after_a_body_may_not_go_on_either(self):
        begun = b"POST /0 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        with served() as address, connected(address, begun) as client:
            time.sleep(0.1)  # so that the trailers are not in one read with the body
            client.sendall(b"X: " + b"a" * 40_000)
            assert b"HTTP/1.1 400" in everything(client)

    @pytest.mark.threat("http-headers")
    @pytest.mark.parametrize("sent", [b"\x16\x03\x01", b"HELO localhost\r\n\r\n"])
    def test_that_are_no_http_are_refused(self, sent):
        with served() as address, connected(address, sent) as client:
            assert everything(client).startswith(b"HTTP/1.1 400")

    def test_that_offer_a_websocket_are_answered_as_if_they_did_not(self, caplog):
        offer = b"GET /0 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        with served() as address, connected(address, offer) as client:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert not [record for record in caplog.records if "ocket" in record.getMessage()]


class TestBodies:
    def test_that_stall_are_answered_in_time_and_others_meanwhile(self):
        with served(body_timeout_s=0.3) as address:
            head = b"POST /0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            with connected(address, head + b"{") as client:
                assert get(address) == 200
                answer = http.client.HTTPResponse(client)
                answer.begin()
                assert answer.status == 408 and answer.getheader("connection") == "close"
                assert "0.3 s" in json.loads(answer.read())["error"]["message"]

    def test_too_large_are_refused_before_they_are_asked_for(self):
        with served(max_body_bytes=1024) as address:
            head = b"POST /0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1025\r\nExpect: 100-continue\r\n\r\n"
            with connected(address, head) as client:
                assert client.recv(65536).startswith(b"HTTP/1.1 413")

    def test_too_large_are_refused_so_that_a_client_that_sends_on_reads_it(self):
        with served(max_body_bytes=1024) as address:
            client = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
            client.request("POST", "/0", body=b" " * 4_000_000)
            assert client.getresponse().status == 413
            client.close()


class TestCrowds:
    @pytest.mark.threat("slow-clients")
    def test_of_slow_clients_block_nobody(self):
        """Some in the middle of their headers, some of their body, some of their answer."""
        slow = [
            b"GET /0 HTTP/1.1\r\nHost: local",
            b"POST /0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
            b"GET /10000 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ]
        with served() as address, ExitStack() as crowd:
            for sent in slow * 67:
                crowd.enter_context(connected(address, sent))
            assert [get(address) for _ in range(10)] == [200] * 10

    @pytest.mark.threat("slow-clients")
    def test_larger_than_the_limit_are_told_so(self):
        with served(max_connections=3) as address, ExitStack() as crowd:
            for _ in range(3):
                crowd.enter_context(connected(address))
            assert get(address) == 503


@pytest.mark.threat("wire")
def test_tls_takes_a_certificate_from_files(tmp_path):
    cert, key = make_certificate(tmp_path)
    with served(tls_cert=cert, tls_key=key) as address:
        trusting = ssl.create_default_context(cafile=str(cert))
        client = http.client.HTTPSConnection(*address, context=trusting, timeout=PATIENCE_S)
        client.request("GET", "/0")
        assert client.getresponse().status == 200
        client.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection(*address, context=ssl.create_default_context()).connect()
