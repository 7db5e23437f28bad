"""Tiny models of Qwen's that see, from checkpoints to tokens: those of transformers, however they are computed."""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from doubles import qwen_towers
from doubles.images import draw, encode
from doubles.serving import serving
from PIL import Image

from llmc.optimize.build import build
from llmc.runtime import Model, load
from llmc.runtime.model import verify
from llmc.runtime.selftest import make_image
from llmc.runtime.server.config import ServerConfig

# Least cosine of rows in 8 bits: 0.9992 to 0.9998 here, of random weights. With rows and columns of patches exchanged
# it is 0.90 to 0.97.
LEAST_COSINE = 0.998
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
# Squares of 8 pixels: 2 x 2, 3 x 9 with windows that are not full, and 8 x 7 after it was made smaller.
SMALL, WIDE, LARGE = draw("RGB", 16, 16), draw("RGBA", 75, 26), draw("L", 111, 130)


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


def images_of(messages: Sequence[Any]) -> list[Image.Image]:
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def make_inputs(self, messages: Sequence[Any]) -> dict[str, Any]:
        """As transformers' Qwen2_5_VLProcessor makes them, which needs torchvision for videos."""
        import torch

        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given: dict[str, Any] = {}
        if images := images_of(messages):
            given = dict(self.processor(images, return_tensors="pt"))
            counts = iter((given["image_grid_thw"].prod(1) // 4).tolist())
            text = "".join(
                part + "<|image_pad|>" * next(counts) if number < len(images) else part
                for number, part in enumerate(text.split("<|image_pad|>"))
            )
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        kinds = (ids == qwen_towers.IMAGE).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **given}

    def generate(self, messages: Sequence[Any]) -> list[int]:
        import torch

        count, given = GREEDY["max_tokens"], self.make_inputs(messages)
        with torch.no_grad():
            found = self.model.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return found[0, given["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=qwen_towers.CONFIGS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_towers.share_qwen(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def reference(shared: Path) -> Reference:
    return Reference(shared / "checkpoint")


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, list[int]]:
    return {name: reference.generate(messages) for name, messages in TALKS.items()}


@pytest.fixture(scope="module")
def bundle(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "fp32"
    return build(shared / "export", folder, precision="fp32", max_batch=4).output


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, threads=1) as loaded:
        yield loaded


def tokens(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def test_greedy_tokens_are_those_of_transformers_alone_and_from_cached_prefixes(
    model: Model, expected: dict[str, list[int]]
):
    assert len({tuple(found) for found in expected.values()}) == len(TALKS)  # images decide what is said
    for _ in range(2):
        for name, messages in TALKS.items():
            assert tokens(model.chat(messages, **GREEDY)) == expected[name], name
    assert model.chat(TALKS["large"], **GREEDY).usage.cached_tokens >= 32


def test_so_they_are_side_by_side(model: Model, expected: dict[str, list[int]]):
    names = [*TALKS, *TALKS]
    handles = [model.stream_chat(TALKS[name], **GREEDY) for name in names]
    for name, handle in zip(names, handles, strict=True):
        assert tokens(handle.result()) == expected[name], name


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 6, "prefix_cache_bytes": 0},
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


def test_a_service_says_the_same_of_images_in_any_turn_and_in_results_of_tools(
    bundle: Path, model: Model, expected: dict[str, list[int]]
):
    def spell(part: Any) -> Any:
        if part["type"] == "text":
            return part
        url = f"data:image/png;base64,{base64.b64encode(encode(part['image'])).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encode(WIDE)).decode()}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    talk = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "look"}]
    with (
        serving(ServerConfig(models={"seeing": bundle}, threads=1)) as url,
        httpx.Client(base_url=url, timeout=120, headers={"anthropic-version": "2023-06-01"}) as client,
    ):
        for name, messages in TALKS.items():
            spelled = [{**message, "content": [spell(part) for part in message["content"]]} for message in messages]
            answer = client.post("/v1/chat/completions", json={"model": "seeing", "messages": spelled, **GREEDY}).json()
            assert answer["choices"][0]["message"]["content"] == model.tokenizer.decode(expected[name]), name
        body = {"model": "seeing", "messages": [*talk, {"role": "user", "content": [result]}], **GREEDY}
        answer = client.post("/v1/messages", json=body).json()
    told = [*talk, {"role": "tool", "content": about(WIDE)[0]["content"][:1]}]
    assert answer["content"][0]["text"] == model.chat(told, **GREEDY).text


def test_beams_are_those_of_transformers(model: Model, reference: Reference):
    """Branches of a search go on from the positions behind the images."""
    import torch

    for name in ("wide", "later"):
        given = reference.make_inputs(TALKS[name])
        length, beams = given["input_ids"].shape[1], {"num_beams": 3, "num_return_sequences": 3}
        with torch.no_grad():
            wanted = reference.model.generate(**given, **beams, max_new_tokens=10, min_new_tokens=10, do_sample=False)
        found = model.chat(TALKS[name], max_tokens=10, ignore_eos=True, **beams)
        assert [list(output.token_ids) for output in found.outputs] == wanted[:, length:].tolist(), name


def exchange_positions(model: Model) -> float:
    """The least cosine of rows whose patches are turned by their columns as rows, and those that are not."""
    assert model.manifest.geometry.vision is not None
    image = make_image(model.manifest.geometry.vision)
    rows, turned = model.tower.run(**image), model.tower.run(**{**image, "positions": image["positions"][:, ::-1]})
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(turned, axis=1)
    return float(((rows * turned).sum(1) / lengths).min())


def test_in_8_bits_the_tower_is_judged_and_the_bundle_verified(shared: Path, tmp_path: Path):
    """Both graphs rotate the residual stream here, and what is added to it behind layers."""
    report = build(shared / "export", tmp_path / "int8", precision="int8", max_batch=4)
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


def test_a_rotated_stream_computes_the_same_with_images(
    shared: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    """In floats, so that nothing but the basis is another."""
    from llmc.bundle import Recipe

    monkeypatch.setattr(Recipe, "rotates", lambda recipe, phase: True)
    folder = build(shared / "export", tmp_path / "rotated", precision="fp32", max_batch=4).output
    monkeypatch.undo()
    with load(folder, threads=1) as rotated:
        for name, messages in TALKS.items():
            assert tokens(rotated.chat(messages, **GREEDY)) == expected[name], name
