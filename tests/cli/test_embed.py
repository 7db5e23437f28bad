"""Vectors and scores on the command line: JSON, a line for each text; and what such a bundle says to other verbs."""

import json

import numpy as np


def test_texts_become_lines_of_vectors(llmc, encoder_bundles):
    given = llmc("embed", encoder_bundles["embed"], "a b", "c", "--dimensions", 8, "--instruction", "query")
    piped = llmc("embed", encoder_bundles["embed"], "--dimensions", 8, "--instruction", "query", stdin=b"a b\nc\n")
    assert (given.code, given.out) == (0, piped.out)
    vectors = np.array([json.loads(line) for line in given.out.splitlines()])
    assert vectors.shape == (2, 8) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_documents_come_back_the_best_first(llmc, encoder_bundles):
    given = ["one", "two\u2028", "three\x85"]
    ran = llmc("rank", encoder_bundles["rank"], "a b", *given)
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert {line["document"] for line in found} == set(given)
    assert [line["score"] for line in found] == sorted((line["score"] for line in found), reverse=True)


def test_other_verbs_know_such_a_bundle(llmc, encoder_bundles):
    embed, rank = encoder_bundles["embed"], encoder_bundles["rank"]
    assert "an embedding of 64 values, of length one, from the last token" in llmc("inspect", embed).out
    assert "a score, made at the last token" in llmc("inspect", rank).out
    assert "golden texts" in llmc("verify", rank).out
    assert llmc("plan", embed).code == 0
    for verb in (("run", "-p", "x"), ("chat",), ("eval",)):
        ran = llmc(verb[0], embed, *verb[1:])
        assert ran.code == 2 and "embeds texts (llmc embed, Embedder.embed) and generates no text" in ran.err
    assert llmc("bench", embed).code == 2
