"""Vectors and scores on the command line: JSON, a line for each text; and what such a bundle says to other verbs."""

import json
from pathlib import Path

import numpy as np
import pytest
from doubles import encoders

from llmc.cli.main import main


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An embedding model and a reranker, built from their checkpoints by the command."""
    folder = tmp_path_factory.mktemp("bundles")
    makers = {"embed": encoders.write_embedder, "rank": encoders.write_reranker}
    for name, write in makers.items():
        with pytest.raises(SystemExit, match="0"):
            main(["build", str(write(folder / f"{name}-checkpoint")), "-o", str(folder / name), "--fp32"])
    return {name: folder / name for name in makers}


def test_texts_become_lines_of_vectors(llmc, bundles):
    given = llmc("embed", bundles["embed"], "a b", "c", "--dimensions", 8, "--instruction", "query")
    piped = llmc("embed", bundles["embed"], "--dimensions", 8, "--instruction", "query", stdin=b"a b\nc\n")
    assert (given.code, given.out) == (0, piped.out)
    vectors = np.array([json.loads(line) for line in given.out.splitlines()])
    assert vectors.shape == (2, 8) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_documents_come_back_the_best_first(llmc, bundles):
    ran = llmc("rank", bundles["rank"], "a b", "one", "two", "three")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert {line["document"] for line in found} == {"one", "two", "three"}
    assert [line["score"] for line in found] == sorted((line["score"] for line in found), reverse=True)


def test_other_verbs_know_such_a_bundle(llmc, bundles):
    assert "an embedding of 64 values, of length one, from the last token" in llmc("inspect", bundles["embed"]).out
    assert "a score, made at the last token" in llmc("inspect", bundles["rank"]).out
    assert "golden texts" in llmc("verify", bundles["rank"]).out
    assert llmc("plan", bundles["embed"]).code == 0
    for verb in (("run", "-p", "x"), ("chat",), ("bench", "--prompt-length", 8, "--new-tokens", 4), ("eval",)):
        ran = llmc(verb[0], bundles["embed"], *verb[1:])
        assert ran.code == 2 and "embeds texts (llmc embed, Model.embed) and generates no text" in ran.err
