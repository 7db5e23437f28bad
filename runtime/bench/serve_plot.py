"""The picture of a load test: distributions of TTFT and ITL, and what happened when."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.bench.exchange import Exchange
from llmc.runtime.bench.pictures import new_figure, save_figure
from llmc.runtime.bench.serve_report import Point, ServeReport

INCHES, DPI = (13.0, 8.0), 110
BINS = 60  # of the timelines


def draw(path: Path, report: ServeReport, timelines: Sequence[Sequence[Exchange]]) -> None:
    """Write a PNG file: cumulative distributions above, timelines below, a colour for each point.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UsageError: the file cannot be written.
    """
    figure = new_figure(INCHES, DPI)
    ttft, itl, speed, flight = figure.subplots(2, 2).flat
    for point, exchanges in zip(report.points, timelines, strict=True):
        done = [each for each in exchanges if each.failure is None]
        name = name_of(point)
        draw_cumulative(ttft, [each.ttft + each.late for each in done], name)
        draw_cumulative(itl, [gap for each in done for gap in np.diff(each.chunks).tolist()], name)
        draw_timelines(speed, flight, exchanges, name)
    ttft.set(title="time to first token, from when due", xlabel="ms", ylabel="share of requests")
    itl.set(title="inter-token latency", xlabel="ms", ylabel="share of gaps")
    speed.set(title="pieces of output", xlabel="s", ylabel="per second")
    flight.set(title="requests in flight", xlabel="s")
    for axes in (ttft, itl, speed, flight):
        axes.grid(alpha=0.3)
    ttft.legend(fontsize=8)
    figure.suptitle(f"{report.model} at {report.server}", fontsize=10, parse_math=False)
    save_figure(figure, path)


def name_of(point: Point) -> str:
    """The point's name in the legend."""
    failed = f", {point.failed} failed" if point.failed else ""
    return f"{f'rate {point.rate:g}/s' if point.rate is not None else f'concurrency {point.concurrency}'}{failed}"


def draw_cumulative(axes: Any, seconds: Sequence[float], name: str) -> None:
    """The share of values up to each, on a log axis; gaps of nothing, in one packet, are drawn as a microsecond."""
    ordered = np.maximum(np.sort(np.asarray(seconds, float)), 1e-6) * 1e3
    axes.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post", label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(short_span_formatter())


def short_span_formatter() -> Any:
    """Plain numbers at the small ticks, where there are few large ones."""
    from matplotlib.ticker import LogFormatter

    return LogFormatter(minor_thresholds=(2, 0.4))


def draw_timelines(speed: Any, flight: Any, exchanges: Sequence[Exchange], name: str) -> None:
    """Pieces per second, and requests in flight, by the seconds since the first was due."""
    start = min(each.due for each in exchanges)
    end = max(max(each.ended for each in exchanges) - start, 1e-6)
    pieces, edges = np.histogram([at - start for each in exchanges for at in each.chunks], BINS, (0.0, end))
    speed.step(edges[:-1], pieces / (end / BINS), where="post", label=name)
    steps = sorted([(each.sent - start, 1) for each in exchanges] + [(each.ended - start, -1) for each in exchanges])
    flight.step([at for at, _ in steps], np.cumsum([step for _, step in steps]), where="post", label=name)
