"""Plots are PNG files that hold what they were given, whole or not at all."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmc.errors import UsageError
from llmc.optimize.auto import plots
from llmc.optimize.judge.layers import LayerError

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"
ERRORS = [
    LayerError(name, phase, noise)
    for phase, noise in (("prefill", 0.001), ("decode", 0.01))
    for name in ("model.embed_tokens", *(f"model.layers.{i}" for i in range(40)), "lm_head")
]
DIVERGENCES = {
    "prefill": np.random.default_rng(0).exponential(0.01, 500),
    "decode": np.random.default_rng(1).exponential(0.03, 500),
}


@dataclass(frozen=True)
class Row:
    name: str
    threads: int
    mean_kl: float
    seconds: float


ROWS = [Row("int4", 2, 0.04, 1.0), Row("int4", 1, 0.04, 1.5), Row("int8", 2, 0.001, 1.8), Row("fp32", 2, 0.0, 5.0)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Figures as they are saved."""
    figures = []
    save = plots.save_figure
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


def test_the_quality_plot_shows_both_paths_in_both_halves(tmp_path: Path, drawn):
    plots.quality(tmp_path / "q.png", ERRORS, DIVERGENCES, "a bundle")
    assert (tmp_path / "q.png").read_bytes().startswith(PNG)
    left, right = drawn[0].axes
    heights = {line.get_label(): set(line.get_ydata()) for line in left.get_lines()}
    assert {label: [round(y) for y in ys] for label, ys in heights.items()} == {"prefill": [30], "decode": [20]}
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert [label.partition(",")[0] for label in labels] == ["prefill", "decode"]
    assert right.get_xscale() == "log"


def test_the_pareto_plot_marks_the_chosen_one(tmp_path: Path, drawn):
    plots.pareto(tmp_path / "p.png", ROWS, ROWS[2])
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["1", "2", "3", "4"]
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["1: int4, 2 threads", "2: int4, 1 threads", "3: int8, 2 threads (chosen)", "4: fp32, 2 threads"]
    [line] = drawn[0].axes[0].get_lines()
    assert list(line.get_xdata()) == [1.0, 1.8, 5.0]


def test_the_front_has_what_nothing_beats_in_both():
    assert plots.front(ROWS) == [ROWS[0], ROWS[2], ROWS[3]]
    assert plots.front([]) == []
    assert plots.front([Row("a", 1, 0.1, 1.0), Row("b", 1, 0.1, 1.0)]) == [Row("a", 1, 0.1, 1.0)]


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot write here"):
        plots.pareto(tmp_path / "nowhere" / "p.png", ROWS, ROWS[0])
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="cannot write here"):
        plots.pareto(tmp_path / "folder.png", ROWS, ROWS[0])
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
