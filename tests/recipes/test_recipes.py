"""Recipes: each is understood, builds for every family, and costs on the small model what it says.

The figures are of the first windows of the small model's validation text, after calibrating on its calibration text:
the same windows that ``recipes/benchmarks/peers.py`` compares with llama.cpp.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.bundle import Budget, Quality
from llmc.optimize.build import build
from llmc.optimize.calibrate.text import CalibrationSamples
from llmc.optimize.judge.evaluate import evaluate
from llmc.optimize.recipe import BuildRequest, Expected, needs_calibration, read_recipe, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime import load
from llmc.runtime.selftest import replay

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))

EXPECTED = {path.stem: expected for path in RECIPES if (expected := read_recipe(path).expected)}
FOR_ENGINES = "w8a8-static"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_for_and_serves_every_model(path):
    """A budget or a limit that suits one model would fail another's build."""
    request = read_recipe(path)
    target = capabilities("tensorrt" if path.stem == FOR_ENGINES else "cpu")
    with_text, without = (resolve(request, target, 2048, path.stem, flag)[0] for flag in (True, False))
    # Those that calibrate where they can, and are built where they cannot.
    assert with_text == without or path.stem in ("int8", "int8-fast", "int4")
    assert with_text.name == path.stem
    assert request.description.endswith(".") and (request.expected is None) == (path.stem == FOR_ENGINES)
    assert (request.budget or Budget()) == Budget()
    assert (request.max_context, request.max_batch, request.prefill_chunk) == (None, None, None)


def rows_of_the_table() -> dict[str, tuple[str, ...]]:
    """The table of recipes in their README: name -> memory, prefill KL, decode KL and agreement, as printed."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.]+ MB) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+ %) \|$", text, re.M)
    return {name: tuple(figures) for name, *figures in rows}


def printed(expected: Expected) -> tuple[str, ...]:
    agreement = f"{100 * expected.decode_top1_agreement:.1f} %"
    return f"{expected.prefill_mean_kl:.5f}", f"{expected.decode_mean_kl:.5f}", agreement


def test_the_table_of_recipes_holds_what_the_recipes_expect():
    figures = {name: row[1:] for name, row in rows_of_the_table().items()}
    assert figures == {name: printed(expected) for name, expected in EXPECTED.items()}


def decoder(export: Path, device: str) -> Any:
    from llmc.export.streaming import StreamedDecoder

    return StreamedDecoder(export, device)


def build_recipe(path: Path, export: Path, output: Path, **calibration: Any) -> Path:
    """Build a shipped recipe, calibrated if it wants to be."""
    recipe, _ = resolve(read_recipe(path), capabilities("cpu"), 2048, path.stem, calibrated=True)
    return build(BuildRequest(export, output, recipe=path, **(calibration if needs_calibration(recipe) else {}))).output


@pytest.mark.parametrize(
    ("family_export", "paths"),
    # Softcaps, learned positions, and packed weights; every family is built by the tests of export. Other recipes are
    # built below, and int4 by most tests.
    [
        ("gemma2", [FOLDER / "int4-quality.toml"]),
        ("gpt2", [FOLDER / "int8-fast.toml"]),
        ("phi3", [FOLDER / "int8.toml"]),
    ],
    ids=["gemma2", "gpt2", "phi3"],
    indirect=["family_export"],
)
def test_recipes_build_verify_and_generate_for_families(paths, family_export, tmp_path, tiny_checkpoint):
    text = tiny_checkpoint.parent / "calibration.txt"
    request = {"decoder": decoder, "calibration": text, "samples": 8, "length": 16}
    for path in paths:
        output = build_recipe(path, family_export, tmp_path / path.stem, **request)
        with load(output, threads=1) as model:
            assert model.manifest.recipe.name == path.stem
            report = replay(model)
            assert report.equal_tokens == report.tokens
            assert report.tokens > 0
            assert len(model.generate("def f(x):", max_tokens=5, temperature=0, ignore_eos=True).token_ids) == 5


@pytest.mark.parametrize("family_export", ["gemma2"], indirect=True)
def test_a_stream_that_cannot_be_rotated_is_smoothed_where_there_is_a_text(family_export, tmp_path, tiny_checkpoint):
    text = tiny_checkpoint.parent / "calibration.txt"
    request = {"decoder": decoder, "calibration": text, "samples": 8, "length": 16}
    smoothed = build(BuildRequest(family_export, tmp_path / "smoothed", **request)).manifest
    assert (smoothed.recipe.smoothing, smoothed.recipe.calibration is None) == (0.6, False)
    plain = build(BuildRequest(family_export, tmp_path / "plain")).manifest
    assert plain.recipe.smoothing == 0
    assert [any("are smoothed" in note for note in each.notes) for each in (smoothed, plain)] == [False, True]


# What the figures in the recipes and in their README are of. 142 samples instead lower the KL of int4 by 2 %.
CALIBRATION_SAMPLES, CALIBRATION_LENGTH = 32, 256
WINDOWS, WINDOW = 24, 256

# Another CPU adds float32 in another order and rounds activations in other places (a machine without VNNI has other
# kernels), and GPTQ hands every rounding on to what follows. Calibrating with torch's AVX2 kernels instead of AVX-512
# moved the KL by 3 % and the agreement by 0.004.
SAME_KL = 0.10
SAME_AGREEMENT = 0.01
# In nats per token. On these windows llama.cpp's Q4_K_M has 0.0138 at 5.04 bits (recipes/benchmarks/peers.py).
INT8_KL = 0.0008
INT4_KL = 0.0138


@dataclass(frozen=True)
class Measured:
    """A bundle of the small model: its quality, and the bytes of its graphs' weights."""

    quality: Quality
    weight_bytes: int


