"""Which of llmc's folders the user named: a checkpoint, an export or a bundle."""

import os
from pathlib import Path
from typing import Any

import click

from llmc.bundle import BUNDLE_MANIFEST, CONFIG_FILE, EXPORT_MANIFEST
from llmc.errors import BundleError


def unbuilt(folder: Path) -> str | None:
    """What a folder is that a bundle can be built of, ``an export`` or ``a checkpoint``; None for any other folder."""
    if (folder / BUNDLE_MANIFEST).exists():
        return None
    kinds = {EXPORT_MANIFEST: "an export", CONFIG_FILE: "a checkpoint"}  # an export has a config.json too
    return next((kind for name, kind in kinds.items() if (folder / name).exists()), None)


def build_command_for(folder: Path) -> str:
    """How to build a bundle of it."""
    return f"llmc build {folder} -o BUNDLE"


class BundleFolder(click.Path):
    """An existing folder that is no export and no checkpoint; whether it is a bundle is for its reader to say."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            BundleError: a bundle has yet to be built of it.
        """
        folder = Path(os.fsdecode(super().convert(value, param, ctx)))
        if kind := unbuilt(folder):
            raise BundleError(f"{folder} is {kind}, expected a bundle; build one with: {build_command_for(folder)}")
        return folder
