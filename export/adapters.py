"""LoRA adapters of PEFT, checked against a bundle and written into it, to be loaded beside its model.

Factors are float32, with an adapter's own scale in the second of each pair.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llmc.bundle import (
    ADAPTER_SCHEMA,
    ADAPTERS_FOLDER,
    FACTORS_FILE,
    AdapterManifest,
    Geometry,
    Manifest,
    check_name,
    list_adapters,
    read_bundle,
    sha256_file,
    write_adapter_manifest,
)
from llmc.errors import CheckpointError, UsageError
from llmc.export.families.vision_language import TEXT_PARTS
from llmc.export.sources.adapters import Adapter, Array, Factors, read_peft
from llmc.export.sources.parameters import make_renamer
from llmc.publish import staging_folder

MERGE = "merge it at export instead (llmc export --adapter)"


def add_adapter(bundle: Path, folder: Path, name: str) -> tuple[Path, tuple[str, ...]]:
    """Write an adapter into a bundle, under a name that is free; its place there, and notes about it.

    Raises:
        CheckpointError: it is broken, or changes what the bundle's graph cannot change beside the model.
        UsageError: the name is taken or none, or the bundle has no room for it.
    """
    manifest, target = read_bundle(bundle), bundle / ADAPTERS_FOLDER / check_name(name)
    room, taken = manifest.limits.adapters, len(list_adapters(bundle))
    if taken >= room:
        raise UsageError(
            "bundle",
            f"{bundle} has {taken} adapters, and was built for {room}",
            f"remove a folder of {ADAPTERS_FOLDER}, or build the bundle with more --adapters, for the cpu",
        )
    adapter = read_peft(folder, 1.0, Path(manifest.source.name))
    factors = _choose_factors(adapter, manifest.geometry)
    rank = _find_rank(adapter, factors, manifest)
    values = np.concatenate([part for it in factors.values() for part in _flatten(it, rank)])
    if not np.isfinite(values).all():
        raise CheckpointError(f"{folder}: factors times their scale are beyond float32; get the adapter again")
    with staging_folder(target) as staging:
        np.save(staging / FACTORS_FILE, values)
        digest = sha256_file(staging / FACTORS_FILE)
        made = AdapterManifest(ADAPTER_SCHEMA, manifest.source.fingerprint, rank, tuple(factors), digest)
        write_adapter_manifest(made, staging)
    return target, adapter.notes


def _choose_factors(adapter: Adapter, geometry: Geometry) -> dict[str, Factors]:
    """The factors by the bundle's names of linears; refuses what is no pair of factors of one of these."""
    if adapter.whole:
        raise CheckpointError(
            f"{adapter.folder}: it replaces {next(iter(adapter.whole))} (modules_to_save or bias), which no graph does "
            f"beside its model; {MERGE}"
        )
    found, example = {}, next(it.name for it in geometry.linears if it.is_open)
    rename = make_renamer(TEXT_PARTS)
    for own, item in adapter.factors.items():
        name = rename(own)
        name = name if name in geometry.linear else f"model.{name}"
        linear = geometry.linear.get(name)
        if item.magnitude is not None or item.embeds or linear is None or not linear.is_open:
            kind = "with DoRA" if item.magnitude is not None else "as an embedding" if item.embeds else ""
            raise CheckpointError(
                f"{adapter.folder}: it changes {own}{' ' * bool(kind)}{kind}, and beside a model only its layers' "
                f"linears are changed, such as {example}; {MERGE}"
            )
        shape, wanted = [len(item.b), item.a.shape[1]], [linear.outputs, linear.inputs]
        if shape != wanted:
            raise CheckpointError(
                f"{adapter.folder}: it changes {own} as {shape}, but the bundle has {wanted}; expected an adapter that "
                "was trained on its checkpoint"
            )
        found[name] = item
    return found


def _find_rank(adapter: Adapter, factors: Mapping[str, Factors], manifest: Manifest) -> int:
    rank = max(len(item.a) for item in factors.values())
    if rank > manifest.limits.rank:
        raise CheckpointError(
            f"{adapter.folder} has rank {rank}, and the bundle was built for {manifest.limits.rank}; build it with "
            f"--rank {rank}"
        )
    return rank


def _flatten(item: Factors, rank: int) -> tuple[Array, Array]:
    """a [rank, inputs] and b [rank, outputs], filled up with zeros, as rows behind one another."""
    lacking = ((0, rank - len(item.a)), (0, 0))
    pair = item.a, item.b.T * np.float32(item.scale)
    first, second = (np.pad(part, lacking).astype(np.float32).ravel() for part in pair)
    return first, second
