"""Plots of what was measured, as PNG files. They need matplotlib, which the extra 'plot' brings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.optimize.judge.layers import LayerError
from llmc.optimize.judge.quality import Double
from llmc.runtime.bench.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from llmc.optimize.auto.search import Trial

INCHES, DPI = (12.0, 4.5), 120
COLOURS = {"prefill": "tab:blue", "decode": "tab:orange"}
# Rounding of float64 makes KL of equal distributions a little more or less than zero; on a log axis it needs a floor.
SMALLEST_DRAWN_KL = 1e-5
SMALLEST_KL = 1e-12
BINS = 60


def quality(path: Path, errors: Sequence[LayerError], divergences: Mapping[str, Double], title: str) -> None:
    """Draw the signal to noise of each layer, and the histogram of KL over positions, for each path, into a PNG
    file."""
    figure = new_figure(INCHES, DPI)
    left, right = figure.subplots(1, 2)
    _draw_layers(left, errors)
    _draw_histogram(right, divergences)
    figure.suptitle(title)
    save_figure(figure, path)


def pareto(path: Path, candidates: Sequence["Trial"], chosen: "Trial") -> None:
    """Draw the KL of candidates against their time, the front of the best and the chosen one, into a PNG file."""
    figure = new_figure(INCHES, DPI)
    axes = figure.subplots()
    best = front(candidates)
    axes.plot([c.seconds for c in best], [_drawn(c) for c in best], color="tab:gray", linestyle="--", zorder=1)
    for number, candidate in enumerate(sorted(candidates, key=lambda c: c.seconds), 1):
        # Names beside the points would hide one another: numbers there, names in the legend, the fastest first.
        kept = candidate == chosen
        look = {"s": 120, "marker": "*", "color": "tab:red"} if kept else {"s": 25, "marker": "o", "color": "tab:blue"}
        name = f"{number}: {candidate.name}, {candidate.threads} threads{' (chosen)' if kept else ''}"
        axes.scatter(candidate.seconds, _drawn(candidate), label=name, **look)
        place = (candidate.seconds, _drawn(candidate))
        axes.annotate(str(number), place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(
        yscale="log", xlabel="seconds for the prompt and the answer", ylabel="mean KL to the unquantized model, nats"
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    save_figure(figure, path)


def _drawn(candidate: "Trial") -> float:
    """Mean KL as it is drawn: below this nobody tells bundles apart, and fp32's 1e-12 would flatten all the others."""
    return max(candidate.mean_kl, SMALLEST_DRAWN_KL)


def front(candidates: Sequence["Trial"]) -> list["Trial"]:
    """Candidates that no other beats in both time and KL, the fastest first."""
    best: list[Trial] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.mean_kl)):
        if not best or candidate.mean_kl < best[-1].mean_kl:
            best.append(candidate)
    return best


def _draw_layers(axes: Any, errors: Sequence[LayerError]) -> None:
    """Decibels by layer, in the model's order: embedding, layers, head."""
    names = list(dict.fromkeys(error.name for error in errors))
    for phase, colour in COLOURS.items():
        of_phase = [error for error in errors if error.phase == phase]
        places = [names.index(error.name) for error in of_phase]
        axes.plot(places, [error.decibels for error in of_phase], marker="o", markersize=4, color=colour, label=phase)
    step = max(1, len(names) // 16)
    axes.set_xticks(
        range(0, len(names), step), [name.rpartition(".")[2] for name in names[::step]], rotation=60, fontsize=8
    )
    axes.set(title="each layer on its own", ylabel="signal to noise, dB (higher is better)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_histogram(axes: Any, divergences: Mapping[str, Double]) -> None:
    everything = np.concatenate([np.maximum(kl, SMALLEST_KL) for kl in divergences.values()])
    bins = np.geomspace(everything.min() / 1.01, everything.max() * 1.01, BINS + 1)
    for phase, kl in divergences.items():
        floored = np.maximum(kl, SMALLEST_KL)
        axes.hist(floored, bins, histtype="step", color=COLOURS[phase], label=f"{phase}, mean {kl.mean():.2g}")
        axes.axvline(max(float(kl.mean()), SMALLEST_KL), color=COLOURS[phase], linestyle=":")
    axes.set(xscale="log", title="KL of each position", xlabel="KL(unquantized || bundle), nats", ylabel="positions")
    axes.grid(alpha=0.3)
    axes.legend()
