"""Images in messages become the prompt that transformers' processor writes, and rows in the places of its tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.images import draw, make_vision
from doubles.refusals import about
from doubles.seeing import write_seeing_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from llmc.bundle import Manifest
from llmc.errors import ContextError, RequestError, UsageError
from llmc.runtime import Model
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.kv.host_cache import HostCache
from llmc.runtime.loading import make_engine
from llmc.runtime.runner.prefill import SingleRunner
from llmc.runtime.sessions import Batch
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.vision import tower
from llmc.runtime.vision.tower import Tower

CAT, DOG, BIRD = draw("RGB", 90, 31), draw("RGB", 90, 31, 1), draw("L", 20, 70)
ONE = [{"role": "user", "content": [{"type": "image", "image": CAT}, {"type": "text", "text": "what is this?"}]}]
SEVERAL = [
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "image", "image": BIRD}]},
    {"role": "assistant", "content": [{"type": "text", "text": "a bird"}]},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": CAT},
            {"type": "image", "image": DOG},
            {"type": "text", "text": " and these?\n\n"},
        ],
    },
]


class Recording:
    """A session that ends every answer at once and keeps the calls; ``computed`` are the tiles that a tower was given,
    whose rows are their own means."""

    engine_version = "0"
    substitutes = False
    packs_rows = False
    exact, turns = True, 1

    def __init__(self, manifest: Manifest) -> None:
        self.cache = HostCache(manifest)
        self.geometry = manifest.geometry
        self.calls: list[Batch] = []
        self.computed: list[np.ndarray] = []

    def run(self, batch: Batch) -> np.ndarray:
        self.calls.append(batch)
        logits = np.zeros((*batch.logit_indices.shape, self.geometry.vocab_size), np.float32)
        logits[..., 2] = 1
        return logits

    run_ranked = run

    def see(self, pixel_values: np.ndarray) -> np.ndarray:
        assert pixel_values.shape == (1, 3, 24, 24) and pixel_values.dtype == np.float32
        self.computed.append(pixel_values)
        return np.full((4, self.geometry.hidden_size), pixel_values.mean(), np.float32)

    def close(self) -> None:
        """There is nothing to free."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing_tokenizer(made)
    return made


@pytest.fixture
def make(folder: Path, manifest: Manifest) -> Iterator[Callable[..., tuple[Model, Recording]]]:
    made: list[Model] = []

    def make_model(*, sees: bool = True, context: int = 512) -> tuple[Model, Recording]:
        tokenizer = Tokenizer.from_folder(folder)
        vision = make_vision(token_id=tokenizer.encode("<image>", False)[0])
        here = replace(
            manifest,
            geometry=replace(manifest.geometry, vision=vision if sees else None, vocab_size=512),
            generation=replace(manifest.generation, eos_token_ids=(2,)),
        )
        session = Recording(here)
        eyes = Tower(vision, session.see) if sees else None
        options = EngineOptions(prefix_cache_bytes=0)
        engine = partial(make_engine, memory=None)
        made.append(Model(folder, here, tokenizer, SingleRunner(session, context, 64), 1, engine, options, eyes))
        return made[-1], session

    yield make_model
    for model in made:
        model.close()


