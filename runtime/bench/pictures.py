"""Pictures of what was measured, as PNG files. They need matplotlib, which the extra ``plot`` brings."""

import os
from pathlib import Path
from typing import Any

from llmc.errors import UsageError, require


def new_figure(inches: tuple[float, float], dpi: int) -> Any:
    """A figure that is drawn into memory, whatever display there is.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write the PNG beside its place and move it there, so that no half of it is ever seen.

    Raises:
        UsageError: the file cannot be written.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.png")
    try:
        figure.savefig(staging, format="png")
        staging.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write here ({error.strerror}); choose another file") from error
    finally:
        staging.unlink(missing_ok=True)
