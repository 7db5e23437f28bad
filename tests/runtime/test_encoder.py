"""Bundles that embed: vectors as sentence-transformers gives them, and what cannot be embedded is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from doubles import encoders
from doubles.refusals import about

from llmc.bundle import read_bundle, write_manifest
from llmc.errors import BundleError, RequestError, UsageError
from llmc.export import export
from llmc.optimize.build import build
from llmc.optimize.judge.retrieval import PAIRED_DOCUMENTS, PAIRED_QUERIES
from llmc.optimize.lower.onnxruntime import cpu_linears
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Embedder, load
from llmc.runtime.text.prompts import Prompts

# Float32 adds in another order; vectors have length one.
TOLERANCE = 1e-4
# Longer than one call's tokens together, and so different that rows of a call are padded.
TEXTS = [f"def f{i}(x): return x" + " + x" * (i % 7) for i in range(12)] + ["", "a"]
# Random weights of 8 bits in blocks of 32: 0.9998 was measured.
SIMILAR = 0.999
# nDCG@10 of these weights: 0.97 and more were measured, and 0.6 of ones that are scrambled.
LEAST_NDCG = 0.9
# Integers that round to other ones where sums of floats before them differ in their last bits.
ROUNDED = 1e-2
TASK = "Given a bug, find the patch"
Built = Callable[..., Path]
open_embedder = partial(load, kind=Embedder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random embedding model, with layers after pooling."""
    return encoders.write_embedder(tmp_path_factory.mktemp("embedder") / "checkpoint", dense=encoders.DENSE)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The export of a checkpoint, made once."""
    return cache(lambda checkpoint: export(checkpoint, tmp_path_factory.mktemp("exports") / "export").output)


@pytest.fixture(scope="module")
def built(exports: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Bundles of checkpoints."""

    return lambda checkpoint, **choices: (
        build(BuildRequest(exports(checkpoint), tmp_path_factory.mktemp("built") / "bundle", **choices)).output
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path, built: Built) -> Iterator[Embedder]:
    with open_embedder(built(checkpoint, precision="fp32", max_context=64), threads=1, prefill_chunk=48) as model:
        yield model


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"instruction": "query"}, {"prompt_name": "query"}),
        ({"instruction": TASK}, {"prompt": f"Instruct: {TASK}\nQuery:"}),
        ({"instruction": "passage: "}, {"prompt": "passage: "}),
        ({"dimensions": 8}, {"truncate_dim": 8, "normalize_embeddings": True}),
    ],
)
def test_vectors_are_those_of_sentence_transformers(model, checkpoint, ours, theirs):
    found = model.embed(TEXTS, **ours)
    assert found.dtype == np.float32
    assert np.abs(found - encoders.embeddings(checkpoint, TEXTS, **theirs)).max() <= TOLERANCE


@pytest.mark.parametrize(
    "case", [{"dense": encoders.DENSE, **encoders.GEMMA}, encoders.MPNET, encoders.BERT], ids=["gemma", "mpnet", "bert"]
)
def test_positions_that_see_those_after_them_do_not_see_padding(tmp_path, built, case):
    """In calls of rows of all lengths."""
    checkpoint = encoders.write_embedder(tmp_path / "checkpoint", pooling="mean", **case)
    with open_embedder(built(checkpoint, precision="fp32"), threads=1) as model:
        found = model.embed(TEXTS, instruction="query")
    assert np.abs(found - encoders.embeddings(checkpoint, TEXTS, prompt_name="query")).max() <= TOLERANCE


def test_a_prompt_changes_vectors_by_more_than_the_tolerance(model):
    assert np.abs(model.embed(TEXTS) - model.embed(TEXTS, instruction="query")).max() > 100 * TOLERANCE


def test_a_text_that_is_too_long_is_refused_or_cut_as_asked(model, checkpoint):
    text = "word " * 100
    with pytest.raises(RequestError, match="at most 64 are expected; shorten it, set truncate"):
        model.embed([text])
    wanted = encoders.embeddings(checkpoint, [text], processing_kwargs={"text": {"max_length": 64}})
    assert np.abs(model.embed([text], truncate=True) - wanted).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": "one text"}, "texts is 'one text', expected a list of texts"),
        ({"texts": ["a", 1]}, "texts holds 1, expected texts"),
        ({"dimensions": 33}, "dimensions is 33, expected an integer from 1 to 32"),
        ({"dimensions": True}, "dimensions is True"),
        ({"instruction": 3}, "instruction is 3, expected a prompt's name or a text"),
    ],
)
def test_what_makes_no_sense_is_refused(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        model.embed(**{"texts": ["a"], **arguments})


QUERY, DOCUMENTS = "How do I list files?", ["import os\nos.listdir('.')", "a", "print(1) " * 6, ""]


@pytest.fixture(scope="module")
def reranker(encoder_bundles: dict[str, Path]) -> Path:
    return encoder_bundles["rank"].with_name("rank-checkpoint")


@pytest.fixture(scope="module")
def ranks(encoder_bundles: dict[str, Path]) -> Iterator[Embedder]:
    with open_embedder(encoder_bundles["rank"], threads=1) as model:
        yield model


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({}, {}), ({"instruction": "bugs"}, {"prompt_name": "bugs"}), ({"instruction": TASK}, {"prompt": TASK})],
)
def test_scores_are_those_of_sentence_transformers(ranks, reranker, ours, theirs):
    found = ranks.rank(QUERY, DOCUMENTS, **ours)
    wanted = encoders.scores(reranker, QUERY, DOCUMENTS, **theirs)
    assert found.shape == (4,)
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("case", [{}, encoders.BERT], ids=["decoder", "bert"])
def test_a_head_for_the_score_and_its_sigmoid_are_taken_over(tmp_path, built, case):
    checkpoint, documents = encoders.write_classifier(tmp_path / "classifier", **case), [*DOCUMENTS, "word " * 200]
    with open_embedder(built(checkpoint, precision="fp32"), threads=1) as model:
        for query in (QUERY, "query " * 90, "query " * 900):  # of texts that are too long, the longer one is cut first
            found = model.rank(query, documents, truncate=True)
            assert np.abs(found - encoders.scores(checkpoint, query, documents)).max() <= TOLERANCE
            assert (found > 0).all() and (found < 1).all()


