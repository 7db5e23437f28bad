"""Export -> bundle: lower, quantize, write, run, judge, publish."""

import platform
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from llmc import __version__
from llmc.bundle import (
    GRAPH_CONTRACT_VERSION,
    SCHEMA_VERSION,
    TOKENIZER_FILES,
    ExportManifest,
    FileEntry,
    Geometry,
    Graph,
    Limits,
    Manifest,
    MemoryPlan,
    Recipe,
    Target,
    file_entries,
    read_export,
    staged,
    write_manifest,
)
from llmc.errors import UsageError
from llmc.optimize import recipe as recipes
from llmc.optimize.golden import golden_prompts
from llmc.optimize.lower.plan import Form, PerToken, Plan
from llmc.optimize.passes import lower
from llmc.optimize.progress import Progress, counted, silent
from llmc.optimize.rewrite import read_decoder
from llmc.optimize.targets import Capabilities, capabilities
from llmc.optimize.weights import WeightFile
from llmc.runtime import load
from llmc.runtime.sessions.onnxruntime import import_onnxruntime


@dataclass(frozen=True)
class BuildReport:
    """What was built. ``seconds`` covers everything from reading the export to publishing."""

    output: Path
    manifest: Manifest
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of all files of the bundle."""
        return sum(entry.size for entry in self.manifest.files.values())


def build(
    source: Path,
    output: Path,
    *,
    target: str = "cpu",
    precision: str | None = None,
    max_context: int | None = None,
    max_batch: int | None = None,
    recipe: Path | None = None,
    force: bool = False,
    dump: Path | None = None,
    progress: Progress = silent,
) -> BuildReport:
    """Compile an exported decoder for one target and publish the bundle, or publish nothing.

    Args:
        source: folder written by ``llmc export``.
        output: bundle folder to write; must not exist unless ``force``.
        target: cpu.
        precision: fp32, int8 (default) or int4; overrides the recipe's.
        max_context: longest sequence in tokens; default: the checkpoint's, at most 32,768.
        max_batch: cache rows; default 1.
        recipe: TOML file, see :class:`llmc.optimize.recipe.Request`.
        force: replace an existing bundle.
        dump: folder for the graph's text after each pass.
        progress: called with each step and how far it is.

    Raises:
        UsageError: the request is out of range or contradicts itself.
        CheckpointError: weights are truncated, NaN or infinite.
        BuildError: the graph cannot be lowered.
    """
    start = time.perf_counter()
    export = read_export(Path(source))
    abilities = capabilities(target)
    asked = recipes.Request(precision=precision, max_context=max_context, max_batch=max_batch)
    asked = asked.over(recipes.read_recipe(recipe)) if recipe is not None else asked
    name = recipe.stem if recipe is not None else "default"
    chosen, limits = recipes.resolve(asked, abilities, export.geometry.max_positions, name)
    if Path(output).resolve() == Path(source).resolve():
        raise UsageError(f"{output} is the export itself; choose another output folder")
    if dump is not None and Path(dump).resolve().is_relative_to(Path(output).resolve()):
        raise UsageError(f"{dump} lies in the output folder {output}; choose another folder for the dumps")
    with staged(Path(output), force=force) as folder:
        graphs = _compile(Path(source), folder, export.geometry, chosen, limits, abilities, dump, progress)
        _copy_tokenizer(Path(source), folder)
        progress("hashing")
        files = file_entries(folder, sorted(path.name for path in folder.iterdir()))
        manifest = _manifest(export, abilities, chosen, limits, graphs, files)
        manifest = _judge(Path(source), folder, manifest, progress)
        write_manifest(manifest, folder)
    return BuildReport(Path(output), manifest, time.perf_counter() - start)


def _compile(
    source: Path,
    folder: Path,
    geometry: Geometry,
    recipe: Recipe,
    limits: Limits,
    target: Capabilities,
    dump: Path | None,
    progress: Progress,
) -> dict[str, Graph]:
    """Lower the decoder once per phase; the graphs share one weight file."""
    graphs = {}
    with closing(WeightFile(folder)) as weights:
        for phase, (body, head) in recipes.forms(recipe).items():
            done = counted(progress, f"lowering and quantizing the {phase} graph", 5 * geometry.layers + 1)
            model = read_decoder(source)
            lower(model, target.name, Plan(phase, geometry, limits, body, head, weights, done), dump)
            _declare(model, target)
            name = f"{phase if phase != 'shared' else 'decoder'}.onnx"
            ir.save(model, folder / name)
            graphs[phase] = _describe(model.graph, name, body, target)
    if len(graphs) == 1:
        return dict.fromkeys(("prefill", "decode"), graphs["shared"])
    return graphs


def _declare(model: ir.Model, target: Capabilities) -> None:
    """The lowered graph uses no operator newer than the target's opset, so that older engines load it too."""
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports.update({"": target.opset, "com.microsoft": 1})
    model.ir_version = target.ir_version


def _describe(graph: ir.Graph, name: str, body: Form, target: Capabilities) -> Graph:
    """Bytes of weights in memory and per token (embedding rows stay on disk until read), and what the CPU must have."""
    sizes = {
        name: value.const_value.nbytes
        for name, value in graph.initializers.items()
        if value.const_value is not None and not any("Gather" in node.op_type for node, _ in value.uses())
    }
    tables = sum(size for name, size in sizes.items() if name.startswith("rotary_emb."))
    features = target.w8a8_features.get(platform.machine(), ()) if isinstance(body, PerToken) else ()
    return Graph(
        file=name,
        weight_bytes=sum(sizes.values()),
        step_weight_bytes=sum(sizes.values()) - tables,
        cpu_features=features,
        multi_row_prefill=target.multi_row_prefill,
    )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _manifest(
    export: ExportManifest,
    target: Capabilities,
    recipe: Recipe,
    limits: Limits,
    graphs: dict[str, Graph],
    files: dict[str, FileEntry],
) -> Manifest:
    """The manifest before the bundle has run: no quality and no self-test."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmc_version=__version__,
        graph_contract=GRAPH_CONTRACT_VERSION,
        geometry=export.geometry,
        source=export.source,
        generation=export.generation,
        target=Target(
            target.name, target.engine, import_onnxruntime(target.engine_minimum).__version__, target.engine_minimum
        ),
        recipe=recipe,
        limits=limits,
        memory=_memory(export.geometry, limits, graphs),
        graphs=graphs,
        quality=None,
        golden=(),
        files=files,
    )


def _memory(geometry: Geometry, limits: Limits, graphs: dict[str, Graph]) -> MemoryPlan:
    """Weights once per graph; the workspace holds the widest activations of a prefill chunk and one row of logits."""
    weights = {graph.file: graph.weight_bytes for graph in graphs.values()}
    activations = limits.prefill_chunk * (6 * geometry.intermediate_size + 8 * geometry.hidden_size) * 4
    return MemoryPlan(
        weights=sum(weights.values()),
        cache_per_token=geometry.cache_bytes(1),
        workspace=activations + geometry.vocab_size * 4,
        # Attention keeps the scores of a chunk against all that is cached, in float32.
        workspace_per_token=geometry.heads * limits.prefill_chunk * 4,
    )


def _judge(source: Path, folder: Path, manifest: Manifest, progress: Progress) -> Manifest:
    """Load what was built, run the golden prompts, and put their results beside the unquantized model's."""
    write_manifest(manifest, folder)
    with load(folder) as model:
        golden, quality = golden_prompts(model, source, progress)
    return replace(manifest, golden=golden, quality=quality)
