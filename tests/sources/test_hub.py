"""Names of the hub, against a hub on loopback with the hub's own client."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.hub import COMMIT, Hub, Repository, list_files, repository, serve

from llmc.errors import CheckpointError, HubError, ResourceError, UsageError
from llmc.sources import Kind, Located, is_hub_name, locate

NAME = "org/tiny"
WEIGHTS = bytes(range(256)) * 64
CHECKPOINT = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
}
OTHERS = {
    name: name.encode()
    for name in (
        *("README.md", ".gitattributes", "modeling_tiny.py", "pytorch_model.bin", "consolidated.safetensors"),
        *("onnx/model.onnx", "tf_model.h5", "original/config.json", "tokenizer.model", "training_args.bin"),
    )
}
GGUFS = {f"tiny-{kind}.gguf": kind.encode() for kind in ("Q2_K", "Q4_K_M", "Q8_0", "IQ4_NL", "F16")}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub()) as hub:
        yield hub


@pytest.fixture(autouse=True)
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The client's cache; the client reads its environment once, when it is imported."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    use(hub, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(_http, "_HUB_ORIGINS", frozenset())
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )


def put(hub: Hub, files: dict[str, bytes], name: str = NAME, **options: Any) -> Repository:
    hub.repositories[name] = repository(files, **options)
    return hub.repositories[name]


def contents(located: Located) -> dict[str, bytes]:
    files = (path for path in located.path.rglob("*") if path.is_file())
    return {path.relative_to(located.path).as_posix(): path.read_bytes() for path in files}


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        *("org/name", "org/name@main", "org/name@refs/pr/1", "org/name:Q4_K_M", "org/name@v1:dir/file.gguf"),
        *("hf.co/org/name:q8_0", "huggingface.co/org/name", "https://huggingface.co/org/name/"),
        *("https://huggingface.co/org/name/tree/main", "https://hf.co/org/name/blob/main/x.gguf"),
        str(Path("https://hf.co/org/name")),
    ],
)
def test_names_of_the_hub_are_recognised(name: str):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("name", "./org/name", "/org/name", "../name", "org/name/more", "org/..", "org/na--me", "org/name@../../x"),
        *(
            "org/name@/x",
            "org/name@a//b",
            "models/tiny.gguf",
            "org/name:a:b",
            "org\\name",
            "org/name\n",
            "https://other/a/b",
        ),
    ],
)
def test_other_texts_are_none(name: str):
    assert not is_hub_name(name)


def test_a_path_that_exists_wins_and_the_hub_is_not_asked(hub, tmp_path, monkeypatch):
    put(hub, CHECKPOINT)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate(NAME) == Located(NAME, Path(NAME), Kind.CHECKPOINT)
    assert hub.requests == []


def test_a_path_without_a_file_is_refused_and_the_hub_is_not_asked(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).symlink_to("nowhere")
    for name in (NAME, "./loop/x", "a\0b/c", "./" + "a" * 5000, "x" * 300):
        with pytest.raises(UsageError, match="does not exist; name a path, or a model of the hub"):
            locate(name)
    assert hub.requests == []


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.threat("hub-files")
def test_only_files_that_an_export_reads_are_fetched(hub):
    put(hub, {**CHECKPOINT, **OTHERS})
    located = locate(NAME)
    assert (located.kind, located.origin.repository, located.origin.commit) == (Kind.CHECKPOINT, NAME, COMMIT)
    assert contents(located) == CHECKPOINT
    assert sorted(hub.downloads()) == sorted(CHECKPOINT)


def test_a_second_start_asks_only_for_the_commit(hub):
    put(hub, CHECKPOINT)
    first = locate(NAME)
    hub.requests.clear()
    assert locate(NAME) == first
    assert [path.partition("?")[0] for path in hub.paths()] == [f"/api/models/{NAME}/revision/main"]


def test_the_client_sends_no_telemetry(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._detect_agent._registry", None)
    put(hub, CHECKPOINT)
    locate(NAME)
    assert not [path for path in hub.paths() if "harness" in path]
    assert all(request.headers["user-agent"].count("/") == 3 for request in hub.requests)  # its name, hf_hub, python


def test_the_texts_of_processors_templates_and_modules_are_fetched(hub):
    texts = (
        *("chat_template.jinja", "chat_template.json", "additional_chat_templates/rag.jinja", "processor_config.json"),
        *("preprocessor_config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"),
    )
    files = {**CHECKPOINT, **dict.fromkeys(texts, b"{}"), "2_Dense/model.safetensors": b"dense"}
    put(hub, {**files, "2_Dense/pytorch_model.bin": b"x"})
    assert contents(locate(NAME)) == files


def test_every_file_that_an_export_reads_is_on_the_list():
    from llmc.export.sources import adapters, checkpoint, modules, safetensors, templates
    from llmc.export.vision import processor
    from llmc.sources import hub

    texts = {checkpoint.GENERATION_FILE, checkpoint.ADAPTER_FILE, modules.MODULES_FILE, *modules.TEXT_FILES}
    texts |= {
        modules.MODEL_FILE,
        templates.PLAIN,
        templates.OF_PROCESSOR,
        processor.PROCESSOR_FILE,
        processor.IMAGES_FILE,
    }
    assert texts <= hub.TEXT_FILES
    assert (safetensors.SINGLE_FILE, safetensors.INDEX_FILE) == (hub.SINGLE_FILE, hub.INDEX_FILE)
    assert adapters.WEIGHTS_FILE == hub.ADAPTER_WEIGHTS


def sharded(*names: str, **others: bytes) -> dict[str, bytes]:
    index = json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}}).encode()
    return {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        **{name: name.encode() for name in names},
        **others,
    }


def test_only_shards_that_the_index_names_are_fetched(hub):
    files = sharded("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    put(hub, {**files, "model-fp16.safetensors": b"x"})
    assert contents(locate(NAME)) == files


def test_an_adapter_is_fetched(hub):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}
    put(hub, {**files, "adapter_model.bin": b"x"})
    located = locate(NAME)
    assert (located.kind, contents(located)) == (Kind.ADAPTER, files)


def test_size_and_licence_are_reported_before_the_weights_and_the_fraction_grows(hub):
    put(hub, {**CHECKPOINT, "model.safetensors": WEIGHTS * 100})
    reports: list[tuple[Any, ...]] = []
    locate(NAME, progress=lambda *report: reports.append((*report, hub.downloads())))
    assert reports[0] == (f"{NAME}: 2 MB, apache-2.0", 0.0, [])
    fractions = [report[1] for report in reports]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", "d" * 40])
def test_a_revision_is_fetched(hub, revision):
    old = put(hub, CHECKPOINT)
    old.commits["d" * 40] = {**CHECKPOINT, "config.json": b'{"old": 1}'}
    old.revisions |= {"v1": "d" * 40, "refs/pr/1": "d" * 40}
    located = locate(f"{NAME}@{revision}")
    assert (contents(located)["config.json"], located.origin.commit) == (b'{"old": 1}', "d" * 40)
    assert locate(f"{NAME}@{revision}", offline=True) == located


def test_a_renamed_repository_is_followed_and_the_new_name_reported(hub):
    put(hub, CHECKPOINT, name="new/name")
    hub.renamed[NAME] = "new/name"
    reports: list[str] = []
    located = locate(NAME, progress=lambda step, fraction=None: reports.append(step))
    assert contents(located) == CHECKPOINT
    assert reports[0] == f"{NAME} is now called new/name"
    assert locate(NAME, offline=True) == located


def test_a_snapshot_is_read_as_a_checkpoint_whose_source_is_the_commit(hub, tiny_checkpoint):
    from llmc.export.sources.checkpoint import read_checkpoint

    put(hub, {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()})
    source = read_checkpoint(locate(NAME).path).source
    assert (source.name, source.origin.repository, source.origin.commit) == ("tiny", NAME, COMMIT)


# ---------------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    "pick, file",
    [
        *(
            ("", "tiny-Q4_K_M.gguf"),
            (":q8_0", "tiny-Q8_0.gguf"),
            (":IQ4_NL", "tiny-IQ4_NL.gguf"),
            (":f16", "tiny-F16.gguf"),
        ),
        *((":latest", "tiny-Q4_K_M.gguf"), (":tiny-Q2_K.gguf", "tiny-Q2_K.gguf")),
    ],
)
def test_a_gguf_file_is_chosen_by_its_type_or_name(hub, pick, file):
    put(hub, {**GGUFS, "mmproj-tiny-Q8_0.gguf": b"x", "README.md": b"x"}, name="org/tiny-GGUF")
    located = locate(f"org/tiny-GGUF{pick}")
    assert (located.path.name, located.kind, located.path.read_bytes()) == (file, Kind.GGUF, GGUFS[file])
    assert (located.origin.repository, located.origin.file, hub.downloads()) == ("org/tiny-GGUF", file, [file])


@pytest.mark.parametrize("left, file", [("Q2_K Q8_0 F16", "Q8_0"), ("Q6_K Q5_0", "Q5_0")])
def test_without_the_usual_type_it_is_q8_0_or_the_first(hub, left, file):
    put(hub, {f"tiny-{kind}.gguf": b"x" for kind in left.split()})
    assert locate(NAME).path.name == f"tiny-{file}.gguf"


def test_weights_in_safetensors_win_over_gguf_files_without_a_type(hub):
    put(hub, {**CHECKPOINT, **GGUFS})
    assert locate(NAME).kind is Kind.CHECKPOINT
    assert locate(f"{NAME}:Q8_0").kind is Kind.GGUF


@pytest.mark.parametrize("pick", ["", ":BF16", ":BF16/tiny-00002-of-00003.gguf"])
def test_all_parts_of_a_gguf_model_are_fetched_and_the_first_is_its_path(hub, pick):
    files = {f"BF16/tiny-{part:05d}-of-00003.gguf": b"%d" % part for part in (1, 2, 3)}
    put(hub, files)
    located = locate(NAME + pick)
    assert located.path.name == "tiny-00001-of-00003.gguf"
    assert sorted(hub.downloads()) == sorted(files)


def test_a_type_that_no_file_or_several_have_is_refused_with_those_there_are(hub):
    put(hub, {**GGUFS, "other-Q8_0.gguf": b"x"})
    with pytest.raises(UsageError, match=r"no GGUF file of 'Q5_K_M', but other-Q8_0.gguf, tiny-F16.gguf"):
        locate(f"{NAME}:Q5_K_M")
    with pytest.raises(UsageError, match=r"several files of Q8_0: other-Q8_0.gguf, tiny-Q8_0.gguf"):
        locate(f"{NAME}:Q8_0")
    assert hub.downloads() == []


# ------------------------------------------------------------------------------------------------- refused by the hub


@pytest.mark.parametrize(
    "options, message",
    [
        ({"error": (403, "GatedRepo")}, "is gated: .* accept them at http.*/org/tiny, then log in"),
        ({"token": "secret"}, "is not a path here, and the hub has no such model, or it is private"),
        ({"error": (404, "RevisionNotFound"), "hidden": True}, "has no revision main"),
        (
            {"error": (429, ""), "hidden": True},
            "answers with status 429 for org/tiny; it gets too many requests: wait, or log in",
        ),
        ({"error": (503, ""), "hidden": True}, "answers with status 503"),
    ],
)
def test_a_refusal_is_one_sentence(hub, options, message):
    put(hub, CHECKPOINT, **options)
    with pytest.raises(HubError, match=message) as raised:
        locate(NAME)
    assert "\n" not in str(raised.value)
    assert hub.downloads() == []


def test_a_missing_model_is_refused(hub):
    with pytest.raises(HubError, match="org/none is not a path here, and the hub has no such model"):
        locate("org/none")


def test_a_private_model_is_fetched_with_the_token(hub, monkeypatch):
    put(hub, CHECKPOINT, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert contents(locate(NAME)) == CHECKPOINT


@pytest.mark.parametrize(
    "files, message",
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"no model.safetensors .* only \.bin, which can run code"),
        ({"README.md": b"x"}, "no model.safetensors with a config.json, and no GGUF file; use"),
        ({"model.safetensors": b"x"}, "no model.safetensors with a config.json"),
        (dict(list(sharded("a.safetensors", "b.safetensors").items())[:-1]), "names b.safetensors, which is not there"),
        (sharded("../../x.safetensors"), "names ../../x.safetensors, which is not there"),
        (sharded("pytorch_model.bin"), "names pytorch_model.bin, which is not there"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[" * 5000}, "cannot be read .*ValueError"),
        ({"m-00001-of-00002.gguf": b"x"}, "m-00002-of-00002.gguf is missing, a part of"),
        ({"m-00001-of-99999.gguf": b"x"}, "is one of 99999 parts"),
    ],
)
def test_a_repository_without_readable_weights_is_refused(hub, files, message):
    put(hub, files)
    with pytest.raises(CheckpointError, match=message):
        locate(NAME)


# ------------------------------------------------------------------------------------------------------- hostile lists


@pytest.mark.threat("hub-files")
@pytest.mark.parametrize(
    "path", ["../x.json", "/etc/x.json", "a/../../x.jinja", "a\\..\\x.json", "C:x.json", "a//x.json", "x\x1b.json"]
)
def test_listed_paths_that_lead_out_are_never_fetched(hub, path):
    put(hub, CHECKPOINT, listing=list_files({path: b"x", f"additional_chat_templates/{path}": b"x"}))
    assert contents(locate(NAME)) == CHECKPOINT


@pytest.mark.threat("hub-files")
@pytest.mark.parametrize(
    "entry",
    [
        {"rfilename": "config.json", "size": 5, "blobId": "0" * 40},
        {"rfilename": "chat_template.jinja", "size": -1, "blobId": "0" * 40},
        {"rfilename": "chat_template.jinja", "size": "5", "blobId": "0" * 40},
        {"rfilename": "chat_template.jinja", "size": 5, "blobId": "../../0"},
        {"rfilename": "chat_template.jinja", "size": 5},
    ],
)
def test_a_corrupt_list_is_refused(hub, entry):
    put(hub, CHECKPOINT, listing=[entry])
    with pytest.raises(CheckpointError, match="twice, or without size and hash"):
        locate(NAME)
    assert hub.downloads() == []


@pytest.mark.threat("hub-files")
@pytest.mark.parametrize(
    "listing, message",
    [
        (
            [{"rfilename": "tokenizer_config.json", "size": 1 << 40, "blobId": "0" * 40}],
            "tokenizer_config.json has 1,099,512 MB",
        ),
        (
            list_files({f"additional_chat_templates/{number}.jinja": b"" for number in range(2000)}),
            "has 2004 files, expected at most 1024",
        ),
    ],
)
def test_absurd_sizes_and_counts_are_refused(hub, listing, message):
    put(hub, CHECKPOINT, listing=listing)
    with pytest.raises(CheckpointError, match=message):
        locate(NAME)
    assert hub.downloads() == []


@pytest.mark.parametrize("sha", ["../../x", None, "main"])
def test_a_commit_that_is_none_is_refused(hub, sha):
    files = put(hub, CHECKPOINT)
    files.commits, files.revisions = {sha: CHECKPOINT}, {"main": sha}
    with pytest.raises(HubError, match="the answer has no commit"):
        locate(NAME)


def test_a_disk_without_room_is_refused_before_any_file(hub, monkeypatch):
    put(hub, CHECKPOINT)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match=r"needs 1 MB more, the disk has 0 MB free; free some space, or .* HF_HOME"):
        locate(NAME)
    assert hub.downloads() == []


def test_a_disk_that_fills_up_is_reported(hub, monkeypatch):
    put(hub, CHECKPOINT)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(ResourceError, match="the disk is full"):
        locate(NAME)


# ----------------------------------------------------------------------------------------------------------- transport


def test_a_cut_connection_is_resumed(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    put(hub, CHECKPOINT, cuts={"model.safetensors": 1})
    assert contents(locate(NAME)) == CHECKPOINT
    ranges = [request.headers.get("range") for request in hub.requests if request.path.endswith("model.safetensors")]
    assert ranges == [None, None, f"bytes={len(WEIGHTS) // 2}-"]


def test_after_an_end_complete_files_are_kept(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    put(hub, CHECKPOINT, cuts={"model.safetensors": 1000})
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 30)  # no byte of a cut answer counts
    with pytest.raises(HubError, match=r"the connection was cut \(RemoteProtocolError\)"):
        locate(NAME)
    hub.repositories[NAME].cuts.clear()
    hub.requests.clear()
    assert contents(locate(NAME)) == CHECKPOINT
    assert hub.downloads() == ["model.safetensors"]


@pytest.mark.threat("hub-files")
def test_a_blob_outside_the_cache_is_refused_and_left_alone(hub, tmp_path):
    """The client names a blob as the hub's answer says."""
    put(hub, CHECKPOINT, headers={"ETag": '"../../../others"'})
    (tmp_path / "others").write_bytes(b"another's")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="outside its folder"):
            locate(NAME)
    assert (tmp_path / "others").read_bytes() == b"another's"


