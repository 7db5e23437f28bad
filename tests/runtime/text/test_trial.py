"""Tokenizers that panic, hang or grow are met by a process of their own, once for each machine."""

import base64
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import BundleError, RequestError
from llmc.runtime import load
from llmc.runtime.host.apart import ApartError
from llmc.runtime.text import trial
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text.trial import examine, try_tokenizer

BROKEN_MAP = base64.b64encode(b"\x10\x00\x00\x00" + b"\xff" * 16 + b"x").decode()


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*parts: dict[str, Any], kind: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
POST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


@pytest.fixture
def written(tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the small model's tokenizer with other contents."""

    def write(**changes: Any) -> Path:
        content = json.loads((tiny_checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **changes}), encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.threat("tokenizer-trial")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, r"is broken \(Precompiled"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": BROKEN_MAP}}, "does not work: the tokenizer"),
        ({"normalizer": replace("", "x")}, "does not work: the tokenizer cannot encode"),
        ({"post_processor": POST}, "does not work: the tokenizer cannot encode the text: no entry found for key"),
        (
            {"normalizer": {"type": "Prepend", "prepend": "x" * 640}},
            r"makes \d+ tokens or characters of 1, expected at most",
        ),
        ({"normalizer": sequence(*[replace("\u2603", "\u2603" * 4)] * 5)}, r"makes \d+ tokens or characters of \d+"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_what_is_wrong(written, changes, message):
    with pytest.raises(BundleError, match=rf"tokenizer\.json.* ?{message}"):
        examine(str(written(**changes)))


@pytest.mark.threat("tokenizer-trial")
def test_replacements_that_grow_without_end_end_the_trial_alone(written, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_BYTES", 1 << 30)
    monkeypatch.setattr(trial, "TRIAL_S", 3.0)
    with pytest.raises(BundleError, match="does not work: a trial in a separate process failed"):
        try_tokenizer(written(normalizer=sequence(*[replace("\u2603", "\u2603\u2603", "Regex")] * 40)))


@pytest.mark.threat("tokenizer-trial")
def test_a_panic_of_the_library_is_an_error_of_the_request(written):
    with pytest.raises(RequestError, match="cannot encode the text: no entry found for key"):
        Tokenizer.from_folder(written(post_processor=POST)).encode("a")


def test_a_bundle_whose_tokenizer_panics_is_refused(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    file = folder / "tokenizer.json"
    content, size = json.loads(file.read_text(encoding="utf-8")), file.stat().st_size
    file.unlink()
    file.write_text(json.dumps({**content, "post_processor": POST}).ljust(size), encoding="utf-8")
    with pytest.raises(
        BundleError, match="does not work: the tokenizer cannot encode the text: no entry found for key"
    ):
        load(folder, self_test=False)


@pytest.mark.threat("template-trial")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not work: a trial"),
        ("{{ 'a' * 10**11 }}", "takes all memory"),
    ],
)
def test_a_template_that_never_ends_or_takes_all_memory_is_refused(written, monkeypatch, source, message):
    monkeypatch.setattr(trial, "TRIAL_S", 3.0)
    folder = written()
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(BundleError, match=f"chat template {message}"):
        try_tokenizer(folder)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The trials that are made, which pass at once, with a cache of their own."""
    made: list[str] = []
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "call_apart", lambda function, *arguments, **limits: made.append(function))
    return made


def test_a_tokenizer_is_tried_once_and_anew_when_it_changed(calls, written):
    folder = written()
    for _ in range(2):
        try_tokenizer(folder)
    assert calls == ["llmc.runtime.text.trial:examine"]
    try_tokenizer(shutil.copytree(folder, folder / "copy", ignore=lambda *_: ["cache"]))
    assert len(calls) == 1, "the files of a copy are the same"
    (folder / "tokenizer_config.json").write_text("{}")
    try_tokenizer(folder)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ApartError("ended by SIGABRT"), OSError("no process")])
def test_a_trial_that_fails_is_made_again(calls, written, monkeypatch, caplog, error):
    def fails(function: str, *arguments: Any, **limits: Any) -> None:
        calls.append(function)
        raise error

    monkeypatch.setattr(trial, "call_apart", fails)
    for _ in range(2):
        with pytest.raises(BundleError, match=r"process failed \(ended by") if "SIG" in str(error) else nullcontext():
            try_tokenizer(written())
    assert len(calls) == 2
    assert ("is not tried before its use" in caplog.text) == isinstance(error, OSError)


def test_the_trial_passes_a_vocabulary_that_lacks_most_words(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.WordLevel({"a": 0}, unk_token="b")).save(str(tmp_path / "tokenizer.json"))
    examine(str(tmp_path))
    with pytest.raises(RequestError, match="cannot encode the text"):
        Tokenizer.from_folder(tmp_path).encode("c")


@pytest.mark.parametrize("fixture", ["byte_level_folder", "metaspace_folder"])
def test_the_trial_passes_usual_tokenizers(request, fixture):
    examine(str(request.getfixturevalue(fixture)))
