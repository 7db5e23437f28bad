"""Vectors through OpenAI's client and plain HTTP, and what cannot be encoded."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from doubles.serving import serving

from llmc.runtime import Embedder, load
from llmc.runtime.server.config import ServerConfig

TEXTS = ["a b", "def f(x): return x", "c"]
# The service computes the same call in the same process.
EQUAL = 1e-6


def test_vectors_are_those_of_the_model(able_openai, encoder_bundles):
    """The client asks for base64 by itself."""
    answer = able_openai.embeddings.create(model="embed", input=TEXTS, dimensions=8)
    with load(encoder_bundles["embed"], kind=Embedder, threads=1, self_test=False) as model:
        wanted = model.embed(TEXTS, dimensions=8)
        tokens = sum(len(model.tokenizer.encode(text)) for text in TEXTS)
    assert np.abs(np.array([item.embedding for item in answer.data]) - wanted).max() <= EQUAL
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens and answer.model == "embed"


def test_numbers_and_base64_say_the_same(able_openai):
    given: dict[str, Any] = {"model": "embed", "input": "a b"}
    numbers = able_openai.embeddings.create(encoding_format="float", **given).data[0].embedding
    assert able_openai.embeddings.create(**given).data[0].embedding == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({"input_type": "search_query"}, "query"),
        ({"input_type": "DOCUMENT"}, "document"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "retrieval.passage"}, "document"),
    ],
)
def test_the_kind_of_text_chooses_the_checkpoints_prompt(able_http, given, prompt):
    body = {"model": "embed", "input": "a b"}
    wanted = able_http.post("/v1/embeddings", json={**body, "instruction": prompt}).json()
    assert able_http.post("/v1/embeddings", json={**body, **given}).json()["data"] == wanted["data"]


@pytest.mark.threat("embedding-cost")
def test_requests_that_may_not_wait_are_refused(encoder_bundles):
    """More at once than compute and may wait."""
    config = ServerConfig(models={"embed": encoder_bundles["embed"]}, threads=1, max_queue=1)
    body = {"input": ["word " * 60] * 300, "truncate": True}
    with serving(config) as url, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/embeddings", json=body, timeout=60), range(12)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < 12
    assert all(answer.status_code == 429 and answer.headers["retry-after"] for answer in refused)


async def _vectors(url: str) -> list[float]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="embed", input="a b")
        return answer.data[0].embedding


@pytest.mark.parametrize(
    ("route", "given", "said"),
    [
        ("embeddings", {"model": "able", "input": "a"}, "the model 'able' generates text, expected one that embeds"),
        ("embeddings", {"model": "rank", "input": "a"}, "the model 'rank' ranks documents, expected one that embeds"),
        ("rerank", {"model": "embed", "query": "a", "documents": ["b"]}, "expected one that ranks documents"),
        ("chat/completions", {"model": "embed", "messages": [{"role": "user", "content": "a"}]}, "generates text"),
        ("completions", {"model": "rank", "prompt": "a"}, "generates text"),
        ("embeddings", {"model": "embed", "input": []}, "input holds 0 texts"),
        ("embeddings", {"model": "embed", "input": ["a", ""], "dimensions": 65}, "dimensions is 65"),
        ("embeddings", {"model": "embed", "input": "word " * 1000}, "expected; shorten it, set truncate"),
        ("embeddings", {"model": "embed", "input": [5000]}, "holds the token 5000"),
        ("embeddings", {"model": "embed", "input": [1], "instruction": "query"}, "input holds tokens"),
        ("rerank", {"model": "rank", "query": "a", "documents": []}, "documents is empty, expected 1 or more items"),
        ("embeddings", {"model": "embed", "input": [1], "input_type": "query"}, "input holds tokens"),
        ("embeddings", {"model": "embed", "input": "a", "task": "separation"}, "expected one of query, document"),
        ("embeddings", {"model": "embed", "input": "a", "task": "query", "instruction": "b"}, "leave one out"),
        ("rerank", {"model": "rank", "query": "a", "documents": ["b"], "max_chunks_per_doc": 8}, "max_chunks_per_doc"),
        ("rerank", {"model": "rank", "query": "a", "documents": ["b", {"title": "c"}]}, "documents[1].text is missing"),
        ("rerank", {"model": "rank", "query": "a", "documents": [{"text": 1}]}, "documents[0].text is no text"),
    ],
)
def test_what_cannot_be_encoded_is_refused(able_http, route, given, said):
    answer = able_http.post(f"/v1/{route}", json=given)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_errors_are_those_of_the_client(able_openai):
    with pytest.raises(openai.NotFoundError, match="'none' is not here"):
        able_openai.embeddings.create(model="none", input="a")
    with pytest.raises(openai.BadRequestError, match="embeds texts"):
        able_openai.chat.completions.create(model="embed", messages=[{"role": "user", "content": "a"}])