@pytest.mark.threat("hub-files")
@pytest.mark.parametrize(
    "answer, message",
    [
        ({"headers": {"X-Repo-Commit": "d" * 40}}, "did not arrive whole, or .* of another commit"),
        ({"tags": 5}, "tags are no list"),
    ],
)
def test_an_answer_that_contradicts_the_list_is_one_sentence(hub, answer, message):
    put(hub, CHECKPOINT, **answer)
    with pytest.raises(HubError, match=message):
        locate(NAME)


@pytest.mark.threat("hub-files")
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_refused_and_removed(hub, cache, name):
    put(hub, CHECKPOINT, sent={name: bytes(len(CHECKPOINT[name]))})
    with pytest.raises(
        CheckpointError, match=f"{name}: its hash is .*: it was damaged on the way, and removed; run again"
    ):
        locate(NAME)
    hub.repositories[NAME].sent.clear()
    assert contents(locate(NAME)) == CHECKPOINT


def test_the_token_is_not_sent_to_another_host(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    put(hub, CHECKPOINT, token="secret")
    with serve(Hub({NAME: repository(CHECKPOINT)}), host="localhost") as storage:
        hub.storage = storage
        assert contents(locate(NAME)) == CHECKPOINT
    assert storage.downloads() == ["model.safetensors"]
    assert all("authorization" in request.headers for request in hub.requests)
    assert not any("secret" in str(request.headers) for request in storage.requests)


# ------------------------------------------------------------------------------------------------------------- offline


def test_offline_the_cache_is_used_and_the_hub_is_not_asked(hub, monkeypatch):
    put(hub, CHECKPOINT)
    located = locate(NAME)
    hub.requests.clear()
    assert locate(NAME, offline=True) == located
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate(NAME) == located
    assert hub.requests == []


def test_offline_without_the_model_the_error_says_what_to_do(hub):
    put(hub, {**CHECKPOINT, **GGUFS})
    with pytest.raises(
        HubError, match=r"org/tiny@main is not in the cache .*; run once with network, without --offline"
    ):
        locate(NAME, offline=True)
    locate(f"{NAME}:Q8_0")
    with pytest.raises(
        HubError, match=r"has only a part of org/tiny@main \(source org/tiny has no GGUF file of 'Q2_K'"
    ):
        locate(f"{NAME}:Q2_K", offline=True)
    assert locate(f"{NAME}:q8_0", offline=True).path.name == "tiny-Q8_0.gguf"


def test_a_hub_that_does_not_answer_leaves_what_the_cache_has(hub, caplog, monkeypatch):
    put(hub, CHECKPOINT)
    located = locate(NAME)
    use(Hub(address="http://127.0.0.1:1"), monkeypatch)
    assert locate(NAME) == located
    assert "http://127.0.0.1:1 cannot be reached" in caplog.text and "the copy in the cache is used" in caplog.text
    with pytest.raises(
        HubError, match=r"cannot be reached, or the connection was cut \(ConnectError\); check the network"
    ):
        locate("org/other")


def test_the_environment_of_the_client_is_honoured(hub, tmp_path):
    """In a process of its own: the client reads its environment when it is imported."""
    put(hub, CHECKPOINT, token="secret")
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "secret"}
    code = f"from llmc.sources import locate; print(locate({NAME!r}).path)"
    command, printed = [sys.executable, "-c", code], []
    for offline in ("0", "1"):
        result = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": offline}, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout.strip())
        hub.repositories.clear()
    assert printed[0] == printed[1]
    assert Path(printed[0]).is_relative_to(tmp_path / "home" / "hub" / "models--org--tiny")
