"""A finished bundle cut between layers: one bundle for each stage, with hidden states as the interface.

The graphs are those that were judged, cut, so a chain of stages computes the same bits as the whole.
"""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from llmc.bundle import (
    BUNDLE_MANIFEST,
    CHUNKS_FILE,
    REPLAY,
    STAGE_FOLDER,
    WEIGHTS_FILE,
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
from llmc.optimize.lower.rewrite import read_graph
from llmc.optimize.plan.borders import Cut
from llmc.optimize.progress import Progress
from llmc.optimize.weights.file import WeightFile
from llmc.publish import file_entries
from llmc.runtime.selftest import run_stage
from llmc.runtime.sessions import open_engine

# In the bundle's folder while it is cut.
WHOLE = "whole"


def split(folder: Path, manifest: Manifest, cuts: tuple[Cut, ...], progress: Progress) -> Manifest:
    """Cut the finished bundle in ``folder`` in its place, and replay its golden prompts through the stages.

    Returns:
        The manifest of the last stage, which has the tokenizer and answers.

    Raises:
        BuildError: more than hidden states cross a border, or the stages compute something else than the whole.
    """
    whole, borders = folder / WHOLE, tuple(cut.layers.start for cut in cuts)
    whole.mkdir()
    for name in {WEIGHTS_FILE, *(graph.file for graph in manifest.graphs.values())}:
        (folder / name).rename(whole / name)
    hashes: list[str] = []
    for number, cut in enumerate(cuts):
        progress(f"cutting stage {number} of {len(cuts)}: layers {cut.layers.start} to {cut.layers.stop - 1}")
        stage = Stage(number, borders, ())
        if stage.number < len(cuts) - 1:
            place = folder / STAGE_FOLDER.format(number)
            place.mkdir()
            part = replace(manifest, stage=stage, memory=cut.memory, quality=None, golden=())
            _write_inner(whole, place, part)
            hashes.append(sha256_file(place / BUNDLE_MANIFEST))
    stage = replace(stage, before=tuple(hashes))
    last = _write_stage(whole, folder, replace(manifest, stage=stage, memory=cuts[-1].memory))
    shutil.rmtree(whole)
    progress("replaying the golden prompts through the stages")
    replay_apart(folder)
    return last


def _write_inner(whole: Path, folder: Path, part: Manifest) -> None:
    """A stage before the last, with some of the hidden states that it makes, by which it is verified alone."""
    written = _write_stage(whole, folder, part)
    with closing(open_engine(folder, written, 1)) as session:
        case = GoldenVector((), tuple(run_stage(session, written).tolist()))
    write_manifest(replace(written, vectors=(case,)), folder)


def _write_stage(whole: Path, folder: Path, part: Manifest) -> Manifest:
    with closing(WeightFile(folder)) as weights:
        graphs = {
            graph.file: _cut(whole, folder, graph, part, weights)
            for name, graph in part.graphs.items()
            if name != REPLAY
        }
    if part.geometry.has_states:
        replayed = cut_replay(folder, part.graphs["decode"].file)
        graphs[replayed.file] = replayed
    files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != BUNDLE_MANIFEST)
    write_chunks(folder, [name for name in files if name != CHUNKS_FILE])
    files = [name for name in (*files, CHUNKS_FILE) if (folder / name).exists()]
    named = {name: graphs[graph.file] for name, graph in part.graphs.items()}
    part = replace(part, graphs=named, files=file_entries(folder, sorted(set(files))))
    write_manifest(part, folder)
    return part


def _cut(whole: Path, folder: Path, graph: Graph, part: Manifest, weights: WeightFile) -> Graph:
    """The nodes of a graph between two hidden states, with all that they read of it."""
    model = read_graph(whole, graph.file)
    names = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    names |= {value.name: value for node in model.graph for value in node.outputs}
    own = {name for cache in part.caches for name in (*cache.inputs, *cache.outputs)}
    others = {name for cache in part.geometry.caches for name in (*cache.inputs, *cache.outputs)} - own
    inputs = [value for value in model.graph.inputs if value.name not in others]
    outputs = [
        value
        for value in model.graph.outputs
        if value.name not in others | {"logits"} and _name_state(str(value.name)) not in others
    ]
    result, packed = names[part.result], any(str(name).startswith("packed.") for name in names)
    taken = [names[f"hidden.{part.layers.start}"]] if part.layers.start else []
    for value in (*taken, *([result] if part.result != "logits" else [])):
        value.type = ir.TensorType(ir.DataType.FLOAT)
        width = part.geometry.hidden_size
        value.shape = ir.Shape([1, "tokens", width] if packed else ["batch", "sequence", width])
    try:
        cut = ir.convenience.extract(model.graph, [*inputs, *taken], [result, *outputs])
    except ValueError as error:
        raise BuildError(
            f"{part.geometry.model_type}: more than hidden states crosses the border before layer {part.layers.start} "
            f"or {part.layers.stop} ({error}); build it without --stages"
        ) from error
    for value in cut.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weights.copy(value.const_value)
    made = ir.Model(cut, ir_version=model.ir_version)
    made.graph.opset_imports.update(model.graph.opset_imports)
    ir.save(made, folder / graph.file)
    return replace(describe_graph(cut, graph.file, graph.overwritten), invariance=graph.invariance)


def _name_state(output: str) -> str:
    """The state that an output belongs to which it is computed from; any other name stays."""
    return output.removeprefix(f"{REPLAY}.").rpartition(".")[0] if output.startswith(f"{REPLAY}.") else output
