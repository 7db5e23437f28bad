"""Saved conversations: what is written where, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from llmc.cli.saved import check_replaceable, named_path, read_messages, remove_state, target, write_messages
from llmc.errors import UsageError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello 東京"},
    {"role": "assistant", "content": "ab"},
]


def test_only_the_owner_may_read_what_was_said(tmp_path: Path):
    write_messages(tmp_path / "saved", "tiny", TALK)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o600


def test_nor_a_folder_or_a_dangling_link(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(UsageError, match="exists and is no saved conversation"):
            check_replaceable(path, tmp_path / "none.kv")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"saved cannot be written \(No such file or directory\)"):
        write_messages(tmp_path / "nowhere" / "saved", "tiny", TALK)


def test_a_crash_while_saving_leaves_the_old_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_messages(tmp_path / "saved", "tiny", TALK)

    def crash(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(UsageError, match="No space left"):
        write_messages(tmp_path / "saved", "tiny", TALK[:1])
    assert read_messages(tmp_path / "saved") == TALK
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


SAVED = {"format": "llmc-chat", "version": 1, "messages": TALK}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no saved conversation"),
        (json.dumps({**SAVED, "format": "other"}), "is no saved conversation"),
        (json.dumps({**SAVED, "version": 2}), "has version 2, expected 1"),
        (json.dumps({**SAVED, "version": True}), "has version True, expected 1"),
        (json.dumps({**SAVED, "version": 1.0}), "has version 1.0, expected 1"),
        ('"\\ud800"', "is no saved conversation"),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": "\ud800"}]}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": {}}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": ["Hello"]}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "user"}]}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "god", "content": ""}]}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": 1}]}), "messages are not a list"),
        (json.dumps({**SAVED, "messages": [{"role": [], "content": ""}]}), "messages are not a list"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, content: str, sentence: str):
    (tmp_path / "file").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_messages(tmp_path / "file")


def test_a_file_with_more_than_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_messages(tmp_path / "saved", "tiny", TALK)
    monkeypatch.setattr("llmc.cli.reading.MAX_FILE_BYTES", (tmp_path / "saved").stat().st_size)
    assert read_messages(tmp_path / "saved") == TALK
    monkeypatch.setattr("llmc.cli.reading.MAX_FILE_BYTES", (tmp_path / "saved").stat().st_size - 1)
    with pytest.raises(UsageError, match=r"saved cannot be read \(it has more than 0 MB\)"):
        read_messages(tmp_path / "saved")


def test_a_home_is_found_and_a_link_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named_path("~/a talk", "/save") == tmp_path / "a talk"
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("real")
    assert target(tmp_path / "first") == tmp_path / "real"
    assert target(Path("a") / ".." / "b") == Path("a") / ".." / "b"


def test_a_link_in_the_place_of_a_state_is_not_replaced(tmp_path: Path):
    (tmp_path / "real").write_bytes(b"llmcKV\r\n and so on")
    (tmp_path / "saved.kv").symlink_to("real")
    with pytest.raises(UsageError, match=r"saved.kv exists and was not saved by llmc"):
        check_replaceable(tmp_path / "saved", tmp_path / "saved.kv")


def test_a_state_that_cannot_be_deleted_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be replaced"):
        remove_state(tmp_path)
