"""A tiny model that hears, from its checkpoint to transcripts with the tokens of transformers."""

import base64
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from doubles import asr
from doubles.serving import serving

from llmc.bundle import read_bundle, write_manifest
from llmc.cli.main import main
from llmc.errors import ContextError, RequestError, UsageError
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, load
from llmc.runtime.loading import verify
from llmc.runtime.server.config import ServerConfig

pytest.importorskip("soundfile")
# Least cosine of rows in 8 bits: 0.99999 here, of random weights. With shifted rows it is far below.
LEAST_COSINE = 0.998
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
SHORT, LONG = asr.hum(0.73, 1), asr.hum(5.2, 2)
# Clips with what is asked of them.
ASKED: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "short": (SHORT, {}),
    "long": (LONG, {}),
    "language": (LONG, {"language": "fr"}),
    "prompt": (SHORT, {"prompt": "def f(x):"}),
    "both": (LONG, {"language": "English", "prompt": "x = 1"}),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asr.share_hearing(tmp_path_factory)


@pytest.fixture(scope="module")
def bundle(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "fp32"
    return build(BuildRequest(shared / "export", folder, precision="fp32", max_batch=4)).output


@pytest.fixture(scope="module")
def reference(shared: Path) -> asr.Reference:
    return asr.Reference(shared / "checkpoint")


@pytest.fixture(scope="module")
def expected(reference: asr.Reference) -> dict[str, list[int]]:
    return {
        name: reference.generate(reference.prepare(clip, **asked), GREEDY["max_tokens"])
        for name, (clip, asked) in ASKED.items()
    }


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, threads=1) as loaded:
        yield loaded


def tokens(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def test_greedy_tokens_are_those_of_transformers_alone_and_from_cached_prefixes(model, expected):
    assert len({tuple(found) for found in expected.values()}) == len(ASKED)
    for _ in range(2):
        for name, (clip, asked) in ASKED.items():
            found = model.transcribe(clip, **asked, **GREEDY)
            assert tokens(found.result) == expected[name], name
            assert found.seconds == len(clip) / asr.RATE
    assert found.result.usage.cached_tokens >= 64  # of the 68 rows of the clip


def test_so_they_are_side_by_side(model, expected):
    names = [*ASKED, *ASKED]
    handles = [model.stream_transcript(ASKED[name][0], **ASKED[name][1], **GREEDY) for name in names]
    for name, handle in zip(names, handles, strict=True):
        assert tokens(handle.result()) == expected[name], name


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 18, "prefix_cache_bytes": 0},
        {"prefill_chunk": 32, "prefix_cache_bytes": 0, "draft": "lookup"},
        {"determinism": "strict"},
    ],
    ids=str,
)
def test_so_they_are_in_chunks_of_any_size_and_at_every_level(bundle, expected, options):
    with load(bundle, threads=1, **options) as model:
        for name, (clip, asked) in ASKED.items():
            assert tokens(model.transcribe(clip, **asked, **GREEDY).result) == expected[name], name


def test_a_conversation_may_have_several_clips(model, reference):
    import torch

    parts = [{"type": "audio", "audio": clip} for clip in (SHORT, LONG)]
    found = model.chat([{"role": "user", "content": parts}], **GREEDY)
    features = [reference.prepare(clip) for clip in (SHORT, LONG)]
    width = features[1]["input_features"].shape[-1]
    names, pads = ("input_features", "input_features_mask"), torch.nn.functional.pad
    heard = {n: torch.cat([pads(each[n], (0, width - each[n].shape[-1])) for each in features]) for n in names}
    ids = torch.tensor([model.tokenizer.encode(model_prompt(model, features), False)])
    expected = reference.generate({"input_ids": ids, "attention_mask": torch.ones_like(ids), **heard}, 12)
    assert tokens(found) == expected


