"""``llmc eval``: the figures in a table, and as JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

PATH_KEYS = {"perplexity", "mean_kl", "p99_kl", "top1_agreement"}
WINDOW = 32
LIMITS = ("--window", WINDOW, "--max-windows", 2, "--threads", 1)


@pytest.fixture(scope="module")
def text(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "notes.txt"
    path.write_text((tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return path


def test_json_has_the_figures_of_the_worse_path_and_of_each(llmc, tiny_bundle, tiny_export, text):
    ran = llmc("eval", tiny_bundle, "--text", text, "--reference", tiny_export, *LIMITS, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report.keys() >= PATH_KEYS | {"reference_perplexity", "phases", "greedy_match", "positions", "window"}
    assert report["phases"].keys() == {"prefill", "decode"}
    assert all(path.keys() == PATH_KEYS for path in report["phases"].values())
    assert report["mean_kl"] == max(path["mean_kl"] for path in report["phases"].values())
    assert (report["positions"], report["window"], report["text"]) == (2 * (WINDOW - 1), WINDOW, "notes.txt")
    assert report["layers"] == []


def test_the_table_names_text_paths_and_layers(llmc, tiny_bundle, tiny_export, text):
    ran = llmc("eval", tiny_bundle, "--text", text, "--reference", tiny_export, *LIMITS, "--layers")
    assert ran.code == 0
    for words in ("notes.txt, 62 positions", "prefill quality", "decode quality", "p99", "unquantized model", "greedy"):
        assert words in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.startswith(("model.", "lm_head"))]
    assert [row[0] for row in rows] == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(6)), "lm_head"]
    assert all(float(row[1]) > 20 and float(row[3]) > 20 for row in rows)


def test_without_a_text_llmcs_own_is_used_and_said(llmc, tiny_bundle):
    ran = llmc("eval", tiny_bundle, *LIMITS, "--json")
    assert ran.code == 0
    assert "no --text was given" in ran.err
    report = json.loads(ran.out)
    assert report["perplexity"] > 1
    assert report["mean_kl"] is report["reference_perplexity"] is report["greedy_match"] is None


def test_a_report_has_the_numbers_of_the_json(llmc, tiny_bundle, tiny_export, text, tmp_path):
    page = tmp_path / "quality.html"
    page.write_text("an older one")
    asked = ("eval", tiny_bundle, "--text", text, "--reference", tiny_export, *LIMITS, "--report", page)
    report = json.loads(llmc(*asked, "--json").out)
    shown = [float(value) for value in re.findall(r'<data value="(.*?)">', page.read_text(encoding="utf-8"))]
    numbers = [value for path in report["phases"].values() for value in path.values()]
    numbers += [each["mean_kl"] for each in report["layers"]] + [each["kl"] for each in report["losses"]]
    numbers += [each["bytes"] for each in report["better"]]
    assert len(report["layers"]) == 2 * 8 and len(report["losses"]) == 2 * 8 and report["better"]
    assert set(numbers) <= set(shown)
    assert f"--report {page}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", [("--layers",), ("--report", "quality.html")])
def test_layers_and_a_report_need_a_reference(llmc, tiny_bundle, text, option):
    ran = llmc("eval", tiny_bundle, "--text", text, *option)
    assert ran.code == 2
    assert "--reference" in ran.err


def test_a_report_goes_neither_into_the_bundle_nor_over_other_kinds_of_files(llmc, tiny_bundle, tiny_export, tmp_path):
    for path in (tiny_bundle / "quality.html", tmp_path / "notes.txt", tmp_path / "no" / "quality.html"):
        ran = llmc("eval", tiny_bundle, "--reference", tiny_export, "--report", path)
        assert (ran.code, path.exists()) == (2, False)
        assert "--report is " in ran.err