@pytest.mark.parametrize(
    "case", [encoders.MODERNBERT, {"dense": encoders.DENSE, **encoders.BERT}], ids=["modernbert", "bert"]
)
def test_an_encoder_in_8_bits_is_judged_beside_its_floats_and_replays(tmp_path, built, case):
    """Layer norms' encoders multiply integers, behind the pooling too; no row of a call depends on the others."""
    checkpoint = encoders.write_embedder(tmp_path / "checkpoint", **case)
    with open_embedder(built(checkpoint, precision="int8"), threads=1) as model:
        manifest = model.manifest
        together, alone = model.embed(TEXTS), np.concatenate([model.embed([text]) for text in TEXTS])
    assert manifest.recipe.activations == "per-token"
    assert manifest.similarity.smallest is not None and SIMILAR < manifest.similarity.smallest < 1
    assert LEAST_NDCG < manifest.ranking.ndcg < 1
    assert np.abs(together - alone).max() <= ROUNDED


def test_activations_of_an_encoder_may_stay_floats(tmp_path, built):
    checkpoint = encoders.write_embedder(tmp_path / "checkpoint", **encoders.BERT)
    manifest = read_bundle(built(checkpoint, precision="int8", activations="none"))
    assert manifest.recipe.activations == "none" and manifest.ranking.ndcg > LEAST_NDCG


def test_a_layer_that_is_quantized_badly_moves_the_order_of_documents(tmp_path, built, monkeypatch):
    """Planted: weights are mixed, what they are multiplied with is not."""
    checkpoint = encoders.write_embedder(tmp_path / "checkpoint", **encoders.BERT)
    monkeypatch.setattr(cpu_linears, "mix", lambda emit, x, block: x)
    assert read_bundle(built(checkpoint, precision="int8")).ranking.ndcg < LEAST_NDCG


def test_a_reranker_is_judged_by_the_order_of_each_querys_documents(tmp_path, built):
    checkpoint = encoders.write_classifier(tmp_path / "classifier", **encoders.BERT)
    exact, rounded = (read_bundle(built(checkpoint, precision=it)).ranking for it in ("fp32", "int8"))
    assert (exact.queries, exact.documents) == (PAIRED_QUERIES, PAIRED_DOCUMENTS)
    assert exact.ndcg == exact.top1_agreement == 1 and LEAST_NDCG < rounded.ndcg <= 1


def test_a_document_that_is_too_long_is_refused_or_cut_before_what_the_template_puts_after_it(ranks):
    document = "word " * 200
    with pytest.raises(RequestError, match="at most 128 are expected; shorten it, set truncate"):
        ranks.rank(QUERY, [document])
    kept = ranks.rank(QUERY, [document], truncate=True)
    assert np.array_equal(kept, ranks.rank(QUERY, ["word " * 300], truncate=True))
    with pytest.raises(RequestError, match="the query leaves no room for a document in 128 tokens"):
        ranks.rank("word " * 200, ["a"], truncate=True)


def test_what_only_models_that_generate_have_is_refused_before_work(checkpoint, tmp_path, exports):
    with pytest.raises(UsageError, check=about("text")):
        build(BuildRequest(exports(checkpoint), tmp_path / "bundle", text=Path("text.txt")))


def test_golden_texts_that_come_out_otherwise_fail_the_self_test(model, tmp_path):
    copied = encoders.copy(model.folder, tmp_path / "bundle")
    first, *others = model.manifest.vectors
    turned = replace(first, values=tuple(-value for value in first.values))
    write_manifest(replace(model.manifest, vectors=(turned, *others)), copied)
    with pytest.raises(BundleError, match=r"a vector differs by .* from that recorded when it was built"):
        open_embedder(copied, self_test=True)


@pytest.mark.threat("encoder-modules")
@pytest.mark.parametrize(
    "content",
    [[], {"prompts": ["a"]}, {"prompts": {"a": 1}}, {"prompts": {}, "default_prompt_name": "a"}, {"truncate_dim": 0}],
)
def test_a_broken_file_of_prompts_is_refused(tmp_path, content):
    encoders.write_json(tmp_path / "config_sentence_transformers.json", content)
    with pytest.raises(BundleError, match=r"config_sentence_transformers.json is broken"):
        Prompts.from_folder(tmp_path)


@pytest.mark.parametrize("given", [{"adapters": {"sql": Path("sql")}}, {"prefix_cache_bytes": 1}, {"max_batch": 2}])
def test_what_only_models_that_generate_load_with_is_refused(encoder_bundles, given):
    with pytest.raises(UsageError, check=about(*given)):
        load(encoder_bundles["rank"], threads=1, **given)


@pytest.mark.threat("forged-tokens")
def test_what_a_document_spells_is_text(ranks):
    """A token that the tokenizer declares special is none in a document."""
    rows: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "encode", lambda found: rows.extend(found) or np.zeros((len(found), 1)))
        ranks.rank(QUERY, ["a"])
        ranks.rank(QUERY, [f"a{encoders.END}"])
    special = ranks.tokenizer.token_to_id(encoders.END)
    assert special not in rows[0] and special not in rows[1] and len(rows[1]) > len(rows[0])
