"""Bodies: refused by their size, their time and their nesting, before the application sees anything."""

import json
import threading
import tracemalloc

import pytest
from doubles.asgi import Echo, ask
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http import arrival as bodies
from llmc.runtime.server.http.arrival import check_json
from llmc.runtime.server.http.call import LARGE
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.guarded import Guarded

CONFIG = ServerConfig(max_body_bytes=2048, body_timeout_s=0.1)
LENGTH = {"content-length": "7"}
CHUNKED = {"transfer-encoding": "chunked"}


@pytest.fixture
def echo() -> Echo:
    return Echo()


class TestSize:
    def test_within_the_limit_passes_whole(self, echo):
        answer = ask(Guarded(echo, CONFIG), method="POST", headers=CHUNKED, body=[b'{"a":', b"1}"])
        assert (answer.status, answer.body) == (200, b'{"a":1}')

    @pytest.mark.threat("http-body")
    @pytest.mark.parametrize("declared", ["2049", "9" * 30, "-1", "x"])
    def test_that_is_declared_is_refused_before_it_is_read(self, echo, declared):
        answer = ask(Guarded(echo, CONFIG), method="POST", headers={"content-length": declared}, body=[b"{}"])
        assert answer.status == 413 and answer.headers["connection"] == "close"
        assert "more than 2048 bytes" in answer.json["error"]["message"] and echo.scope is None

    @pytest.mark.threat("http-body")
    def test_that_comes_in_chunks_is_refused_where_it_exceeds_the_limit(self, echo):
        app = Guarded(echo, CONFIG)
        assert ask(app, method="POST", headers=CHUNKED, body=[b" " * 1024] * 2).status == 200
        answer = ask(app, "/v1/messages", method="POST", headers=CHUNKED, body=[b" " * 1024] * 3)
        assert answer.status == 413 and answer.json["error"]["type"] == "request_too_large"


class TestTime:
    @pytest.mark.threat("http-body")
    def test_is_that_of_the_whole_body(self, echo, monkeypatch):
        monkeypatch.setattr(bodies, "LINGER_S", 0.01)
        answer = ask(Guarded(echo, CONFIG), method="POST", headers=LENGTH, body=[b"{"], stalls=True)
        assert answer.status == 408 and answer.headers["connection"] == "close" and echo.scope is None
        assert answer.json["error"]["message"] == "the body was not there after 0.1 s; send it faster, or less"


def refused(content: bytes) -> bool:
    try:
        check_json(content)
    except ApiError as error:
        assert error.status == 400
        return True
    return False


class TestNesting:
    @pytest.mark.threat("json-cost")
    @given(
        st.recursive(
            st.text('[]{}",\\ab') | st.none(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\a'), inner, max_size=3),
            max_leaves=30,
        ),
        st.integers(0, 8),
        st.integers(1, 40),
    )
    def test_is_that_of_the_value(self, value, deepest, piece):
        def depth(value: object) -> int:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
            return 0 if inner is None else 1 + max(map(depth, inner), default=0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bodies, "PIECE", piece)
            patch.setattr(bodies, "DEEPEST", deepest)
            assert refused(json.dumps(value).encode()) == (depth(value) > deepest)

    @pytest.mark.parametrize("content", [b"[" * 65 + b"]" * 65, b"[" * 100_000, b'{"a":' * 65 + b"1" + b"}" * 65])
    def test_beyond_the_limit_is_refused(self, echo, content):
        answer = ask(Guarded(echo, ServerConfig()), method="POST", headers=CHUNKED, body=[content])
        assert answer.status == 400 and "more than 64 levels deep" in answer.json["error"]["message"]
        assert echo.scope is None

    def test_of_what_is_no_json_is_left_to_the_parser(self):
        assert not refused(b"]" * 1000) and not refused(b'"' + b"[" * 1000) and not refused(b"")

    def test_is_counted_in_utf_8_alone(self):
        assert refused(json.dumps([[1]]).encode("utf-16")) and refused(json.dumps([[1]]).encode("utf-16-le"))

    @pytest.mark.threat("json-cost")
    def test_takes_time_and_memory_in_proportion(self):
        tracemalloc.start()
        for content in (b'"\\"' * 2_000_000, b'\\\\"' * 2_000_000, b"[]" * 400_000, b"[" * 6_000_000):
            refused(content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 300e6

    def test_is_read_once_for_names_that_are_there_twice(self):
        class Name(str):
            compared = 0
            __slots__ = ()
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                Name.compared += 1
                return str.__eq__(self, other)

        names = [Name(number) for number in range(2000)]
        with pytest.raises(ApiError, match="1999 is given twice"):
            bodies._once([(name, None) for name in (*names, Name(1999))])
        assert Name.compared < 10 * len(names)  # each with each would be a thousand times as many

    @pytest.mark.threat("json-cost")
    def test_does_not_hide_what_takes_long_to_read(self):
        most = bodies.MOST_PARTS
        assert not refused(json.dumps(["a"] * (most - 1)).encode()) and refused(json.dumps(["a"] * (most + 1)).encode())
        assert not refused(json.dumps([[]] * (most - 1)).encode()) and refused(json.dumps([[]] * most).encode())
        assert refused(json.dumps({str(number): 1 for number in range(most + 1)}).encode())
        assert not refused(json.dumps({"text": '"' * (3 * most)}).encode())

    @pytest.mark.threat("json-cost")
    def test_does_not_hide_a_million_values(self):
        assert refused(b"[" + b"[]," * 500_000 + b"[]]")
        assert not refused(json.dumps({"text": "[],{}" * 500_000}).encode())


@pytest.mark.parametrize("size", [LARGE // 2, LARGE * 2])
def test_large_ones_are_read_in_another_thread(echo, monkeypatch, size):
    threads = set()

    def check(content: bytes) -> None:
        threads.add(threading.get_ident())

    monkeypatch.setattr(bodies, "check_json", check)
    app = Guarded(echo, ServerConfig())
    assert ask(app, method="POST", headers=CHUNKED, body=[b"a" * size]).status == 200
    assert (threads == {threading.get_ident()}) == (size < LARGE)


def test_half_of_a_character_is_refused_and_whole_ones_pass():
    for whole in (b'{"a": "\\ud83d\\ude00"}', b'{"a": "\\\\ud800"}', b'"\\ud800'):  # escaped in two, text, and no JSON
        check_json(whole)
    for half in (b'{"a": "\\ud800"}', b'{"\\uDFFF": 1}', b'["\\ude00\\ud83d"]'):
        with pytest.raises(ApiError, match="half of a character"):
            check_json(half)
