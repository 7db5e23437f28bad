"""JSON of strangers is read within bounds, and nothing but regular files is."""

import os
from pathlib import Path

import pytest

from llmc.strict import DEEPEST_JSON, MOST_DIGITS, open_regular, parse_json, read_json


def test_what_lies_within_the_bounds_is_read_as_it_is(tmp_path):
    path = tmp_path / "sound.json"
    deep = "[" * DEEPEST_JSON + "]" * DEEPEST_JSON
    path.write_text('{"ä": [-1, 1.5, null, "x"], "most": ' + "9" * MOST_DIGITS + ', "deep": ' + deep[1:-1] + "}")
    found = read_json(path)
    assert found["ä"] == [-1, 1.5, None, "x"]
    assert found["most"] == int("9" * MOST_DIGITS)


@pytest.mark.threat("bundle-numbers")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * (DEEPEST_JSON + 1) + "]" * (DEEPEST_JSON + 1), "nests more than"),
        ('{"a":' * 65 + "1" + "}" * 65, "nests more than"),
        ("[" * 100_000, "nests more than"),
        ("[" + "9" * 41 + "]", "an integer of 41 digits"),
        ("-" + "9" * 5000, "an integer of 5001 digits"),
        ("{", "Expecting"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_what_lies_beyond_a_bound_is_refused_in_a_clause(content, words):
    with pytest.raises(ValueError, match=words):
        parse_json(content.encode())


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b'"\xff"')


def test_a_file_beyond_its_bound_is_not_read(tmp_path):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="it has 1099511627776 bytes"):
        read_json(tmp_path / "large.json")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: os.mkfifo(path), id="a FIFO"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="a device"),
        pytest.param(lambda path: path.mkdir(), id="a folder"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="FIFOs and devices are POSIX's")
def test_what_is_no_regular_file_neither_hangs_nor_is_read(tmp_path, make):
    make(tmp_path / "x.json")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(ValueError, match="not a regular file"):
        open_regular(tmp_path / "x.json")
    assert len(os.listdir("/dev/fd")) == before


def test_a_path_that_is_none_is_a_value_error():
    with pytest.raises(ValueError, match="null byte"):
        read_json(Path("a\0b"))
