"""Rows of images in prompts: chunks, batches, forks and cached prefixes change no token, and other images do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.errors import UsageError
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Batch
from llmc.runtime.vision.rows import ImageRows, make_names

PLACEHOLDER = 5
TEXT = list(range(100, 120))
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
CAT, DOG = 1000, 2000  # what the sessions below take the first row of each image for


@pytest.fixture
def make_seeing(make_engine: Callable[..., Engine], remembering: Any) -> Callable[..., Engine]:
    """Makes engines on a session whose cache holds the first value of a row where a token is an image's."""

    class Seeing(remembering):  # type: ignore[misc]
        packs_rows = True

        def run(self, batch: Batch) -> np.ndarray:
            if "embeddings" in batch.feeds:
                indices = batch.feeds["embedding_indices"]
                seen = np.append(batch.feeds["embeddings"][:, 0].astype(np.int64), 0)[indices]
                batch = batch.feed(input_ids=np.where(indices < 0, batch.input_ids, seen))
            found: np.ndarray = super().run(batch)
            return found

    return lambda **options: make_engine(Seeing(), **options)


def see(images: Sequence[int], rows: int = 9, text: Sequence[int] = TEXT) -> tuple[list[int], ImageRows]:
    """A prompt of an image after each five tokens of a text, and the images' rows."""
    prompt: list[int] = []
    positions: list[int] = []
    for number, _ in enumerate(images):
        prompt += text[5 * number : 5 * number + 5]
        positions += range(len(prompt), len(prompt) + rows)
        prompt += [PLACEHOLDER] * rows
    values = np.concatenate([np.arange(image, image + rows) for image in images])
    names = np.concatenate([make_names(str(image).encode(), rows) for image in images])
    found = ImageRows(np.array(positions), names, np.stack([values, values], axis=1).astype(np.float32))
    return prompt + list(text[5 * len(images) :]), found


def seen_tokens(prompt: Sequence[int], images: ImageRows) -> list[int]:
    tokens = np.array(prompt)
    tokens[images.positions] = images.rows[:, 0]
    return list(map(int, tokens))


def ask(engine: Engine, images: Sequence[int], params: SamplingParams = GREEDY, **rest: Any) -> Any:
    prompt, rows = see(images, **rest)
    return engine.submit(Request(prompt, params, images=rows))


@pytest.mark.parametrize("chunk", [2, 6, 8, 64])
def test_chunks_change_no_token(make_seeing, alone, chunk):
    engine = make_seeing(prefill_chunk=chunk)
    for images in ([CAT], [CAT, DOG], [DOG, CAT, DOG]):
        expected = alone(seen_tokens(*see(images)), GREEDY)
        assert list(ask(engine, images).result().token_ids) == expected


def test_requests_with_and_without_images_give_together_what_they_give_alone(make_seeing, alone):
    engine = make_seeing(prefill_chunk=16, prefix_bytes=1 << 20)
    asked = [[CAT], [], [DOG, CAT], [], [CAT, DOG], [CAT]]
    handles = [ask(engine, images) if images else engine.submit(Request(TEXT, GREEDY)) for images in asked]
    for images, handle in zip(asked, handles, strict=True):
        expected = alone(seen_tokens(*see(images)) if images else TEXT, GREEDY)
        assert list(handle.result().token_ids) == expected


@pytest.mark.threat("image-cache")
def test_two_images_of_one_size_share_no_prefix_and_one_image_does(make_seeing, alone):
    engine = make_seeing(prefix_bytes=1 << 20)
    ask(engine, [CAT]).result()
    other = ask(engine, [DOG]).result()
    assert other.usage.cached_tokens == 4  # the block of text before the image
    assert list(other.token_ids) == alone(seen_tokens(*see([DOG])), GREEDY)
    again = ask(engine, [CAT], text=[*TEXT[:5], *range(200, 230)]).result()
    assert again.usage.cached_tokens == 12  # the whole blocks of the same text and image
    assert list(again.token_ids) == alone(seen_tokens(*see([CAT], text=[*TEXT[:5], *range(200, 230)])), GREEDY)


def test_placeholders_without_images_share_no_prefix_with_images(make_seeing):
    engine = make_seeing(prefix_bytes=1 << 20)
    ask(engine, [CAT]).result()
    prompt, _ = see([CAT])
    assert engine.submit(Request(prompt, GREEDY)).result().usage.cached_tokens == 4


@pytest.mark.parametrize("params", [replace(GREEDY, n=3, temperature=1.0, seed=5), replace(GREEDY, num_beams=3)])
def test_forks_of_a_prompt_see_its_images(make_seeing, params):
    texts = [ask(make_seeing(), [image], params).result() for image in (CAT, CAT, DOG)]
    tokens = [[output.token_ids for output in result.outputs] for result in texts]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("overflow", ["truncate_left", "sink"])
def test_parts_of_images_cannot_be_left_out(make_seeing, overflow):
    with pytest.raises(UsageError, match=r"on_overflow is .*, but no part of an image can be left out"):
        ask(make_seeing(), [CAT], replace(GREEDY, on_overflow=overflow))


@pytest.mark.parametrize("chunk", [12, 14, 64])
def test_images_that_are_seen_both_ways_are_fed_whole(make_seeing, alone, chunk):
    """Calls have an even number of tokens all the same, but for the last."""
    engine = make_seeing(prefill_chunk=chunk)
    for images in ([CAT], [CAT, DOG], [DOG, CAT, DOG]):
        prompt, rows = see(images)
        found = engine.submit(Request(prompt, GREEDY, images=replace(rows, whole=True))).result()
        assert list(found.token_ids) == alone(seen_tokens(prompt, rows), GREEDY)
    seen = 0
    for start in range(len(prompt) - 1):
        for size in (12, 14, 20):
            end = rows.fit_end(start, min(start + size, len(prompt)), len(prompt))
            assert end == rows.fit_end(start, end, len(prompt)) == min(start + size, len(prompt))
            whole = replace(rows, whole=True)
            end = whole.fit_end(start, min(start + size, len(prompt)), len(prompt))
            seen += end < start + size
            assert start < end <= start + size and (end == len(prompt) or (end - start) % 2 == 0)
            assert end == len(prompt) or not {end - 1, end} <= {*rows.positions.tolist()}
    assert seen


def test_logits_of_a_prompt_whose_images_are_fed_whole_are_refused(make_seeing):
    prompt, rows = see([CAT])
    with pytest.raises(UsageError, match="prompt_logprobs are asked for of a prompt whose images are fed whole"):
        make_seeing().submit(Request(prompt, replace(GREEDY, prompt_logprobs=0), images=replace(rows, whole=True)))


def test_names_are_no_tokens_and_differ_between_images():
    cat, dog = make_names(b"cat", 500), make_names(b"dog", 500)
    assert max(cat.max(), dog.max()) < 0
    assert len({*cat.tolist(), *dog.tolist()}) == 1000
    assert np.array_equal(cat[:20], make_names(b"cat", 20))
