"""Log lines that parse."""

import json
import logging
from pathlib import Path

import pytest

from llmc.runtime.observe.logs import JsonFormatter, event


class Lines(logging.Handler):
    """Keeps what the formatter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.append(self.format(record))

    def last(self) -> dict[str, object]:
        def refuse(constant: str) -> object:
            raise ValueError(f"{constant} is not JSON")

        line = json.loads(self.lines[-1], parse_constant=refuse)
        assert isinstance(line, dict)
        return line


@pytest.fixture
def logger() -> logging.Logger:
    """One of this test alone, which nobody else hears."""
    logger = logging.Logger("llmc.test", logging.INFO)
    logger.addHandler(Lines())
    return logger


@pytest.fixture
def lines(logger: logging.Logger) -> Lines:
    return logger.handlers[0]


def test_an_event_is_one_line_of_json(logger, lines):
    event(logger, "request finished", request_id="r1", ttft_s=0.25, tokens=7, cached=True, reason=None)
    line = lines.last()
    time = line.pop("time")
    assert line == {
        "level": "INFO",
        "logger": "llmc.test",
        "message": "request finished",
        "request_id": "r1",
        "ttft_s": 0.25,
        "tokens": 7,
        "cached": True,
        "reason": None,
    }
    assert len(time) == len("2026-01-02T03:04:05.678901+00:00")
    assert time.endswith("+00:00")


def test_what_json_lacks_becomes_text(logger, lines):
    event(logger, "x", path=Path("a"), fine=[1])
    line = lines.last()
    assert (line["path"], line["fine"]) == ("a", [1])
