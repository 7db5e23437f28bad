"""Writes the export folder: graph, hard-linked weights, copies of config and tokenizer, manifest; published whole."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from llmc import __version__, bundle
from llmc.export.families.diffusion import keep_possible
from llmc.export.graph import build_graph, check_graph
from llmc.export.report import ExportReport
from llmc.export.sources.checkpoint import Checkpoint
from llmc.export.sources.codes import flatten_tensors
from llmc.export.sources.made import write_made
from llmc.export.sources.safetensors import INDEX_FILE, SINGLE_FILE
from llmc.export.sources.templates import place_templates
from llmc.export.tower import export_tower, leave_out_tower
from llmc.origin import copy_own
from llmc.publish import link, staging_folder


def write_export(
    read: Callable[[], Checkpoint], output: Path, copy: bool, force: bool, progress: Callable[[str], None]
) -> ExportReport:
    progress("reading the checkpoint")
    source = read()
    geometry = source.geometry
    with staging_folder(output, force=force) as staging:
        progress("linking weights and tokenizer")
        new_bytes = _place_files(source, staging, copy)
        tensors, made_bytes = write_made(flatten_tensors(source.tensors), staging)
        new_bytes += made_bytes
        progress("exporting the graph")
        model = build_graph(source.config, leave_out_tower(tensors), staging)
        progress("checking the graph")
        check_graph(model, geometry)
        ir.save(model, staging / bundle.DECODER_FILE)
        export_tower(source.config, tensors, staging, progress)
        bundle.write_manifest(_manifest(source), staging)
        written = (*staging.glob("*.onnx"), staging / bundle.EXPORT_MANIFEST)
        new_bytes += sum(path.stat().st_size for path in written)
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    return ExportReport(output, files, new_bytes, 0.0, geometry, source.source, source.notes)


def _manifest(source: Checkpoint) -> bundle.ExportManifest:
    return bundle.ExportManifest(
        schema_version=bundle.SCHEMA_VERSION,
        llmc_version=__version__,
        graph_contract=bundle.GRAPH_CONTRACT_VERSION,
        geometry=source.geometry,
        source=source.source,
        generation=keep_possible(source.config, source.generation),
        notes=source.notes,
        weights=source.weights,
    )


def _place_files(source: Checkpoint, staging: Path, copy: bool) -> int:
    """Hard-link or copy the weights, copy files that a user may edit, and return the number of new bytes."""
    new_bytes = sum(link(path, staging / path.name, copy) for path in source.files)
    for name, text in source.texts.items():
        new_bytes += (staging / name).write_bytes(text.encode())
    if bundle.CONFIG_FILE in source.texts:
        return new_bytes
    # Calibration needs the config to build the torch decoder.
    index = [INDEX_FILE] if source.files[0].name != SINGLE_FILE else []
    names = (bundle.CONFIG_FILE, *bundle.TOKENIZER_FILES, *index)
    new_bytes += copy_own(source.folder, [name for name in names if name not in source.texts], staging)
    place_templates(source.folder, staging, source.config.has_processor)
    return new_bytes