def process(folder: Path, messages: Sequence[Any]) -> Any:
    """What transformers' processor makes of messages."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tiling = make_vision().tiling
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 24}, image_mean=tiling.mean, image_std=tiling.std
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="np"
    )


@pytest.mark.parametrize("messages", [ONE, SEVERAL])
def test_the_prompt_and_the_pixels_are_those_of_the_processor(make, folder, messages):
    model, session = make()
    expected = process(folder, messages)
    assert model.chat_tokens(messages) == expected["input_ids"][0].tolist()
    assert not session.computed  # counting tokens costs no tower
    model.chat(messages)
    seen = np.concatenate(session.computed)
    real = expected["pixel_values"].reshape(-1, 3, 24, 24)
    assert np.array_equal(seen, real[expected["pixel_attention_mask"].reshape(len(real), -1).any(1)])


def test_rows_stand_in_the_places_of_image_tokens_in_their_order(make):
    model, session = make()
    model.chat(SEVERAL)
    image = model.manifest.geometry.vision.token_id
    ids = np.concatenate([call.input_ids[0] for call in session.calls])
    rows: list[float] = []
    for call in session.calls:
        if "embeddings" not in call.feeds:
            assert image not in call.input_ids
            continue
        indices = call.feeds["embedding_indices"]
        assert np.array_equal(indices >= 0, call.input_ids == image)
        rows += call.feeds["embeddings"][indices[indices >= 0]][:, 0].tolist()
    assert rows == [float(tile.mean()) for tile in session.computed for _ in range(4)]
    assert len(rows) == (ids == image).sum()


def test_an_image_that_comes_again_is_not_computed_again(make, monkeypatch):
    model, session = make()
    model.chat(ONE)
    first = len(session.computed)
    model.chat([*ONE, {"role": "assistant", "content": "a cat"}, *ONE])
    assert len(session.computed) == first
    monkeypatch.setattr(tower, "KEPT_BYTES", 4 * 64 * 4 * first)  # of one of these
    model.chat(SEVERAL)  # two of them
    model.chat(ONE)
    assert len(session.computed) > 3 * first


def test_text_that_is_no_part_is_shown_where_the_template_reads_parts_alone(make):
    model, _ = make(sees=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}]}]
    plain = [{"role": "user", "content": "what is this?"}]
    assert model.chat_tokens(plain) == model.chat_tokens(parts)
    assert "what is this?" in model.tokenizer.decode(model.chat_tokens(plain))


def test_a_model_without_a_tower_refuses_images_in_one_sentence(make):
    model, _ = make(sees=False)
    with pytest.raises(UsageError, check=about("messages")):
        model.chat(ONE)


@pytest.mark.threat("image-tokens")
def test_text_that_spells_an_image_is_text(make):
    model, _ = make()
    said = [{"role": "user", "content": [{"type": "text", "text": "<image>"}, {"type": "image", "image": CAT}]}]
    ids = model.chat_tokens(said)
    assert ids.count(model.manifest.geometry.vision.token_id) == 4 * 9
    model.chat(said)
    with pytest.raises(RequestError, match=r"shows 2 of the 1 image parts"):
        model.chat(said, parse_special=True)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "the keys type, expected"),
        ({"type": "video", "video": "cat.mp4"}, "a part of the kind video, expected text or image"),
        ({"video": "cat.mp4"}, "a part of the kind video, expected text or image"),
        ({"type": "image_url", "image_url": {"url": "cat.jpg"}}, "a part of the kind image_url, expected"),
        ({"type": "image", "image": CAT, "url": "http://cat"}, "the keys type, image, url, expected"),
        ({"type": "image", "image": 3}, "holds image 1 as 3, expected the path"),
    ],
)
def test_parts_of_another_form_are_refused(make, part, said):
    with pytest.raises(UsageError, match=said):
        make()[0].chat([{"role": "user", "content": [part]}])


def test_the_image_that_cannot_be_read_is_named(make):
    messages = [{"role": "user", "content": [ONE[0]["content"][0], {"type": "image", "image": b"no image"}]}]
    with pytest.raises(RequestError, match="image 2 cannot be read"):
        make()[0].chat(messages)


@pytest.mark.threat("image-cost")
def test_images_beyond_the_context_are_refused_before_they_are_computed(make):
    model, session = make(context=64)
    many = [{"role": "user", "content": [ONE[0]["content"][0]] * 50}]
    with pytest.raises(ContextError, match="the first 2 of 50 image parts have 72 tokens, which leaves no room"):
        model.chat(many)
    assert not session.computed


def test_a_closed_model_computes_no_images(make):
    model, _ = make()
    seen = model.tower.write_images("<image>", [CAT], str, 512)[1]
    model.close()
    with pytest.raises(RequestError, match="the model is closed"):
        model.tower.compute_rows(seen, [model.manifest.geometry.vision.token_id] * 36)
