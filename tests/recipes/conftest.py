"""What the tests of recipes need: benchmark scripts as modules, and an export of every family."""

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from doubles.modules import random_checkpoints
from doubles.tiny import BASE

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
# Of the random checkpoints one per family that a recipe is built on.
CASE_OF_FAMILY = {"phi3": "phi3-packed-window-fp16", "gemma2": "gemma2-softcaps", "gpt2": "gpt2-scale-by-layer"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a benchmark script; what it left in ``sys.modules`` is forgotten afterwards.

    The benchmarks are plain scripts that import each other from their own folder.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module


def write_character_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token per character, so that a text can be read."""
    from tokenizers import Tokenizer, models

    characters = ["\n", *map(chr, range(32, 127))][:vocab_size]
    Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="?")).save(
        str(folder / "tokenizer.json")
    )


@pytest.fixture(scope="session")
def family_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of random weights that can read text, of the family that the test names."""
    folder, source = tmp_path_factory.mktemp(request.param), random_checkpoints()
    made = source.make_case(CASE_OF_FAMILY[request.param], tmp_path_factory).export
    own = Path(shutil.copytree(made, folder / "export", ignore=shutil.ignore_patterns("tokenizer.json")))
    write_character_tokenizer(own, BASE["vocab_size"])
    return own
