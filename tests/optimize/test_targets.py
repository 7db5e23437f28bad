"""Precisions by GPU: one table, which refusals, llmc doctor and the documentation have in common."""

import re
from pathlib import Path

import pytest

import llmc
from llmc.optimize.targets import TARGETS
from llmc.runtime.host.targets import PRECISIONS, RTX_GPUS, absent


def test_the_documentation_has_the_table():
    text = (Path(llmc.__path__[0]) / "optimize" / "README.md").read_text(encoding="utf-8")
    header, _, *rows = re.search(r"\| target \| fp32 .*?(?=\n\n)", text, re.S)[0].splitlines()
    names = [cell.strip() for cell in header.split("|")[2:-1]]
    found = {}
    for row in rows:
        target, *cells = [cell.strip(" `") for cell in row.split("|")[1:-1]]
        found[target] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    assert found == PRECISIONS


def test_every_precision_of_a_target_for_gpus_is_in_the_table():
    gpus = {name: set(target.precisions) for name, target in TARGETS.items() if target.has_gpu}
    assert gpus == {name: set(known) for name, known in PRECISIONS.items()}


@pytest.mark.parametrize(
    ("target", "capability", "expected"),
    [
        ("tensorrt-rtx", "7.5", {"bf16": "8.0", "int8": "8.0", "int4": "8.0", "fp8": "8.9"}),
        ("tensorrt-rtx", "8.6", {"fp8": "8.9"}),
        ("tensorrt", "7.5", {"bf16": "8.0", "int4": "8.0", "fp8": "8.9"}),
        ("tensorrt", "8.7", {"fp8": "8.9"}),
        ("tensorrt", "11.0", {}),
        ("cuda", "7.5", {}),
        ("cpu", "", {}),
    ],
)
def test_what_a_gpu_lacks_is_known_by_its_number(target: str, capability: str, expected: dict[str, str]):
    assert absent(target, capability) == expected


def test_the_list_of_gpus_is_the_librarys_own():
    library = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    names = {name for name in library.ComputeCapability.__members__ if name.startswith("SM")}
    assert names == {f"SM{gpu.replace('.', '')}" for gpu in RTX_GPUS}
