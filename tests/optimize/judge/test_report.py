"""The page of a bundle's quality in a browser: its numbers, its looks, what hostile texts do in it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.browsing import chromium, uncomplaining, violations

from llmc.bundle import Manifest, list_unlisted_files, read_bundle, verify_files
from llmc.optimize.build import build
from llmc.optimize.judge.evaluate import Evaluation, Loss
from llmc.optimize.judge.layers import LayerError
from llmc.optimize.judge.report import QUALITY_PAGE, Better, list_better, render
from llmc.optimize.recipe import BuildRequest
from llmc.publish import refuse_to_overwrite

CONTEXT = 32
COMMAND = "llmc build checkpoint -o 'a <b>' --int4 --report"
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>\u202e&amp;"
PHONE = {"viewport": {"width": 360, "height": 800}, "color_scheme": "dark"}
DESKTOP = {"viewport": {"width": 1200, "height": 800}, "color_scheme": "light"}
# Largest relative difference of a planned size: norms, biases and graphs are not planned, a 20th of the small model.
SIZE_TOLERANCE = 0.1


@pytest.fixture(scope="module")
def bundle(tiny_export: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that was built with its page."""
    folder = tmp_path_factory.mktemp("report")
    text = (tiny_checkpoint.parent / "validation.txt").read_text(encoding="utf-8")[:2000]
    (folder / "short.txt").write_text(text, encoding="utf-8")
    request = BuildRequest(
        tiny_export, folder / "bundle", precision="int4", max_context=CONTEXT, text=folder / "short.txt", report=COMMAND
    )
    return build(request).output


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(params=[PHONE, DESKTOP], ids=["phone, dark", "desktop, light"])
def page(browser: Any, bundle: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The bundle's page; it may ask for nothing but itself."""
    context = browser.new_context(**request.param)
    page, asked = context.new_page(), []
    page.on("request", lambda each: asked.append(each.url))
    with uncomplaining(page):
        page.goto((bundle / QUALITY_PAGE).as_uri())
        yield page
    assert asked == [(bundle / QUALITY_PAGE).as_uri()]
    context.close()


def values(page: Any, table: str) -> list[float]:
    return [float(each.get_attribute("value")) for each in page.locator(f"{table} data").all()]


def test_numbers_of_the_page_are_those_of_the_manifest(page, bundle: Path):
    quality = read_bundle(bundle).quality
    paths = [quality.phases["prefill"], quality.phases["decode"]]
    names = ("mean_kl", "p99_kl", "top1_agreement", "perplexity")
    expected = [getattr(path, name) for name in names for path in paths]
    assert values(page, "#phases") == [*expected, quality.reference_perplexity]
    layers = values(page, "#layers")
    assert len(layers) == 2 * (read_bundle(bundle).geometry.layers + 2)
    bars = [each.bounding_box()["width"] for each in page.locator("#layers rect").all()]
    assert bars.index(max(bars)) == layers.index(max(layers))
    decode = values(page, "#losses-decode")
    assert decode == sorted(decode, reverse=True) and decode[0] >= paths[1].p99_kl


def test_the_page_fits_reads_and_follows_the_theme(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert violations(page) == []


def test_the_page_says_how_it_was_measured(page):
    details = page.locator("#details").inner_text()
    assert COMMAND in details and "threads" in details and "rtn" in details


def test_the_page_is_a_file_of_the_bundle(bundle: Path):
    manifest = read_bundle(bundle)
    assert QUALITY_PAGE in [*verify_files(bundle, manifest)]
    assert list_unlisted_files(bundle, manifest) == ()
    refuse_to_overwrite(bundle, force=True)  # no file of someone else


def test_better_recipes_are_planned_up_to_the_one_that_rounds_nothing(bundle: Path, tiny_in):
    better = {each.option: each.bytes for each in list_better(bundle, read_bundle(bundle))}
    assert list(better) == ["--recipe int4-quality", "--int8", "--recipe int8-exact", "--fp32"]
    for precision in ("int8", "fp32"):
        actual = sum(entry.size for entry in read_bundle(tiny_in(precision)).files.values())
        assert better[f"--{precision}"] == pytest.approx(actual, rel=SIZE_TOLERANCE)


def test_hostile_texts_stay_text(browser, bundle: Path, tmp_path: Path):
    manifest: Manifest = read_bundle(bundle)
    manifest = dataclasses.replace(manifest, source=dataclasses.replace(manifest.source, name=HOSTILE))
    losses = (Loss("decode", 0, 3, 0.5, HOSTILE, HOSTILE, "\x1b[2J\n"),)
    layers = [LayerError("lm_head", phase, 0.1, 0.2) for phase in ("prefill", "decode")]
    html = render(manifest, Evaluation(manifest.quality, losses), layers, [Better("--int8", None)], HOSTILE)
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    page = browser.new_page()
    with uncomplaining(page):
        page.goto((tmp_path / "page.html").as_uri())
        assert page.title().startswith("Quality of <script>")
        assert page.locator("script, img, b, iframe, link").count() == 0
        assert page.locator(".losses code").all_inner_texts()[2] == "\\x1b[2J↵"
        assert "\u202e" not in page.content()
    page.close()


def test_the_policy_lets_nothing_else_run_or_load(browser, bundle: Path, tmp_path: Path):
    """A planted script and style do nothing."""
    html = (bundle / QUALITY_PAGE).read_text(encoding="utf-8")
    planted = "<script>document.title = 'taken'</script><style>body { background: red !important }</style></main>"
    (tmp_path / "page.html").write_text(html.replace("</main>", planted), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title().startswith("Quality of ")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 0, 0)"
    page.close()
