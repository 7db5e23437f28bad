"""A tiny model that sees, from its checkpoint to tokens: those of transformers, however they are computed."""

import base64
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from doubles import towers
from doubles.images import draw, encode
from doubles.serving import serving
from PIL import Image, ImageOps

from llmc.optimize.build import build
from llmc.runtime import Model, load
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.vision.tower import Tower

GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
# Where images are cut one tile, a row of four and the whole, and all of the seventeen.
SMALL, WIDE, LARGE = draw("RGB", 32, 32), draw("RGBA", 200, 40), ImageOps.invert(draw("L", 111, 130))


def about(*images: Image.Image) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "def f(x):"}]}]


TALKS = {
    "small": about(SMALL),
    "wide": about(WIDE),
    "large": about(LARGE),
    "several": about(WIDE, SMALL, WIDE),
    "later": [*about(SMALL), {"role": "assistant", "content": [{"type": "text", "text": "return x"}]}, *about(WIDE)],
    "text": [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}],
}


# Each with how many tokens its answer about the largest image reuses at least.
FAMILIES = {"smolvlm": 64, "gemma3": 16, "lfm2_vl": 16}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, family)


@pytest.fixture(scope="module")
def bundle(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "fp32"
    return build(shared / "export", folder, precision="fp32", max_batch=4).output


@pytest.fixture(scope="module")
def expected(family: str, shared: Path) -> dict[str, list[int]]:
    """Tokens that transformers generates, prompts and pixels from its own processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    checkpoint = shared / "checkpoint"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    processor = towers.read_processor(checkpoint, family)

    def generate(messages: Sequence[Any]) -> list[int]:
        given = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        names = (
            "input_ids",
            "attention_mask",
            "pixel_values",
            "pixel_attention_mask",
            "token_type_ids",
            "spatial_shapes",
        )
        with torch.no_grad():
            found = model.generate(
                **{name: given[name] for name in names if name in given},
                max_new_tokens=GREEDY["max_tokens"],
                min_new_tokens=GREEDY["max_tokens"],
                do_sample=False,
            )
        return found[0, given["input_ids"].shape[1] :].tolist()

    return {name: generate(messages) for name, messages in TALKS.items()}


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, threads=1) as loaded:
        yield loaded


def tokens(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def test_greedy_tokens_are_those_of_transformers_alone_and_from_cached_prefixes(
    family: str, model: Model, expected: dict[str, list[int]]
):
    assert len({tuple(found) for found in expected.values()}) == len(TALKS)  # images decide what is said
    for _ in range(2):
        for name, messages in TALKS.items():
            assert tokens(model.chat(messages, **GREEDY)) == expected[name], name
    assert model.chat(TALKS["large"], **GREEDY).usage.cached_tokens > FAMILIES[family]


def test_so_they_are_side_by_side(model: Model, expected: dict[str, list[int]]):
    names = [*TALKS, *TALKS]
    handles = [model.stream_chat(TALKS[name], **GREEDY) for name in names]
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
    bundle: Path, expected: dict[str, list[int]], options: dict[str, Any]
):
    with load(bundle, threads=1, **options) as model:
        for name, messages in TALKS.items():
            assert tokens(model.chat(messages, **GREEDY)) == expected[name], name


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
    data, text = base64.b64encode(encode(WIDE)).decode(), "def f(x):"
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


def test_one_pixel_that_differs_is_seen(model: Model, expected: dict[str, list[int]]):
    """The tower's weights are large, so that a tile of another colour changes what is said."""
    pixels = np.array(SMALL)
    pixels[:, 8:] = 255 - pixels[:, 8:]
    assert tokens(model.chat(about(Image.fromarray(pixels)), **GREEDY)) != expected["small"]
