"""Tiny models that see, from checkpoints to tokens: those of transformers, however they are computed."""

import base64
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from doubles import filled, towers
from doubles.images import draw, encode
from doubles.serving import serving
from PIL import Image, ImageOps

from llmc.bundle import read_bundle
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest, Request
from llmc.runtime import Model, load
from llmc.runtime.loading import verify
from llmc.runtime.selftest.images import make_image
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.vision.tower import Tower

# Least cosine of rows in 8 bits: 0.9992 to 0.9998 here, of random weights. With rows and columns of patches exchanged
# it is 0.90 to 0.97.
LEAST_COSINE = 0.998
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
# Where images are cut one tile, a row of four and the whole, and all of the seventeen.
TILED = draw("RGB", 32, 32), draw("RGBA", 200, 40), ImageOps.invert(draw("L", 111, 130))
# Qwen's squares of 8 pixels: 2 x 2, 3 x 9 with windows that are not full, and 8 x 7 after it was made smaller.
SQUARES = draw("RGB", 16, 16), draw("RGBA", 75, 26), draw("L", 111, 130)
# Each with how many tokens its answer about the largest image reuses at least.
OF_SQUARES = (*towers.QWEN, "lfm3_vl")
FAMILIES = {"smolvlm": 65, "gemma3": 17, "lfm2_vl": 17, "mistral3": 5, **dict.fromkeys(OF_SQUARES, 32)}
FAMILIES |= dict.fromkeys(filled.CONFIGS, 55)

one_family = pytest.mark.parametrize("family", ["smolvlm"], indirect=True)
with_axes = pytest.mark.parametrize("family", towers.QWEN, indirect=True)


def about(*images: Image.Image) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "def f(x):"}]}]


