"""Precisions by GPU: one table, which refusals, llmc doctor and the documentation have in common."""

import re
from pathlib import Path

import pytest
from doubles.machines import NO_GPU, ORIN, RTX_4090, THOR

import llmc
from llmc.optimize.order import take_order
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.recipe.engine import EngineRequest
from llmc.optimize.targets import LARGE_GPU, TARGETS, capabilities_for
from llmc.runtime.diagnose.targets import PRECISIONS, list_absent_precisions
from llmc.runtime.sessions.tensorrt.library import nameable_gpus

PAGES = Path(llmc.__path__[0]) / "recipes"


def rows_of(page: str, header: str) -> list[list[str]]:
    """Cells of a table: its header, which begins so, and its rows."""
    lines = re.search(rf"^\| {re.escape(header)} .*?(?=\n\n)", (PAGES / page).read_text(encoding="utf-8"), re.S | re.M)
    assert lines is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines() if "---" not in line]


def test_the_documentation_has_the_table():
    (_, _, *targets), *rows = rows_of("gpu.md", "precision | weights")
    found: dict[str, dict[str, str]] = {target.strip("`"): {} for target in targets}
    for name, _, *firsts in rows:
        for target, first in zip(found, firsts, strict=True):
            if first:
                found[target][name.split("`")[1].removeprefix("--")] = first.strip(" *†")
    assert found == PRECISIONS


def test_the_table_of_boards_refuses_what_a_board_lacks():
    (_, _, *names), *rows = rows_of("jetson.md", "JetPack, TensorRT")
    for _, boards, *cells in rows:
        lacking = {name for gpu in re.findall(r"\d+\.\d", boards) for name in list_absent_precisions("tensorrt", gpu)}
        refused = {name.split()[0] for name, cell in zip(names, cells, strict=True) if "refused" in cell}
        assert refused == lacking, boards


def test_every_precision_of_a_target_for_gpus_is_in_the_table():
    gpus = {name: set(target.precisions) for name, target in TARGETS.items() if target.has_gpu}
    assert gpus == {name: set(known) for name, known in PRECISIONS.items()}


@pytest.mark.parametrize(
    ("target", "capability", "expected"),
    [
        ("tensorrt-rtx", "7.5", {"bf16": "8.0", "int8": "8.0", "int4": "8.0"}),
        ("tensorrt-rtx", "8.6", {}),
        ("tensorrt", "7.5", {"bf16": "8.0", "int4": "8.0"}),
        ("tensorrt", "11.0", {}),
        ("cuda", "7.5", {}),
        ("cpu", "", {}),
    ],
)
def test_what_a_gpu_lacks_is_known_by_its_number(target, capability, expected):
    assert list_absent_precisions(target, capability) == expected


def test_the_page_names_the_gpus_that_the_library_lists():
    library = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this machine")
    text = " ".join((PAGES / "gpu.md").read_text(encoding="utf-8").split())
    *most, last = nameable_gpus(library)
    assert f"TensorRT-RTX lists {', '.join(most)} and {last}," in text


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize(
    ("probe", "deferred", "chunk"),
    [(RTX_4090, None, 1024), (THOR, None, 1024), (ORIN, None, 256), (NO_GPU, None, 256), (RTX_4090, True, 256)],
)
def test_tensorrts_chunks_are_long_where_the_engines_gpu_is_large(
    tiny_export, monkeypatch, target, probe, deferred, chunk
):
    """An engine that is deferred is for another GPU than the one here."""
    monkeypatch.setattr("llmc.runtime.host.probe.probe_driver", lambda: probe.driver)

    def limit(**asked: int) -> int:
        request = BuildRequest(tiny_export, target=target, engine=EngineRequest(deferred=deferred), **asked)
        return take_order(request).limits.prefill_chunk

    assert limit() == chunk
    assert limit(prefill_chunk=300) == 300
    assert limit(max_context=200) == 200


def test_other_targets_chunks_do_not_depend_on_the_gpu_which_is_not_looked_for(monkeypatch):
    monkeypatch.setattr("llmc.runtime.host.probe.probe_driver", lambda: pytest.fail("the GPU was looked for"))
    assert {name: capabilities_for(name, None).chunk for name in ("cpu", "cuda")} == {"cpu": 256, "cuda": 2048}
    bounds = {size: capabilities_for("tensorrt", size).chunk for size in (0, LARGE_GPU, LARGE_GPU + 1)}
    assert bounds == {0: 256, LARGE_GPU: 256, LARGE_GPU + 1: 1024}


def test_weights_are_unsigned_only_where_integers_are_multiplied(tiny_export: Path, monkeypatch):
    monkeypatch.setattr("llmc.optimize.order.saturates", lambda: True)
    orders = {it: take_order(BuildRequest(tiny_export, precision=it)) for it in ("int8", "fp32")}
    assert {precision: order.unsigned for precision, order in orders.items()} == {"int8": True, "fp32": False}
