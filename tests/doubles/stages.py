"""Bundles cut into stages, without building them anew."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.bundle import Manifest, read_bundle
from llmc.optimize.plan.borders import choose_borders
from llmc.optimize.split import split

TOKENIZER = 1_000_000  # bytes


def borders(manifest: Manifest, boxes: Sequence[int]) -> Any:
    return choose_borders(manifest.geometry, manifest.limits, manifest.recipe, TOKENIZER, boxes)


def cut(bundle: Path, folder: Path, count: int = 3) -> Path:
    """A copy of a bundle, in so many stages."""
    shutil.copytree(bundle, folder)
    manifest = read_bundle(folder)
    split(folder, manifest, borders(manifest, (0,) * count), lambda step, done=None: None)
    return folder