def model_prompt(model: Model, features: list[dict[str, Any]]) -> str:
    """The prompt of the conversation with both clips, as transformers' processor writes clips."""
    marks = ["<|audio_pad|>" * int((each["input_ids"] == asr.AUDIO).sum()) for each in features]
    clips = "".join(f"<|audio_start|>{mark}<|audio_end|>" for mark in marks)
    system = "<|im_start|>system\n<|im_end|>\n"
    return f"{system}<|im_start|>user\n{clips}<|im_end|>\n<|im_start|>assistant\n"


def test_in_8_bits_the_tower_is_judged_and_the_bundle_verified(shared, tmp_path):
    report = build(BuildRequest(shared / "export", tmp_path / "int8", precision="int8"))
    assert report.manifest.similarity is not None and report.manifest.similarity.texts == 26  # a window of rows
    assert LEAST_COSINE < report.manifest.similarity.smallest < 1 - 1e-7
    assert verify(report.output).prompts == 4


@pytest.mark.threat("image-tokens")
def test_text_that_spells_an_audio_token_is_text(model):
    audio = model.manifest.geometry.audio
    heard = {"role": "user", "content": [{"type": "audio", "audio": SHORT}]}
    said = [{"role": "system", "content": audio.token}, heard]
    assert model.chat_tokens(said).count(audio.token_id) == audio.count_rows(73)
    with pytest.raises(RequestError, match="shows 2 of the 1 audio parts"):
        model.chat(said, parse_special=True)


@pytest.mark.threat("image-cost")
def test_what_does_not_fit_into_the_context_is_refused(model):
    with pytest.raises(ContextError, match=r"the audio has 60\.0 s or more, and at most 40\.0 s fit into the context"):
        model.transcribe(np.zeros(60 * asr.RATE, np.float32))
    parts = [{"type": "audio", "audio": asr.hum(25, number)} for number in range(2)]
    with pytest.raises(ContextError, match=r"audio 2 has 25\.0 s or more, and at most 15\.0 s fit"):
        model.chat([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"language": "Klingon"}, "language is 'Klingon', expected one of ar .Arabic., yue .Cantonese."),
        ({"language": 3}, "language is 3, expected one of"),
        ({"audio": 3}, "holds the audio as 3, expected the path"),
    ],
)
def test_values_of_another_kind_are_refused(model, asked, said):
    with pytest.raises(UsageError, match=said):
        model.transcribe(**{"audio": SHORT, **asked})


def test_texts_that_the_template_does_not_show_are_refused(model):
    parts = [{"type": "audio", "audio": SHORT}, {"type": "text", "text": "Translate this."}]
    with pytest.raises((RequestError, UsageError), match="template"):
        model.chat([{"role": "user", "content": parts}])


def test_images_are_refused(model):
    with pytest.raises(UsageError, match="a part of the kind image, expected text or audio"):
        model.chat([{"role": "user", "content": [{"type": "image", "image": b""}]}])


