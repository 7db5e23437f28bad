"""Folders as llmc publishes them."""

from pathlib import Path

from llmc.publish import staging_folder


def publish(target: Path, text: str, *, force: bool = False) -> None:
    """Put a bundle of one file there."""
    with staging_folder(target, force=force) as folder:
        (folder / "llmc.json").write_text(text)


def names(folder: Path) -> list[str]:
    """What it holds, hidden files too."""
    return sorted(path.name for path in folder.iterdir())
