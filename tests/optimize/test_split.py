"""Bundles cut into stages: the same bits as the whole, borders by memory, and all that is refused by its name."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from doubles.refusals import about
from doubles.stages import TOKENIZER, borders, cut

from llmc.bundle import STAGE_FOLDER, WEIGHTS_FILE, Manifest, Part, list_unlisted_files, read_bundle, write_manifest
from llmc.errors import BuildError, BundleError, ResourceError, UsageError
from llmc.optimize.build import build
from llmc.optimize.plan.memory import memory_plan
from llmc.optimize.plan.sizes import ROTATIONS
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.split import split
from llmc.runtime import load
from llmc.runtime.host import integrity
from llmc.runtime.loading import verify
from llmc.runtime.selftest.stages import replay_stage
from llmc.runtime.selftest.values import VECTOR_TOLERANCE
from llmc.runtime.server.models.loading import Loader
from llmc.runtime.sessions import Batch, Phase, open_engine, open_session, staged
from llmc.runtime.sessions.staged import WIRE_BITS, Stages, pack, unpack

GB = 10**9
# Of a value that float16 rounds to nearest, with 11 bits; and of a token's largest, where that leaves values too small
# for all 11.
HALF_ROUNDING, HALF_SMALLEST = 2.0**-11, 2.0**-39


@pytest.fixture(scope="module", params=["int8", "int4"])
def whole(request: pytest.FixtureRequest, tiny_in: Callable[[str], Path]) -> Path:
    return tiny_in(request.param)


@pytest.fixture(scope="module")
def chain(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages: the first, one behind and before others, and the last."""
    return cut(whole, tmp_path_factory.mktemp("cut") / "chain")


def run_all(folder: Path) -> list[np.ndarray]:
    """The results of every kind of call, and of every way to move rows of the cache."""
    found: list[np.ndarray] = []
    with closing(open_session(folder, read_bundle(folder), 1)) as session:
        session.cache.reserve(4, 512)
        ids = np.random.default_rng(0).integers(3, 4096, (4, 400))

        def run(phase: Phase, tokens: Any, past: Any, wanted: Any, row: int = 0, new: Any = None) -> None:
            arrays = (np.array(values, np.int64) for values in (past, wanted))
            lengths = {} if new is None else {"new_lengths": np.array(new, np.int64)}
            found.append(session.run(Batch.of(phase, tokens, *arrays, row, **lengths)).copy())

        run(Phase.PREFILL, ids[:1, :203], [0], [[5, 64, 202]])
        run(Phase.PREFILL, ids[:1, 203:256], [203], [[52]])
        run(Phase.DECODE, ids[:1, 256:257], [256], [[0]])
        run(Phase.PREFILL, ids[1:, :40], [0] * 3, [[39], [29], [9]], 1, [40, 30, 10])
        run(Phase.DECODE, ids[:, 300:301], [257, 40, 30, 10], [[0]] * 4)
        run(Phase.DECODE, ids[:1, 300:306], [258], [range(6)])
        run(Phase.DECODE, ids[:2, 300:303], [259, 41], [range(3)] * 2)
        session.cache.copy(0, 2, 0, 250)
        session.cache.swap(1, 43, 3, 11)
        found += [session.cache.read(2, 10, 42), *session.cache.read_blocks(3, 4, 0, 40)]
        session.cache.write(1, 0, 32, found[-11])
        run(Phase.DECODE, ids[1:3, :1], [32, 250], [[0]] * 2, 1)
    return found


def test_stages_compute_the_bits_of_the_whole_in_every_kind_of_call(whole: Path, chain: Path):
    wanted = run_all(whole)
    for found, one in zip(run_all(chain), wanted, strict=True):
        np.testing.assert_array_equal(found, one)


def test_the_same_cut_gives_the_same_bytes(whole: Path, chain: Path, tmp_path: Path):
    again = cut(whole, tmp_path / "again")
    for graph in chain.rglob("*.onnx"):
        assert graph.read_bytes() == (again / graph.relative_to(chain)).read_bytes()


def test_requests_get_the_answers_of_the_whole_with_drafts_and_cached_prefixes(whole: Path, chain: Path):
    prompts = ["def f(x): return x\n" * 9, "def f(x): return x\n" * 9 + "def g", "import os"]
    answers = []
    for folder in (whole, chain):
        options = {"determinism": "strict", "draft": "lookup", "prefix_cache_bytes": 1 << 26}
        with load(folder, threads=1, **options) as model:
            answers.append([])
            for _ in range(2):
                handles = [model.stream(prompt, max_tokens=24, temperature=0, logprobs=2) for prompt in prompts]
                answers[-1] += [handle.result() for handle in handles]
            assert sum(answer.usage.cached_tokens for answer in answers[-1]) > 0
    assert [it.outputs[0].logprobs for it in answers[0]] == [it.outputs[0].logprobs for it in answers[1]]


