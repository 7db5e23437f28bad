"""Models that an admin's key loads, swaps and unloads, and that no other key does."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from doubles.serving import serving

from llmc.bundle import read_bundle, write_manifest
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded

ADMIN, BOB, LIMITED = "sk-admin-0123456789", "sk-bob-0123456789abc", "sk-limited-0123456789"
NOBODY = f'[bob]\nkey = "{BOB}"\n'
SOMEBODY = f"""{NOBODY}
[admin]
key = "{ADMIN}"
admin = true
[limited]
key = "{LIMITED}"
admin = true
models = ["first"]
"""
ACTIONS = ("reload", "unload", "adapters/sql/load", "adapters/sql/unload")
ROUTES = [("GET", "/admin/models"), *(("POST", f"/admin/models/first/{action}") for action in ACTIONS)]


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def service(folder: Path, keys: str, models: dict[str, Path], **given: Any) -> Any:
    file = folder / "keys.toml"
    file.write_text(keys)
    file.chmod(0o600)
    return serving(ServerConfig(models=models, threads=1, keys_file=file, **given), Guarded)


@pytest.fixture(scope="module")
def folders(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    return {name: Path(shutil.copytree(tiny_bundle, folder / name)) for name in ("first", "second")}


@pytest.fixture(scope="module")
def admin(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The client of an admin; both models are loaded at the start."""
    running = service(tmp_path_factory.mktemp("keys"), SOMEBODY, folders, warm=("second", "first"))
    with running as url, httpx.Client(base_url=url, timeout=60, headers=as_key(ADMIN)) as client:
        yield client


def states(admin: httpx.Client) -> list[tuple[str, str, int]]:
    """Id, phase and number of loads of each model; its memory changes while nothing happens."""
    return [(model["id"], model["phase"], model["loads"]) for model in admin.get("/admin/models").json()["data"]]


def phases(admin: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["phase"] for model in admin.get("/admin/models").json()["data"]}


def test_what_is_to_be_loaded_at_the_start_is(admin):
    assert phases(admin) == {"first": "ready", "second": "ready"}


def test_a_model_is_unloaded_and_comes_back_when_it_is_asked_for(admin):
    assert admin.post("/admin/models/second/unload").json()["phase"] == "unloaded"
    assert phases(admin) == {"first": "ready", "second": "unloaded"}
    body = {"model": "second", "prompt": "Once", "max_tokens": 1}
    assert admin.post("/v1/completions", json=body).status_code == 200
    assert phases(admin)["second"] == "ready"


def test_no_error_names_a_folder_of_the_server(admin, folders):
    weights = folders["second"] / "weights.bin"
    assert admin.post("/admin/models/second/unload").is_success
    aside = weights.rename(weights.with_suffix(".aside"))
    asked = {"model": "second", "prompt": "Once", "max_tokens": 1}
    answers = [admin.post("/v1/completions", json=asked), admin.post("/admin/models/second/reload")]
    answers += [admin.post("/v1/completions", json=asked), admin.get("/admin/models")]  # both tell what went wrong
    aside.rename(weights)
    assert all("weights.bin is missing" in answer.text for answer in answers)
    assert not any(str(weights.parent.parent) in answer.text for answer in answers)
    write_manifest(read_bundle(weights.parent), weights.parent)
    assert admin.post("/v1/completions", json=asked).is_success


def test_a_bundle_that_was_published_in_its_place_is_swapped_in(admin, folders):
    folder = folders["first"]
    manifest = read_bundle(folder)
    write_manifest(replace(manifest, source=replace(manifest.source, fingerprint="e" * 64)), folder)
    answer = admin.post("/admin/models/first/reload")
    assert answer.status_code == 200 and answer.json()["loads"] == 2
    assert admin.get("/v1/models/first").json()["x_llmc"]["fingerprint"] == "e" * 64


@pytest.mark.threat("admin")
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_other_keys_are_refused(admin, method, path):
    before = states(admin)
    refused = admin.request(method, path, headers=as_key(BOB))
    assert refused.status_code == 403 and "the key 'bob' is no admin's" in refused.json()["error"]["message"]
    assert admin.request(method, path, headers=as_key("sk-nobody-0123456789")).status_code == 401
    assert states(admin) == before


def test_another_method_is_told_of_to_admins_alone(admin):
    path = "/admin/models/first/reload"
    answers = [admin.get(path, headers=as_key(key)) for key in (ADMIN, BOB, "sk-nobody-0123456789")]
    assert [answer.status_code for answer in answers] == [405, 403, 401]


@pytest.mark.threat("admin")
def test_an_admin_of_some_models_leaves_the_others_alone(admin):
    for action in ACTIONS:
        refused = admin.post(f"/admin/models/second/{action}", headers=as_key(LIMITED))
        assert refused.status_code == 403 and phases(admin)["second"] == "ready"
    assert admin.post("/admin/models/none/unload").status_code == 404


@pytest.mark.threat("admin")
@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", ROUTES[1][1]), ("DELETE", ROUTES[0][1])])
def test_where_no_key_is_an_admins_there_are_no_such_routes(nobodys, address, method, path):
    answers = [nobodys.request(method, path), httpx.request(method, f"{address}{path}")]
    there_is_none = nobodys.request(method, "/admin/nothing")
    for answer in answers:
        assert answer.status_code == there_is_none.status_code == 404
        assert answer.json()["error"]["message"].startswith("there is no route")


@pytest.fixture(scope="module")
def nobodys(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service whose file of keys names no admin."""
    running = service(tmp_path_factory.mktemp("nobody"), NOBODY, {"first": tiny_bundle})
    with running as url, httpx.Client(base_url=url, timeout=60, headers=as_key(BOB)) as client:
        yield client
