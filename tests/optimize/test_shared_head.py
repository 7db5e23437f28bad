"""A large head as a graph of its own: memory holds it once, and every bit, plan and measurement is as without."""

import gc
import shutil
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from doubles.stages import cut

from llmc.bundle import LM_HEAD, read_bundle
from llmc.errors import BuildError, BundleError
from llmc.optimize import graphs
from llmc.optimize.build import build
from llmc.optimize.judge.layers import layer_errors
from llmc.optimize.judge.reference import Reference
from llmc.optimize.lower import context
from llmc.optimize.recipe import BuildRequest, Request
from llmc.runtime.sessions import Batch, Phase, open_session

# A tied head in both phases' own graphs, logits that are capped behind the head, and states whose replay has no head.
KINDS = {"tiny": "int8", "gemma2-softcaps": "int4", "qwen3_5-delta-and-gates": "int4"}


@pytest.fixture(scope="module", params=KINDS)
def built(request, tiny_export, split_bundle, exported, tmp_path_factory) -> tuple[Path, Path, Path]:
    """An export, its bundle, and the bundle whose head is apart."""
    folder, recipe = (
        tmp_path_factory.mktemp("head"),
        Request(precision=KINDS[request.param], phases="split", scheme="rtn"),
    )
    export, whole = tiny_export, split_bundle
    if request.param != "tiny":
        export, whole = exported(request.param).export, folder / "whole"
        build(BuildRequest(export, whole, recipe=recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "LARGE_HEAD", 0)
        build(BuildRequest(export, folder / "apart", recipe=recipe))
    return export, whole, folder / "apart"


def run_all(folder: Path) -> list[np.ndarray]:
    """Logits of prompts, of several rows at once, of a step and of drafts."""
    ids, found = np.random.default_rng(0).integers(3, 96, (3, 40)), []
    with closing(open_session(folder, read_bundle(folder), 1)) as session:
        session.cache.reserve(3, 128)
        for phase, tokens, past, wanted in (
            (Phase.PREFILL, ids[:1], [0], [[5, 39]]),
            (Phase.PREFILL, ids[1:], [0] * 2, [[39]] * 2),
            (Phase.DECODE, ids[:, :1], [40] * 3, [[0]] * 3),
            (Phase.DECODE, ids[:1, :4], [41], [range(4)]),
        ):
            row = 0 if len(tokens) != 2 else 1
            arrays = (np.array(values, np.int64) for values in (past, wanted))
            found.append(session.run(Batch.of(phase, tokens, *arrays, row)).copy())
    return found


def test_every_bit_is_that_of_whole_graphs(built):
    _, whole, apart = built
    assert LM_HEAD not in read_bundle(whole).graphs
    assert LM_HEAD in read_bundle(apart).graphs
    for one, other in zip(run_all(whole), run_all(apart), strict=True):
        np.testing.assert_array_equal(one, other)
    assert read_bundle(whole).golden == read_bundle(apart).golden


def test_its_bytes_are_counted_once(built):
    whole, apart = map(read_bundle, built[1:])
    head = apart.graphs[LM_HEAD].weight_bytes
    for phase in ("prefill", "decode"):
        assert apart.graphs[phase].weight_bytes + head == whole.graphs[phase].weight_bytes
    assert apart.step_weight_bytes == whole.step_weight_bytes
    saved = whole.memory["weights"].fixed - apart.memory["weights"].fixed
    assert 0.9 * head < saved < 1.3 * head  # the engine pads blocks


def test_layers_have_the_errors_of_whole_graphs(built):
    export, *folders = built
    ids = np.random.default_rng(0).integers(3, 96, (1, 12))
    found = [layer_errors(folder, read_bundle(folder), Reference(export), ids) for folder in folders]
    assert found[0] == found[1]


def test_the_last_stage_of_a_chain_has_it(built, tmp_path):
    _, whole, apart = built
    chain = cut(apart, tmp_path / "chain", 2)
    assert LM_HEAD in read_bundle(chain).graphs
    assert LM_HEAD not in read_bundle(chain / "stage-0").graphs
    for one, other in zip(run_all(whole), run_all(chain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_is_freed_with_its_session_and_a_manifest_without_it_is_refused(built):
    apart = built[2]
    manifest = read_bundle(apart)
    session = open_session(apart, manifest, 1)
    head = weakref.ref(session._head)
    session.close()
    gc.collect()
    assert head() is None
    kept = {name: graph for name, graph in manifest.graphs.items() if name != LM_HEAD}
    for graphs_of in (kept, {**manifest.graphs, LM_HEAD: kept["prefill"]}):
        with pytest.raises(BundleError, match="its graphs do not give logits"):
            open_session(apart, replace(manifest, graphs=graphs_of), 1)


def test_two_ends_that_are_not_the_same_are_refused(built, tmp_path):
    whole = built[1]
    graph = ir.load(whole / "decode.onnx")
    next(value for value in graph.graph.outputs if value.name == "logits").producer().op_type = "Other"
    other = shutil.copytree(whole, tmp_path / "other")
    ir.save(graph, other / "decode.onnx")
    with pytest.raises(BuildError, match="end in different heads"):
        graphs.cut_head(other, read_bundle(whole).graphs, 1)