def test_prefixes_that_halves_on_the_wire_made_are_not_those_of_the_whole_states(chain: Path, tmp_path: Path):
    class Halved(Stages):
        """Told to hand on halves, as between boxes at fast."""

        def __init__(self, folder: Path, manifest: Manifest, threads: int, exact: bool) -> None:
            super().__init__(folder, manifest, threads)
            self.exact = exact

    cached = []
    for opener in (None, Halved, Halved, None):
        options = {"stages": opener, "prefix_cache_folder": tmp_path, "prefix_cache_bytes": 1 << 26}
        with load(chain, threads=1, self_test=False, **options) as model:
            cached.append(model.generate("def f(x): return x\n" * 9, max_tokens=1).usage.cached_tokens > 0)
    assert cached == [False, False, True, True]


@pytest.mark.parametrize("name", ["qwen3_5-delta-and-gates", "falcon_h1-both-mixers-multipliers"])
def test_stages_keep_the_states_of_their_layers(exported: Callable[[str], Any], tmp_path: Path, name: str):
    export = exported(name).export
    bundles = [tmp_path / "whole", tmp_path / "chain"]
    for folder, stages in zip(bundles, (None, (0, 0)), strict=True):
        build(BuildRequest(export, folder, precision="fp32", max_context=128, max_batch=2, stages=stages))
    found = []
    for folder in bundles:
        with load(folder, threads=1, determinism="strict", draft="lookup", prefix_cache_bytes=1 << 24) as model:
            ids = [5, 9, 11, 5, 9, 11, 5, 9] * 9
            found.append([model.generate(ids, max_tokens=20, temperature=0, ignore_eos=True) for _ in range(2)])
            assert found[-1][1].usage.cached_tokens > 0
    assert [it.token_ids for it in found[0]] == [it.token_ids for it in found[1]]


def test_stages_in_one_process_are_planned_together(whole: Path, chain: Path):
    with load(chain, self_test=False) as model:
        assert model.manifest.memory["weights"].fixed >= read_bundle(whole).memory["weights"].fixed
        assert model.planned_bytes > read_bundle(chain).memory.total(0)
    with pytest.raises(ResourceError):
        load(chain, self_test=False, memory=read_bundle(chain).memory.total(64), max_context=64)


def test_a_service_counts_the_memory_of_stages_in_its_process_before_it_loads(whole: Path, chain: Path):
    together, apart = Loader({}).need(chain), Loader({"stages": "elsewhere"}).need(chain)
    assert apart.least < Loader({}).need(whole).least <= together.least
    load(chain, memory=together.least, max_context=512, self_test=False).close()


def test_all_stages_in_the_folder_are_hashed_and_their_manifests_read_once(
    chain: Path, monkeypatch: pytest.MonkeyPatch
):
    hashed, read = list[Path](), list[Path]()
    noted = {integrity: ("verify_files", hashed), staged: ("read_bundle", read)}
    for module, (name, places) in noted.items():
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda it, *more, f=function, at=places: (at.append(it), f(it, *more))[1])
    load(chain, verify=True, self_test=False).close()
    assert hashed == [chain, *read] and read == [chain / "stage-0", chain / "stage-1"]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e6, 1e30])
def test_hidden_states_on_the_wire_are_rounded_as_float16_whatever_their_size(scale: float):
    hidden = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32) * np.float32(scale)
    hidden[0, 0, 3], hidden[1, 1] = 1e5 * scale, 0
    values, exponents = wire = pack(hidden)
    assert values.dtype == np.float16 and exponents.shape == (2, 5, 1)
    allowed = HALF_ROUNDING * np.abs(hidden) + HALF_SMALLEST * np.abs(hidden).max(-1, keepdims=True)
    assert (np.abs(unpack(wire) - hidden) <= allowed).all()
    cut = np.ldexp(np.trunc(np.ldexp(hidden, exponents - 5)).astype(np.float32), 5 - exponents)  # 2^(15 - 5): 10 bits
    assert WIRE_BITS == 15 and (np.abs(cut - hidden) > allowed).any()


def test_each_stage_is_a_bundle_that_is_verified_alone_and_the_chain_whole(chain: Path):
    manifest, inner = read_bundle(chain), read_bundle(chain / STAGE_FOLDER.format(1))
    assert manifest.stage.is_last and manifest.golden and manifest.quality
    assert not inner.stage.is_last and inner.vectors and not inner.golden
    assert [*read_bundle(chain / "stage-0").list_layers(), *inner.list_layers(), *manifest.list_layers()] == [*range(6)]
    assert verify(chain).equal_tokens > 0 and verify(chain).unlisted == ()
    assert verify(chain / "stage-1").largest_difference == 0
    assert list_unlisted_files(chain, manifest) == ()


