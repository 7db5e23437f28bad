"""Saved conversations: what is written where, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from llmc.cli.saved import parse_path, read_messages, write_messages
from llmc.errors import UsageError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello 東京"},
    {"role": "assistant", "content": "ab"},
]


def test_only_the_owner_may_read_what_was_said(tmp_path: Path):
    write_messages(tmp_path / "saved", "tiny", TALK)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o600


def test_a_crash_while_saving_leaves_the_old_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_messages(tmp_path / "saved", "tiny", TALK)

    def crash(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(UsageError, match="No space left"):
        write_messages(tmp_path / "saved", "tiny", TALK[:1])
    assert read_messages(tmp_path / "saved") == TALK
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


IMAGE = {"type": "image", "image": "cat.png"}
SAVED = {"format": "llmc-chat", "version": 1, "messages": TALK}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        (json.dumps({**SAVED, "format": "other"}), "is not a saved conversation"),
        (json.dumps({**SAVED, "version": 2}), "is not a saved conversation"),
        ('"\\ud800"', "is not a saved conversation"),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": "\ud800"}]}), "messages is not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "user"}]}), "messages is not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "god", "content": ""}]}), "messages is not a list"),
        (json.dumps({**SAVED, "messages": [{"role": [], "content": ""}]}), "messages is not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": ["a"]}]}), "messages is not a list"),
        (
            json.dumps({**SAVED, "messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages is not a list",
        ),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": [IMAGE | {"image": 3}]}]}), "is not a list"),
        (json.dumps({**SAVED, "messages": [{"role": "user", "content": [IMAGE | {"url": ""}]}]}), "is not a list"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, content: str, sentence: str):
    (tmp_path / "file").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_messages(tmp_path / "file")


def test_a_home_is_found_and_a_link_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_path("~/a talk", "/save") == tmp_path / "a talk"
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("real")
    write_messages(tmp_path / "first", "tiny", TALK)
    assert (tmp_path / "first").is_symlink() and read_messages(tmp_path / "real") == TALK