class Reference:
    """A checkpoint in transformers, with prompts and pixels from its own processor."""

    def __init__(self, folder: Path, family: str) -> None:
        self.model = towers.open_reference(folder)
        self.processor = towers.read_processor(folder, family)

    def generate(self, messages: Sequence[Any], **more: Any) -> list[list[int]]:
        import torch

        given, count = towers.prepare(self.processor, messages), GREEDY["max_tokens"]
        with torch.no_grad():
            found = self.model.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False, **more)
        return found[:, given["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def talks(family: str) -> dict[str, Any]:
    small, wide, large = SQUARES if family in OF_SQUARES else TILED
    answer = {"role": "assistant", "content": [{"type": "text", "text": "return x"}]}
    return {
        "small": about(small),
        "wide": about(wide),
        "large": about(large),
        "several": about(wide, small, wide),
        "later": [*about(small), answer, *about(wide)],
        "text": about(),
    }


@pytest.fixture(scope="module")
def shared(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, family)


@pytest.fixture(scope="module")
def bundle(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "fp32"
    return build(BuildRequest(shared / "export", folder, precision="fp32", max_batch=4)).output


@pytest.fixture(scope="module")
def reference(family: str, shared: Path) -> Reference:
    return Reference(shared / "checkpoint", family)


@pytest.fixture(scope="module")
def expected(reference: Reference, talks: dict[str, Any]) -> dict[str, list[int]]:
    return {name: reference.generate(messages)[0] for name, messages in talks.items()}


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, threads=1) as loaded:
        yield loaded


def tokens(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def test_greedy_tokens_are_those_of_transformers_alone_and_from_cached_prefixes(
    family: str, model: Model, talks: dict[str, Any], expected: dict[str, list[int]]
):
    assert len({tuple(found) for found in expected.values()}) == len(talks)  # images decide what is said
    for _ in range(2):
        for name, messages in talks.items():
            assert tokens(model.chat(messages, **GREEDY)) == expected[name], name
    assert model.chat(talks["large"], **GREEDY).usage.cached_tokens >= FAMILIES[family]


def test_so_they_are_side_by_side(model: Model, talks: dict[str, Any], expected: dict[str, list[int]]):
    names = [*talks, *talks]
    handles = [model.stream_chat(talks[name], **GREEDY) for name in names]
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
def test_so_they_are_in_chunks_of_any_size_and_at_every_level(
    bundle: Path, talks: dict[str, Any], expected: dict[str, list[int]], options: dict[str, Any]
):
    least = {"prefill_chunk": read_bundle(bundle).geometry.least_chunk} if "prefill_chunk" in options else {}
    with load(bundle, threads=1, **{name: max(it, least.get(name, it)) for name, it in options.items()}) as model:
        for name, messages in talks.items():
            assert tokens(model.chat(messages, **GREEDY)) == expected[name], name


@one_family
def test_a_service_says_the_same_in_every_dialect_and_answers_others_meanwhile(
    bundle: Path, expected: dict[str, list[int]], model: Model, monkeypatch: pytest.MonkeyPatch
):
    may_go_on, taken = threading.Event(), threading.Event()
    real = Tower.compute_rows

    def compute_late(*given: Any) -> Any:
        taken.set()
        assert may_go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(Tower, "compute_rows", compute_late)
    said = model.tokenizer.decode(expected["wide"])
    data, text = base64.b64encode(encode(TILED[1])).decode(), "def f(x):"
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    common = {"temperature": 0, "ignore_eos": True}
    bodies = {
        "/v1/chat/completions": {
            "max_tokens": 10,
            "messages": [{"role": "user", "content": [image, {"type": "text", "text": text}]}],
        },
        "/v1/responses": {
            "max_output_tokens": 10,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": image["image_url"]["url"]},
                        {"type": "input_text", "text": text},
                    ],
                }
            ],
        },
        "/v1/messages": {
            "max_tokens": 10,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                        {"type": "text", "text": text},
                    ],
                }
            ],
        },
    }
    options = {"num_predict": 10, "temperature": 0}  # nothing ends it sooner: 2, the end, is not among its tokens
    bodies["/api/generate"] = {"prompt": text, "images": [data], "stream": False, "options": options}
    answers: dict[str, Any] = {}
    with (
        serving(ServerConfig(models={"seeing": bundle}, threads=1)) as url,
        httpx.Client(base_url=url, timeout=120, headers={"anthropic-version": "2023-06-01"}) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        assert "vision" in client.post("/api/show", json={"model": "seeing"}).json()["capabilities"]
        assert client.get("/v1/models/seeing").json()["x_llmc"]["sees"]
        asked = {
            path: pool.submit(
                client.post, path, json={**({} if path == "/api/generate" else common), "model": "seeing", **body}
            )
            for path, body in bodies.items()
        }
        assert taken.wait(60)
        assert client.get("/health", timeout=10).status_code == 200
        may_go_on.set()
        answers = {path: future.result().json() for path, future in asked.items()}
    assert answers["/v1/chat/completions"]["choices"][0]["message"]["content"] == said
    assert answers["/v1/responses"]["output"][0]["content"][0]["text"] == said
    assert answers["/v1/messages"]["content"][0]["text"] == said
    assert answers["/api/generate"]["response"] == said


@one_family
def test_one_pixel_that_differs_is_seen(model: Model, expected: dict[str, list[int]]):
    """The tower's weights are large, so that a tile of another colour changes what is said."""
    pixels = np.array(TILED[0])
    pixels[:, 8:] = 255 - pixels[:, 8:]
    assert tokens(model.chat(about(Image.fromarray(pixels)), **GREEDY)) != expected["small"]


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_a_service_says_the_same_of_images_in_any_turn_and_in_results_of_tools(
    bundle: Path, model: Model, talks: dict[str, Any], expected: dict[str, list[int]]
):
    def spell(part: Any) -> Any:
        if part["type"] == "text":
            return part
        url = f"data:image/png;base64,{base64.b64encode(encode(part['image'])).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encode(SQUARES[1])).decode()}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    talk = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "look"}]
    with (
        serving(ServerConfig(models={"seeing": bundle}, threads=1)) as url,
        httpx.Client(base_url=url, timeout=120, headers={"anthropic-version": "2023-06-01"}) as client,
    ):
        for name, messages in talks.items():
            spelled = [{**message, "content": [spell(part) for part in message["content"]]} for message in messages]
            answer = client.post("/v1/chat/completions", json={"model": "seeing", "messages": spelled, **GREEDY}).json()
            assert answer["choices"][0]["message"]["content"] == model.tokenizer.decode(expected[name]), name
        body = {"model": "seeing", "messages": [*talk, {"role": "user", "content": [result]}], **GREEDY}
        answer = client.post("/v1/messages", json=body).json()
    told = [*talk, {"role": "tool", "content": about(SQUARES[1])[0]["content"][:1]}]
    assert answer["content"][0]["text"] == model.chat(told, **GREEDY).text


@with_axes
def test_beams_are_those_of_transformers(model: Model, talks: dict[str, Any], reference: Reference):
    """Branches of a search go on from the positions behind the images."""
    beams = {"num_beams": 3, "num_return_sequences": 3}
    for name in ("wide", "later"):
        found = model.chat(talks[name], max_tokens=10, ignore_eos=True, **beams)
        assert [list(output.token_ids) for output in found.outputs] == reference.generate(talks[name], **beams), name


def exchange_positions(model: Model) -> float:
    """The least cosine of rows whose patches are turned by their columns as rows, and those that are not."""
    assert model.manifest.geometry.vision is not None
    image = make_image(model.manifest.geometry.vision)
    rows, turned = model.tower.run(**image), model.tower.run(**{**image, "positions": image["positions"][:, ::-1]})
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(turned, axis=1)
    return float(((rows * turned).sum(1) / lengths).min())


@with_axes
def test_in_8_bits_the_tower_is_judged_and_the_bundle_verified(shared: Path, tmp_path: Path):
    """Both graphs rotate the residual stream here, and what is added to it behind layers."""
    report = build(BuildRequest(shared / "export", tmp_path / "int8", recipe=Request(phases="split"), max_batch=4))
    assert report.manifest.recipe.rotated
    assert report.manifest.similarity is not None and report.manifest.similarity.texts >= 12
    assert LEAST_COSINE < report.manifest.similarity.smallest < 1 - 1e-6
    assert verify(report.output).prompts == 4
    with load(report.output, threads=1, prefix_cache_bytes=0) as model:
        assert exchange_positions(model) < LEAST_COSINE
        assert model.runner.session.packs_rows
        texts = [[{"role": "user", "content": text}] for text in ("a", "def f(x):", "x = 1 + 2 #")]
        alone = [tokens(model.chat(text, **GREEDY)) for text in texts]
        together = [model.stream_chat(text, **GREEDY) for text in texts]
        assert [tokens(handle.result()) for handle in together] == alone


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("family", filled.CONFIGS, indirect=True)
def test_towers_that_place_patches_by_row_and_column_are_rounded_to_8_bits(
    shared: Path, talks: dict[str, Any], tmp_path: Path, precision: str
):
    report = build(BuildRequest(shared / "export", tmp_path / precision, precision=precision, max_batch=4))
    assert report.manifest.similarity is not None and report.manifest.similarity.texts >= 12
    assert LEAST_COSINE < report.manifest.similarity.smallest < 1 - 1e-6
    assert verify(report.output).prompts == 4
    with load(report.output, threads=1) as model:
        assert exchange_positions(model) < LEAST_COSINE
        alone = {name: tokens(model.chat(messages, **GREEDY)) for name, messages in talks.items()}
        together = {name: model.stream_chat(messages, **GREEDY) for name, messages in talks.items()}
        assert {name: tokens(handle.result()) for name, handle in together.items()} == alone


@with_axes
def test_a_rotated_stream_computes_the_same_with_images(
    shared: Path, talks: Any, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    """In floats, so that nothing but the basis is another."""
    from llmc.bundle import Recipe

    monkeypatch.setattr(Recipe, "rotates", lambda recipe, phase: True)
    folder = build(BuildRequest(shared / "export", tmp_path / "rotated", precision="fp32", max_batch=4)).output
    monkeypatch.undo()
    with load(folder, threads=1) as rotated:
        for name, messages in talks.items():
            assert tokens(rotated.chat(messages, **GREEDY)) == expected[name], name