def test_a_stage_that_computes_something_else_is_found_alone(chain: Path, tmp_path: Path):
    folder = Path(shutil.copytree(chain / "stage-1", tmp_path / "stage"))
    weights, manifest = np.memmap(folder / WEIGHTS_FILE, np.uint8, "r+"), read_bundle(folder)
    weights[len(weights) // 2 :] = 0
    weights.flush()
    with closing(open_engine(folder, manifest, 1)) as session:
        with pytest.raises(BundleError, match=rf"hidden states differ by .*at most {VECTOR_TOLERANCE} is expected"):
            replay_stage(folder, manifest, session)
    with pytest.raises(BundleError, match=r"weights.bin is corrupt"):
        verify(folder)


def test_a_stage_answers_nothing_by_itself_and_none_of_another_build_is_taken(chain: Path, tmp_path: Path):
    with pytest.raises(BundleError, match="stage 0 of 3, expected the last, which answers; load the folder"):
        load(chain / "stage-0")
    other = Path(shutil.copytree(chain, tmp_path / "chain"))
    inner = read_bundle(other / "stage-0")
    write_manifest(replace(inner, notes=(*inner.notes, "another")), other / "stage-0")
    with pytest.raises(BundleError, match="stage-0 is of another build"):
        load(other)
    shutil.rmtree(other / "stage-0")
    with pytest.raises(BundleError, match=r"stage-0 is not there, and .* is a model in stages; put this stage there"):
        load(other)
    with pytest.raises(BundleError, match=r"whole files of its own, and .*stage-0 is not there.* verify it where they"):
        verify(other)


def test_a_manifest_that_no_cut_writes_is_refused(chain: Path, tmp_path: Path):
    folder = Path(shutil.copytree(chain, tmp_path / "chain"))
    manifest = read_bundle(folder)
    for wrong in ({"borders": (0, 3, 3)}, {"borders": (1, 2, 5)}, {"number": 1}, {"before": ()}, {"number": 3}):
        write_manifest(replace(manifest, stage=replace(manifest.stage, **wrong)), folder)
        with pytest.raises(BundleError, match=r"the stage in llmc.json cannot be right"):
            read_bundle(folder)


def test_what_crosses_a_border_beside_hidden_states_is_refused(tiny_bundle: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = read_bundle(folder)
    graph = folder / manifest.graphs["decode"].file
    model = ir.load(graph)
    values = ir.convenience.create_value_mapping(model.graph)
    node = values["hidden.6"].producer()
    assert node is not None
    node.replace_input_with(0, values["hidden.1"])
    ir.save(model, graph)
    with pytest.raises(BuildError, match="more than hidden states cross a border"):
        split(folder, manifest, borders(manifest, (0, 0)), lambda step, done=None: None)


@pytest.mark.parametrize("boxes", [(0, 0), (GB, 4 * GB), (4 * GB, GB)])
def test_borders_leave_the_fullest_box_as_empty_as_can_be(tiny_bundle: Path, boxes: tuple[int, int]):
    manifest = read_bundle(tiny_bundle)

    def fullest(border: int) -> float:
        shares = []
        for layers, box in zip((range(border), range(border, 6)), boxes, strict=True):
            own = manifest.geometry.of_layers(layers)
            plan = memory_plan(own, manifest.limits, manifest.recipe, TOKENIZER if layers.start else 0)
            plan = plan.without("embedding") if layers.start else plan.without("logits")
            shares.append(plan.total(manifest.limits.max_context) / (box or 1))
        return max(shares)

    first, last = borders(manifest, boxes)
    assert [*first.layers, *last.layers] == [*range(6)]
    assert first.layers.stop == min(range(1, 6), key=fullest)


def test_the_memory_of_stages_is_that_of_the_whole_but_for_what_each_process_has(tiny_bundle: Path):
    manifest = read_bundle(tiny_bundle)
    parts = [cut.memory for cut in borders(manifest, (0, 0, 0))]
    whole = manifest.memory
    rotated = {manifest.graphs[phase].file for phase in manifest.recipe.rotated}
    rotations = len(rotated) * ROTATIONS * 4 * manifest.geometry.hidden_size**2
    assert sum(part["weights"].fixed - rotations for part in parts) == whole["weights"].fixed - rotations
    assert sum(part["cache"].per_position for part in parts) == whole["cache"].per_position
    assert [part["embedding"] for part in parts] == [whole["embedding"], *[Part("embedding")] * 2]
    assert [part["logits"] for part in parts] == [*[Part("logits")] * 2, whole["logits"]]
    assert [part["tokenizer"].fixed > 0 for part in parts] == [False, False, True]


def test_more_stages_than_layers_and_too_small_boxes_are_refused(tiny_bundle: Path):
    manifest = read_bundle(tiny_bundle)
    for boxes in ((0,), (0,) * 7):
        with pytest.raises(UsageError, match=rf"is {len(boxes)}, expected 2 to 6", check=about("stages")):
            borders(manifest, boxes)
    with pytest.raises(ResourceError, match="one is larger than its box"):
        borders(manifest, (GB, 1000))