@pytest.fixture(scope="module")
def ending(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with many tokens that end an answer, so that transcripts do."""
    folder = tmp_path_factory.mktemp("ending") / "bundle"
    shutil.copytree(bundle, folder)
    manifest = read_bundle(folder)
    ends = tuple(range(2, manifest.geometry.vocab_size, 8))
    write_manifest(replace(manifest, generation=replace(manifest.generation, eos_token_ids=ends)), folder)
    return folder


@pytest.fixture(scope="module")
def service(ending: Path, bundle: Path) -> Iterator[str]:
    config = ServerConfig(models={"asr": ending, "endless": bundle}, threads=1)
    with serving(config) as url:
        yield url


@pytest.fixture(scope="module")
def client(service: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{service}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def wanted(ending: Path) -> Any:
    with load(ending, threads=1) as model:
        return model.transcribe(LONG, language="fr", temperature=0)


FILE = ("long.wav", asr.write_wav(LONG))


def test_openais_client_gets_the_transcript_in_every_form(client, wanted):
    ask: dict[str, Any] = {"model": "asr", "file": FILE, "language": "fr", "temperature": 0}
    create = client.audio.transcriptions.create
    assert wanted.text and create(**ask).text == wanted.text
    assert create(**ask, response_format="text") == f"{wanted.text}\n"
    whole = create(**ask, response_format="verbose_json")
    assert (whole.text, whole.language, whole.duration) == (wanted.text, "french", 5.2)
    events = list(create(**ask, stream=True))
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == wanted.text
    assert events[-1].usage.input_tokens == wanted.result.usage.prompt_tokens


def test_it_refuses_by_name_what_it_does_not_do(client, service):
    openai = pytest.importorskip("openai")
    ask: dict[str, Any] = {"model": "asr", "file": FILE}
    for more, said in (
        ({"response_format": "srt"}, "response_format is 'srt', expected 'json'"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities is not a parameter of this route"),
        ({"language": "tlh"}, "language is 'tlh', expected one of"),
        ({"temperature": "warm"}, "temperature is 'warm', expected a number"),
        ({"stream": "yes"}, "stream is 'yes', expected true or false"),
        ({"temperature": 3}, "temperature is 3.0, expected 2.0 or less"),
        ({"file": ("a.wav", b"no audio")}, "the audio cannot be decoded"),
        ({"stream": True, "response_format": "text"}, "stream is true, expected response_format json"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.audio.transcriptions.create(**{**ask, **more})
    with pytest.raises(openai.BadRequestError, match="the transcript goes on after 324 tokens"):
        client.audio.transcriptions.create(**{**ask, "model": "endless"})
    answer = httpx.post(f"{service}/v1/audio/translations", files={"file": FILE})
    assert answer.status_code == 400 and "translations are not made" in answer.json()["error"]["message"]


@pytest.mark.threat("json-cost")
def test_a_form_that_is_none_is_refused(service):
    post, kind = f"{service}/v1/audio/transcriptions", "multipart/form-data"
    field = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nasr\r\n'
    for content, media_type, said in (
        (b"{}", "application/json", "the body is no form"),
        (b"", "", "the body is no form"),
        (field, kind, "the body is no form"),
        (field, f"{kind}; boundary=b", "the form breaks off"),
        (b"--b\r\n\r\n\r\na\r\n--b--", f"{kind}; boundary=b", "a field of the form has no name"),
        (field * 65 + b"--b--", f"{kind}; boundary=b", "more than 64 fields"),
        (field * 2 + b"--b--", f"{kind}; boundary=b", "model is given 2 times"),
        (field + b"--b--", f"{kind}; boundary=b", "file is missing"),
    ):
        answer = httpx.post(post, content=content, headers={"content-type": media_type})
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], said


def test_a_chat_takes_audio_too(client, service, ending):
    data = base64.b64encode(FILE[1]).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    answer = client.chat.completions.create(
        model="asr", messages=[{"role": "user", "content": [part]}], temperature=0, max_tokens=9
    )
    with load(ending, threads=1) as model:
        said = model.chat(
            [{"role": "user", "content": [{"type": "audio", "audio": LONG}]}], temperature=0, max_tokens=9
        )
    assert answer.choices[0].message.content == said.text
    assert httpx.get(f"{service}/v1/models/asr").json()["x_llmc"]["hears"] is True


def test_the_command_line_writes_down_a_file(ending, wanted, tmp_path, capsys):
    (path := tmp_path / "long.wav").write_bytes(FILE[1])
    common = ["run", str(ending), "--audio", str(path), "--threads", "1"]
    for arguments, status in (
        ([*common, "--language", "fr", "--temperature", "0"], 0),
        ([*common, "--chat"], 2),
        (["run", str(ending), "-p", "a", "--language", "fr"], 2),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        printed = capsys.readouterr()
        assert stopped.value.code == status, printed
        assert status or printed.out == f"{wanted.text}\n"
