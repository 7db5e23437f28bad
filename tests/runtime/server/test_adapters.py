"""Adapters are names of models: in every dialect, in the list below their base, for keys, and for admins to load."""

import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from doubles.serving import serving

from llmc.bundle import ADAPTERS_FOLDER
from llmc.runtime import load
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded
from llmc.runtime.server.models.pool import Pool

KEYS = {"admin": "admin = true", "base": 'models = ["tiny"]', "own": 'models = ["sql"]'}
KEYS["some"] = 'admin = true\nmodels = ["tiny", "mine"]'
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
TURNS: Any = [{"role": "user", "content": "def f("}]
PROMPT = "def f("


@pytest.fixture(scope="module")
def folder(adapter_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in float32 with room for two adapters, of which it has ``sql``; tests change their copy."""
    copy = tmp_path_factory.mktemp("adapters") / "bundle"
    return Path(shutil.copytree(adapter_bundles / "fp32", copy, ignore=lambda *_: ["law"]))


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[tuple[str, bool], str]:
    """Answers to the turns and to the plain prompt (True) by the model itself, without and with the adapter."""
    found = {}
    with load(folder, threads=1, self_test=False) as model:
        for name, adapter in (("tiny", None), ("sql", "sql")):
            found[name, False] = model.chat(TURNS, adapter=adapter, **GREEDY).message.content
            found[name, True] = model.generate(PROMPT, adapter=adapter, **GREEDY).text
    assert len({found["tiny", plain] for plain in (False, True)} | {found["sql", True], found["sql", False]}) == 4
    return found


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("".join(f'[{name}]\nkey = "{key(name)}"\n{rest}\n' for name, rest in KEYS.items()))
    file.chmod(0o600)
    with serving(ServerConfig(models={"tiny": folder}, threads=1, keys_file=file), Guarded) as url:
        yield url


def key(name: str) -> str:
    return f"sk-{name:-<16}"


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def ask(address: str) -> Iterator[Callable[..., httpx.Response]]:
    """Ask as one of the keys."""

    def asked(name: str, path: str, method: str = "POST", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key(name)}", "anthropic-version": "2023-06-01"}
        return http.request(method, path, json=body if method == "POST" else None, headers=headers)

    with httpx.Client(base_url=address, timeout=60) as http:
        yield asked


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=key("admin"), max_retries=0) as found:
        yield found


class TestClients:
    @pytest.mark.parametrize("name", ["sql", "tiny"])
    def test_of_openai_name_one_as_their_model(self, client, texts, name):
        chat = client.chat.completions.create(model=name, messages=TURNS, **GREEDY)
        assert (chat.model, chat.choices[0].message.content) == (name, texts[name, False])
        pieces = client.chat.completions.create(model=name, messages=TURNS, stream=True, **GREEDY)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == texts[name, False]
        completion = client.completions.create(model=name, prompt=PROMPT, **GREEDY)
        assert (completion.model, completion.choices[0].text) == (name, texts[name, True])
        answer = client.responses.create(model=name, input=PROMPT, temperature=0, max_output_tokens=6)
        assert (answer.model, answer.output_text) == (name, texts[name, False])

    @pytest.mark.parametrize("name", ["sql", "tiny"])
    def test_of_anthropic_name_one_as_their_model(self, address, texts, name):
        with anthropic.Anthropic(base_url=address, api_key=key("admin"), max_retries=0) as client:
            answer = client.messages.create(model=name, messages=TURNS, max_tokens=6, extra_body={"temperature": 0})
        block: Any = answer.content[0]
        assert (answer.model, block.text) == (name, texts[name, False])

    @pytest.mark.parametrize("name", ["sql", "sql:latest", "tiny"])
    def test_of_ollama_name_one_as_their_model(self, ask, texts, name):
        body = {"model": name, "stream": False, "options": {"temperature": 0, "num_predict": 6}}
        base = name.removesuffix(":latest")
        assert ask("admin", "/api/chat", messages=TURNS, **body).json()["message"]["content"] == texts[base, False]
        assert ask("admin", "/api/generate", prompt=PROMPT, raw=True, **body).json()["response"] == texts[base, True]

    def test_see_it_below_its_base(self, client, ask):
        listed = {model.id: model.model_dump() for model in client.models.list()}
        assert [(name, it["root"], it["parent"]) for name, it in listed.items()] == [
            ("tiny", "tiny", None),
            ("sql", "tiny", "tiny"),
        ]
        assert client.models.retrieve("sql").model_dump() == listed["sql"]
        for path in ("/api/tags", "/api/ps"):
            found = {it["name"]: it["details"]["parent_model"] for it in ask("admin", path, "GET").json()["models"]}
            assert found == {"tiny": "", "sql": "tiny"}
        assert ask("admin", "/api/show", model="sql").json()["details"]["parent_model"] == "tiny"

    def test_count_tokens_with_either_name(self, client, ask):
        path = "/v1/responses/input_tokens"
        assert (
            ask("own", path, model="sql", input=PROMPT).json() == ask("base", path, model="tiny", input=PROMPT).json()
        )


class TestKeys:
    @pytest.mark.threat("adapter-rights")
    def test_of_a_base_are_not_for_its_adapters_and_the_other_way_round(self, ask):
        for name, own, other in (("base", "tiny", "sql"), ("own", "sql", "tiny")):
            assert [it["id"] for it in ask(name, "/v1/models", "GET").json()["data"]] == [own]
            assert ask(name, "/v1/completions", prompt="a", max_tokens=1).json()["model"] == own
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": TURNS})):
                refused = ask(name, path, model=other, max_tokens=1, **body)
                assert refused.status_code == 403 and f"'{name}' is not for the model '{other}'" in refused.text

    @pytest.mark.threat("adapter-rights")
    def test_see_no_other_adapter_when_theirs_goes_while_its_model_is_loaded(self, ask, monkeypatch):
        lease = Pool.lease

        @asynccontextmanager
        async def lease_and_lose(self: Pool, name: str) -> AsyncIterator[Any]:
            async with lease(self, name) as model:
                self.place("tiny").adapters = ("law",)
                try:
                    yield model
                finally:
                    self.place("tiny").adapters = ("sql",)

        monkeypatch.setattr(Pool, "lease", lease_and_lose)
        refused = ask("own", "/v1/completions", model="sql", prompt="a", max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "law" not in refused.text

    def test_see_the_states_of_models_alone(self, ask):
        assert ask("own", "/ready", "GET").json()["models"] == {}
        assert ask("base", "/ready", "GET").json()["models"].keys() == {"tiny"}


class TestAdmins:
    def test_unload_and_load_one_while_its_base_serves(self, ask, texts):
        asked = {"prompt": PROMPT, **GREEDY}
        left = ask("admin", "/admin/models/tiny/adapters/sql/unload")
        assert left.status_code == 200 and (left.json()["adapters"], left.json()["loads"]) == ([], 1)
        missing = ask("admin", "/v1/completions", model="sql", **asked)
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        assert ask("admin", "/admin/models/tiny/adapters/sql/unload").status_code == 400
        assert (
            ask("admin", "/v1/completions", model="tiny", **asked).json()["choices"][0]["text"] == texts["tiny", True]
        )
        back = ask("admin", "/admin/models/tiny/adapters/sql/load")
        assert back.status_code == 200 and (back.json()["adapters"], back.json()["loads"]) == (["sql"], 1)
        assert ask("admin", "/v1/completions", model="sql", **asked).json()["choices"][0]["text"] == texts["sql", True]
        assert ask("admin", "/admin/models/tiny/adapters/sql/load").status_code == 400  # it is loaded already

    def test_unload_one_under_its_requests_which_end_as_ever(self, ask):
        given: dict[str, Any] = {"model": "sql", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
        bodies: dict[str, Any] = {"/v1/completions": {"prompt": PROMPT}}
        bodies |= {path: {"messages": TURNS} for path in ("/v1/chat/completions", "/v1/messages")}
        with ThreadPoolExecutor() as threads:
            answers = [threads.submit(ask, "own", path, **body, **given) for path, body in bodies.items()]
            wait_until(lambda: ask("admin", "/admin/models", "GET").json()["data"][0]["users"] == len(bodies))
            assert ask("admin", "/admin/models/tiny/adapters/sql/unload").status_code == 200
            assert not all(answer.done() for answer in answers)
            found = [answer.result() for answer in answers]
        assert ask("admin", "/admin/models/tiny/adapters/sql/load").status_code == 200
        assert [(it.status_code, it.json()["model"]) for it in found] == [(200, "sql")] * len(bodies)

    @pytest.mark.threat("adapter-rights")
    @pytest.mark.parametrize("name", ["none", "..", "%2e%2e", "..%2f..", "%2fetc"])
    def test_reach_no_folder_but_those_of_the_bundle(self, ask, folder, name):
        refused = ask("admin", f"/admin/models/tiny/adapters/{name}/load")
        assert refused.status_code in (400, 404) and str(folder.parent) not in refused.text
        assert ask("admin", "/admin/models", "GET").json()["data"][0]["adapters"] == ["sql"]

    @pytest.mark.threat("adapter-rights")
    @pytest.mark.parametrize("what", ["load", "unload"])
    def test_alone_do(self, ask, what):
        assert ask("base", f"/admin/models/tiny/adapters/sql/{what}").status_code == 403
        assert ask("admin", f"/admin/models/none/adapters/sql/{what}").status_code == 404

    @pytest.mark.threat("admin")
    @pytest.mark.parametrize("what", ["load", "unload"])
    def test_of_some_models_reach_and_see_no_other_adapter(self, ask, what):
        for name in ("sql", "none"):
            refused = ask("some", f"/admin/models/tiny/adapters/{name}/{what}")
            assert refused.status_code == 403 and "'sql'" not in refused.text.replace("the model 'sql'", "")
        assert "sql" not in ask("some", "/admin/models", "GET").text
        missing = ask("some", "/admin/models/tiny/adapters/mine/load")
        assert missing.status_code == 400 and "sql" not in missing.text

    @pytest.mark.parametrize("what", ["reload", "unload"])
    def test_name_models_where_models_are_loaded(self, ask, what):
        assert ask("admin", f"/admin/models/sql/{what}").status_code == 404

    @pytest.mark.threat("adapter-files")
    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_find_no_adapter_that_is_no_folder(self, ask, folder, kind):
        """Nor is anything that stands there in the way of the model."""
        stray = folder / ADAPTERS_FOLDER / "stray"
        stray.symlink_to(folder / ADAPTERS_FOLDER / "sql") if kind == "link" else stray.write_text("")
        refused, reloaded = (ask("admin", f"/admin/models/tiny/{it}") for it in ("adapters/stray/load", "reload"))
        stray.unlink()
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "adapter"
        assert reloaded.is_success

    def test_are_told_of_a_damaged_one_by_its_name(self, ask, folder):
        damaged = folder / ADAPTERS_FOLDER / "damaged"
        shutil.copytree(folder / ADAPTERS_FOLDER / "sql", damaged)
        (damaged / "factors.npy").write_bytes(b"none")
        refused = ask("admin", "/admin/models/tiny/adapters/damaged/load")
        shutil.rmtree(damaged)
        said = refused.json()["error"]["message"]
        assert refused.status_code == 500 and "adapter damaged" in said and "factors.npy" in said
        assert ask("own", "/v1/completions", prompt="a", max_tokens=1).status_code == 200