@pytest.fixture
def measured(tiny_export: Path, tiny_checkpoint: Path, tmp_path: Path) -> Measured:
    """The small model, built by the recipe that is the default."""
    texts = tiny_checkpoint.parent
    text = (texts / "validation.txt").read_text(encoding="utf-8")
    request = {"decoder": decoder, "calibration": texts / "calibration.txt"}
    output = build_recipe(
        FOLDER / "int8.toml",
        tiny_export,
        tmp_path / "int8",
        samples=CALIBRATION_SAMPLES,
        length=CALIBRATION_LENGTH,
        **request,
    )
    with load(output, threads=1, self_test=False) as model:
        ids = model.tokenizer.encode(text, add_special_tokens=False)[: WINDOWS * WINDOW]
        windows = CalibrationSamples(np.reshape(ids, (WINDOWS, WINDOW)), "validation", "", False, len(ids))
        found = evaluate(model, windows, reference=tiny_export, cache=tmp_path / "reference", greedy=False).quality
        graphs = {graph.file: graph.weight_bytes for graph in model.manifest.graphs.values()}
        return Measured(found, sum(graphs.values()))


def as_expected(found: Measured, expected: Expected) -> bool:
    prefill, decode = found.quality.phases["prefill"], found.quality.phases["decode"]
    return (
        prefill.mean_kl == pytest.approx(expected.prefill_mean_kl, rel=SAME_KL)
        and decode.mean_kl == pytest.approx(expected.decode_mean_kl, rel=SAME_KL)
        and decode.top1_agreement == pytest.approx(expected.decode_top1_agreement, abs=SAME_AGREEMENT)
    )


@pytest.mark.slow
def test_the_default_costs_what_its_recipe_says_and_not_what_others_say(measured):
    """``recipes/benchmarks/peers.py`` measures the others."""
    assert as_expected(measured, EXPECTED["int8"]), measured.quality.phases
    assert rows_of_the_table()["int8"][0] == f"{measured.weight_bytes / 1e6:.1f} MB"
    # int8-fast loses as much, with other weights in decode.
    others = [expected for other, expected in EXPECTED.items() if other not in ("int8", "int8-fast")]
    assert [expected for expected in others if as_expected(measured, expected)] == []


def test_recipes_stay_within_their_bars_and_rank_as_their_names_say():
    kl = {name: expected.decode_mean_kl for name, expected in EXPECTED.items()}
    assert max(kl["int8"], EXPECTED["int8"].prefill_mean_kl) <= INT8_KL
    assert min(kl, key=kl.get) == "int8-exact"
    assert kl["int4-quality"] < kl["int4"] < INT4_KL
