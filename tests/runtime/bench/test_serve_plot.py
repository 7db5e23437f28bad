"""The picture has a line for each point in each of its four parts."""

from pathlib import Path

import pytest
from doubles.planted_server import planted_server, whole

from llmc.errors import UsageError
from llmc.runtime.bench import serve_plot
from llmc.runtime.bench.serve_load import LoadSettings, serve_load

pytest.importorskip("matplotlib")


def test_each_point_is_a_line_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = []
    save = serve_plot.save_figure
    monkeypatch.setattr(serve_plot, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    with planted_server(whole) as server:
        found = serve_load(LoadSettings(url=server.url, requests=2, max_tokens="3", concurrency=(1, 2)))
    serve_plot.draw(tmp_path / "p.png", *found)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    lines = [[line.get_label() for line in axes.lines] for axes in figures[0].axes]
    assert lines == [["concurrency 1", "concurrency 2"]] * 4
    ttft = figures[0].axes[0].lines[0]
    assert list(ttft.get_ydata()) == [0.5, 1.0]
    assert list(ttft.get_xdata()) == pytest.approx(sorted((e.ttft + e.late) * 1e3 for e in found[1][0]))


def test_where_everything_failed_there_is_still_a_picture(tmp_path: Path):
    with planted_server(lambda asked: [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"]) as server:
        found = serve_load(LoadSettings(url=server.url, requests=2, model="m", usage=False, warm_up=0, rate=(900.0,)))
    serve_plot.draw(tmp_path / "p.png", *found)
    assert (tmp_path / "p.png").exists()
    with pytest.raises(UsageError, match="cannot write here"):
        serve_plot.draw(tmp_path / "nowhere" / "p.png", *found)
