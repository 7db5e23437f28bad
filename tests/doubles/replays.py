"""The replay of a finished bundle without a process of its own, which would know nothing of other doubles."""

from pathlib import Path

from llmc.optimize.judge import finished
from llmc.runtime import LoadedBundle
from llmc.runtime.selftest import replay


def in_this_process(folder: Path, emulate: bool) -> tuple[str, str]:
    """What the process would answer where all is well; errors come as they are."""
    with finished.load(folder, kind=LoadedBundle, self_test=False, emulate=emulate) as model:
        replay(model)
    return "", ""
