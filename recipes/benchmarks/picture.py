"""Plot speed against quality from the JSON file of peers.py, as an SVG that is readable on light and dark pages.

    python picture.py peers.json -o speed_and_quality.svg --columns "prefill 512" "decode after 512"

Each panel plots one column of speed against the KL of its phase: further right is faster, further up is closer to the
unquantized model. KL has a logarithmic axis. Panels stand one below the other, so that a phone shows them readably.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LETTER = 480, 260, 7.0  # pixels: size of a panel, and width of a 13-pixel letter
LEFT, RIGHT, TOP, BOTTOM = 64, 72, 40, 48  # margins around the axes; names may reach into the right one
SMALLEST_KL = 1e-7  # a logarithmic axis has no 0
Box = tuple[float, float, float, float]  # left, right, top, bottom
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .axis { stroke: #8c959f } .grid { stroke: #d0d7de; stroke-dasharray: 2 3 }
  .small { font-size: 11px; fill: #57606a } .llmc { fill: #0969da } .peer { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .axis { stroke: #6e7681 } .grid { stroke: #30363d }
    .small { fill: #9198a1 } .llmc { fill: #58a6ff } .peer { fill: #f0883e }
  }
"""


def read_points(rows: Sequence[dict[str, Any]], column: str) -> list[tuple[str, str, float, float]]:
    """Class, name, median tokens per second and mean KL of each system that was timed and judged."""
    phase = column.split()[0]
    points = []
    for row in rows:
        speeds = [figures[column] for figures in row["rounds"] if column in figures]
        if speeds and phase in row["quality"]:
            kind = "llmc" if row["entry"]["runner"] == "llmc" else "peer"
            points.append(
                (
                    kind,
                    row["entry"]["name"],
                    statistics.median(speeds),
                    max(SMALLEST_KL, row["quality"][phase]["mean_kl"]),
                )
            )
    if not points:
        raise ValueError(f"no system has both a KL and {column!r}")
    return points


def ticks(largest: float) -> Iterator[float]:
    """Four or five round numbers from 0 to at least ``largest``."""
    step = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if step * factor * 5 >= largest * 1.05)
    return (step * number for number in range(math.ceil(largest * 1.05 / step) + 1))


def kl_ticks(smallest: float, largest: float) -> list[float]:
    """Powers of 10, and their double and quintuple, from below ``smallest`` to above ``largest``; both above 0."""
    exponents = range(math.floor(math.log10(smallest)) - 1, math.ceil(math.log10(largest)) + 2)
    marks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    first, last = (max(mark for mark in marks if mark < smallest), min(mark for mark in marks if mark > largest))
    return [mark for mark in marks if first <= mark <= last]


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def panel(rows: Sequence[dict[str, Any]], column: str, above: int) -> Iterator[str]:
    """One column of speed against quality, ``above`` pixels below the picture's edge. The smallest KL is at the top."""
    points = read_points(rows, column)
    speeds, judged = list(ticks(max(p[2] for p in points))), [p[3] for p in points]
    kls = kl_ticks(min(judged), max(judged))
    top, right, bottom = above + TOP, WIDTH - RIGHT, above + HEIGHT - BOTTOM

    def x(speed: float) -> float:
        return LEFT + speed / speeds[-1] * (right - LEFT)

    def y(kl: float) -> float:
        return top + math.log(kl / kls[0]) / math.log(kls[-1] / kls[0]) * (bottom - top)

    yield f'<text x="{LEFT}" y="{top - 18}">{escape(column)}; best: top right</text>'
    for speed in speeds:
        yield f'<line class="grid" x1="{x(speed):.1f}" y1="{top}" x2="{x(speed):.1f}" y2="{bottom}"/>'
        yield f'<text class="small" x="{x(speed):.1f}" y="{bottom + 16}" text-anchor="middle">{speed:g}</text>'
    for kl in kls:
        yield f'<line class="grid" x1="{LEFT}" y1="{y(kl):.1f}" x2="{right}" y2="{y(kl):.1f}"/>'
        yield f'<text class="small" x="{LEFT - 6}" y="{y(kl) + 4:.1f}" text-anchor="end">{kl:g}</text>'
    yield f'<path class="axis" fill="none" d="M{LEFT} {top}V{bottom}H{right}"/>'
    yield f'<text class="small" x="{right}" y="{bottom + 34}" text-anchor="end">tokens per second</text>'
    yield f'<text class="small" x="{LEFT - 6}" y="{top - 18}" text-anchor="end">KL, nats</text>'
    dots = [(x(speed), y(kl)) for _, _, speed, kl in points]
    taken = [(cx - 5, cx + 5, cy - 5, cy + 5) for cx, cy in dots]
    for (kind, name, _, _), (cx, cy) in zip(points, dots, strict=True):
        width = LETTER * len(name)
        # Anchor, and where the text is anchored: beside the dot, else below or above it.
        sides = [("start", cx + 9, cy), ("end", cx - 9, cy), *(("middle", cx, cy + by) for by in (18, -18, 34, -34))]
        shift = {"start": 0.0, "middle": width / 2, "end": width}
        boxes = [(tx - shift[at], tx - shift[at] + width, ty - 7, ty + 7) for at, tx, ty in sides]
        inside = [n for n, b in enumerate(boxes) if b[0] > LEFT and b[1] <= WIDTH and b[2] >= top and b[3] < bottom]
        chosen = next((n for n in inside if not any(overlap(boxes[n], other) for other in taken)), 0)
        taken.append(boxes[chosen])
        anchor, tx, ty = sides[chosen]
        yield f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="5"/>'
        yield f'<text class="{kind}" x="{tx:.1f}" y="{ty + 4:.1f}" text-anchor="{anchor}">{escape(name)}</text>'


def draw(document: dict[str, Any], columns: Sequence[str]) -> str:
    """The whole picture. Raises ValueError: a column that no judged system was timed in."""
    parts = [part for number, column in enumerate(columns) for part in panel(document["rows"], column, HEIGHT * number)]
    title = f"Speed beside quality, {document['machine']['cpu']}, {document['date'][:10]}"
    height = HEIGHT * len(columns)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([start, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="JSON file of peers.py")
    parser.add_argument("-o", "--output", type=Path, default=Path("speed_and_quality.svg"))
    parser.add_argument("--columns", nargs="+", default=["prefill 512", "decode after 512"], help="columns of speed")
    args = parser.parse_args()
    args.output.write_text(draw(json.loads(args.figures.read_text("utf-8")), args.columns), encoding="utf-8")


if __name__ == "__main__":
    main()
