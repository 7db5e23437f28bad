"""Rankings and vectors as Cohere's and Jina's clients ask for them."""

import base64

import numpy as np
import pytest

from llmc.runtime import Embedder, load
from llmc.runtime.server.dialects.embeddings import EmbeddingRequest
from llmc.runtime.server.http.call import Call

TEXTS = ["one", "two", "three"]
TITLED = [{"title": title, "text": text} for title, text in zip("abc", TEXTS, strict=True)]
QUERY = {"model": "rank", "query": "a b"}


@pytest.fixture(scope="module")
def ranker(encoder_bundles):
    with load(encoder_bundles["rank"], kind=Embedder, threads=1, self_test=False) as model:
        yield model


def _rank(able_http, path: str = "/v1/rerank", **given):
    answer = able_http.post(path, json={**QUERY, **given})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_the_models_scores(able_http, ranker, path):
    """The requests of Cohere's clients (5 and 7), of Jina's example, and of servers that have /rerank alone."""
    answer, scores = _rank(able_http, path, documents=TEXTS, top_n=2), ranker.rank("a b", TEXTS)
    order = np.argsort(-scores)[:2].tolist()
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(scores[order].tolist())
    documents = [result.get("document") for result in answer["results"]]
    assert documents == ([None] * 2 if path == "/v2/rerank" else [{"text": TEXTS[index]} for index in order])
    tokens = answer["usage"]["total_tokens"]
    assert tokens > 0 and answer["id"] and answer["model"] == "rank"
    assert answer["meta"] == {
        "api_version": {"version": path[2] if path[1] == "v" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": tokens},
    }


def test_objects_are_ranked_by_the_members_asked_for(able_http, ranker):
    for fields, texts in (
        (None, TEXTS),
        (["title"], ["a", "b", "c"]),
        (["title", "text"], ["title: a\ntext: one", "title: b\ntext: two", "title: c\ntext: three"]),
    ):
        answer = _rank(able_http, documents=TITLED, rank_fields=fields, return_documents=True)
        scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
        assert [scores[index] for index in range(3)] == pytest.approx(ranker.rank("a b", texts).tolist())
        assert all(result["document"] == TITLED[result["index"]] for result in answer["results"])


def test_documents_are_cut_to_the_tokens_asked_for(able_http):
    kept, cut = "one two three four", "one two three four, and much more that is left out"
    most = able_http.post("/v1/embeddings", json={"model": "embed", "input": kept}).json()["usage"]["total_tokens"] - 1
    whole, shortened = (
        _rank(able_http, documents=[text], max_tokens_per_doc=most, return_documents=False) for text in (kept, cut)
    )
    assert shortened["usage"] == whole["usage"] and shortened["results"] == whole["results"]
    assert _rank(able_http, documents=[cut])["usage"] != whole["usage"]


def test_vectors_come_in_the_forms_of_cohere(able_http):
    body = {"model": "embed", "texts": ["a b", "c"], "input_type": "search_query", "output_dimension": 8}
    answer = able_http.post("/v2/embed", json={**body, "embedding_types": ["float", "base64"]}).json()
    given = {"model": "embed", "input": body["texts"], "instruction": "query", "dimensions": 8}
    wanted = [each["embedding"] for each in able_http.post("/v1/embeddings", json=given).json()["data"]]
    found = answer["embeddings"]
    assert found["float"] == wanted and answer["texts"] == body["texts"]
    decoded = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found["base64"]]
    assert decoded == wanted
    refused = able_http.post("/v2/embed", json={**body, "output_dimension": 65})
    assert refused.status_code == 400 and "output_dimension is 65" in refused.json()["error"]["message"]


def test_the_kind_of_text_is_ignored_without_prompts():
    call = Call()
    asked = EmbeddingRequest.model_validate({"input": "a", "input_type": "query"}, context=call)
    assert asked.prompt(()) is None and list(call.ignored) == ["input_type"]
