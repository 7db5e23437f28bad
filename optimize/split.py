"""A finished bundle cut between layers: one bundle for each stage, with hidden states as the interface.

The graphs are those that were judged, cut, so a chain of stages computes the same bits as the whole.
"""

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import (
    BUNDLE_MANIFEST,
    LM_HEAD,
    LOGIT_ROWS,
    REPLAY,
    STAGE_FOLDER,
    TOKENIZER_FILES,
    GoldenVector,
    Graph,
    Manifest,
    Stage,
    sha256_file,
    write_chunks,
    write_manifest,
)
from llmc.errors import BuildError
from llmc.optimize.graphs import cut_replay, describe_graph
from llmc.optimize.judge.replay import replay_apart
from llmc.optimize.judge.report import QUALITY_PAGE
from llmc.optimize.lower.rewrite import read_graph, write_part
from llmc.optimize.plan.borders import Cut
from llmc.optimize.progress import Progress
from llmc.optimize.weights.file import WeightFile
from llmc.publish import file_entries
from llmc.runtime.selftest.stages import run_stage
from llmc.runtime.sessions import open_engine

WHOLE = "whole"  # in the bundle's folder while it is cut


def split(folder: Path, manifest: Manifest, cuts: Sequence[Cut], progress: Progress) -> Manifest:
    """Cut the finished bundle in ``folder`` in its place, and replay its golden prompts through the stages; the
    manifest of the last one, which has the tokenizer and answers.
    Raises BuildError: more than hidden states cross a border, or the stages compute something else than the whole."""
    whole, borders, hashes = folder / WHOLE, tuple(cut.layers.start for cut in cuts), list[str]()
    files = [path for path in folder.iterdir() if path.name not in (*TOKENIZER_FILES, QUALITY_PAGE)]
    whole.mkdir()
    for path in files:
        path.rename(whole / path.name)
    for number, cut in enumerate(cuts[:-1]):
        progress(f"cutting stage {number} of {len(cuts)}: layers {cut.layers.start} to {cut.layers.stop - 1}")
        (place := folder / STAGE_FOLDER.format(number)).mkdir()
        inner = replace(manifest, stage=Stage(number, borders), memory=cut.memory, quality=None, golden=())
        inner = _write_stage(whole, place, inner)
        with closing(open_engine(place, inner, 1)) as session:
            case = GoldenVector((), tuple(run_stage(session, inner).tolist()))
        write_manifest(replace(inner, vectors=(case,)), place)
        hashes.append(sha256_file(place / BUNDLE_MANIFEST))
    stage = Stage(len(hashes), borders, tuple(hashes))
    last = _write_stage(whole, folder, replace(manifest, stage=stage, memory=cuts[-1].memory))
    shutil.rmtree(whole)
    progress("replaying the golden prompts through the stages")
    replay_apart(folder)
    return last


def _write_stage(whole: Path, folder: Path, part: Manifest) -> Manifest:
    with closing(WeightFile(folder)) as weights:
        both = dict.fromkeys(part.graphs[phase] for phase in ("prefill", "decode"))  # one, where a graph serves both
        cut = {graph.file: _cut(whole, folder, graph, part, weights) for graph in both}
        graphs = {phase: cut[part.graphs[phase].file] for phase in ("prefill", "decode")}
        if part.stage.is_last and (head := part.graphs.get(LM_HEAD)):
            model = read_graph(whole, head.file)
            graphs[LM_HEAD] = _write_graph(model, model.graph, folder, head, weights)
    if any(cache.kind == "state" for cache in part.list_caches()):
        graphs[REPLAY] = cut_replay(folder, graphs["decode"].file)
    write_chunks(folder, sorted(path.name for path in folder.iterdir() if path.is_file()))
    files = file_entries(folder, sorted(path.name for path in folder.iterdir() if path.is_file()))
    part = replace(part, graphs=graphs, files=files)
    write_manifest(part, folder)
    return part


def _cut(whole: Path, folder: Path, graph: Graph, part: Manifest, weights: WeightFile) -> Graph:
    """The nodes of a graph between two hidden states, with all that they read of it."""
    model = read_graph(whole, graph.file)
    values = ir.convenience.create_value_mapping(model.graph)
    layers = part.list_layers()
    hidden, result = f"hidden.{layers.start}", f"hidden.{layers.stop}"
    ends = {"logits", LOGIT_ROWS}
    if part.stage.is_last:
        result = LOGIT_ROWS if LM_HEAD in part.graphs else "logits"
    caches = set(part.geometry.caches) - set(part.list_caches())
    others = {name for cache in caches for name in (*cache.inputs, *cache.outputs)} | ends
    inputs = [str(value.name) for value in model.graph.inputs if value.name not in others]
    own = next((values[cache.inputs[0]] for cache in part.list_caches() if cache.kind == "kv"), None)
    for node in model.graph:  # any layer may ask the first cache for the positions that all of them have
        asked = node.inputs[0] if node.op_type == "Shape" else None
        if own is not None and asked is not None and asked.name in others - ends:
            node.replace_input_with(0, own)
    # An output that states are computed from bears the name of one.
    kept = {str(value.name): str(value.name).removeprefix(f"{REPLAY}.") for value in model.graph.outputs}
    outputs = [name for name, of in kept.items() if not {name, of.rpartition(".")[0]} & others]
    for name in {hidden, result} & values.keys() - {"hidden.0", *ends}:
        values[name].type = ir.TensorType(ir.DataType.FLOAT)
        values[name].shape = ir.Shape([None, None, part.geometry.hidden_size])  # [1, T, H] where rows are packed
    try:
        taken = [hidden] if layers.start else []
        cut = ir.convenience.extract(model.graph, [*inputs, *taken], [result, *outputs])
    except (ValueError, RuntimeError) as error:  # the latter when what another stage has is to be copied
        raise BuildError(f"more than hidden states cross a border of {layers}; leave stages out") from error
    ordered = {name: cut.initializers[name] for name in model.graph.initializers if name in cut.initializers}
    cut.initializers.clear()  # a set's order until now: two builds would differ
    cut.initializers.update(ordered)
    return _write_graph(model, cut, folder, graph, weights)


def _write_graph(model: ir.Model, cut: ir.Graph, folder: Path, graph: Graph, weights: WeightFile) -> Graph:
    """Write a part of a model's graph, or all of it, whose weights are copied to those of the stage."""
    for value in cut.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weights.copy(value.const_value)
    write_part(cut, model, folder / graph.file)
    return replace(describe_graph(cut, graph.file, graph.overwritten), invariance=graph.invariance)
