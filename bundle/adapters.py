"""Adapters as ``llmc adapter add`` writes them into a bundle: a folder each, with its factors in one file."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from llmc.bundle.integrity import sha256_file
from llmc.bundle.manifest import ADAPTERS_FOLDER, MOST_MANIFEST, MOST_RANK, Version
from llmc.bundle.reading import refuse_to_leave
from llmc.errors import BundleError, LlmcError, UsageError, format_value
from llmc.strict import decode, read_json

ADAPTER_MANIFEST = "adapter.json"
FACTORS_FILE = "factors.npy"
ADAPTER_SCHEMA = 1
# Prefixes of a graph's inputs for factors; names of modules follow, joined by +.
FACTOR_A, FACTOR_B = "adapters.a.", "adapters.b."
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class AdapterManifest:
    """``adapter.json``: what the factors beside it change."""

    schema_version: Version
    base: str  # fingerprint of the checkpoint that the factors were checked against
    rank: Annotated[int, range(1, MOST_RANK + 1)]  # columns of every pair of factors
    # Names of linears. For each, in this order, the file holds a [rank, inputs] and b [rank, outputs].
    modules: Annotated[tuple[str, ...], range(1, 1 << 16)]
    sha256: str  # of the file


def check_name(name: object) -> str:
    """The name of an adapter, or UsageError for what cannot be one."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError("name", f"is {format_value(name)}, expected up to 64 letters, digits, '.', '_' and '-'")
    return name


def list_adapters(bundle: Path) -> dict[str, Path]:
    """The folders of the adapters that were added to a bundle, by name; no links, which may lead anywhere."""
    place = bundle / ADAPTERS_FOLDER
    entries = sorted(os.scandir(place), key=lambda entry: entry.name) if place.is_dir() else []
    return {it.name: place / it.name for it in entries if NAME.fullmatch(it.name) and it.is_dir(follow_symlinks=False)}


def read_adapter_manifest(folder: Path) -> AdapterManifest:
    """Read an adapter's manifest, and check that the file of its factors is the one that was written.
    Raises BundleError: it is no adapter that ``llmc adapter add`` wrote, or damaged."""
    for name in (ADAPTER_MANIFEST, FACTORS_FILE):
        refuse_to_leave(folder, name)
    try:
        manifest: AdapterManifest = decode(AdapterManifest, read_json(folder / ADAPTER_MANIFEST, MOST_MANIFEST))
        digest = sha256_file(folder / FACTORS_FILE)
    except (OSError, ValueError, LlmcError) as error:
        raise BundleError(
            f"it is no adapter that llmc adapter add wrote, or damaged ({getattr(error, 'strerror', error)})",
            "add it to the bundle again",
            path=folder,
        ) from error
    if manifest.schema_version != ADAPTER_SCHEMA or manifest.sha256 != digest:
        raise BundleError(f"{FACTORS_FILE} or the version of {ADAPTER_MANIFEST} changed", "add it again", path=folder)
    return manifest


def write_adapter_manifest(manifest: AdapterManifest, folder: Path) -> None:
    """Write the manifest into ``folder`` as indented JSON."""
    (folder / ADAPTER_MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
