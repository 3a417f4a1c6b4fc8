"""One picture for every suite: each chart is a panel of bars with the range of the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from everystep.cli.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, PEER, QUIET, new_figure
from everystep_study.harness.results import Result
from everystep_study.report.elements import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(charts: Sequence[Chart], result: Result, path: Path) -> None:
    """Writes the picture; the suffix of `path` chooses PNG or SVG."""
    shown = [chart for chart in charts if chart.bars]
    heights = [len(chart.bars) + 1.2 for chart in shown]
    with new_figure(path, 9.5, 1.6 + 0.36 * sum(heights) + 0.55 * len(shown)) as figure:
        inches = figure.get_figheight()
        axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        space = 1.3 * len(heights) / max(1.0, 0.36 * sum(heights))
        figure.subplots_adjust(0.24, 0.85 / inches, 0.98, 1 - 1.15 / inches, hspace=space)
        for axis, chart in zip(axes, shown, strict=True):
            _panel(axis, chart)
        figure.text(0.018, 1 - 0.36 / inches, f"Everystep: {result.suite}", fontsize=15, fontweight="bold")
        figure.text(0.018, 1 - 0.6 / inches, result.subject, fontsize=9.5, color=QUIET)
        said = (
            f"Medians of {result.rounds} interleaved rounds, thin lines from the lowest to the highest. "
            f"{result.machine.cpu_count} CPUs, {result.machine.filesystem}."
        )
        figure.text(0.018, 0.12 / inches, said, fontsize=8.5, color=QUIET)


def _panel(axis: Axes, chart: Chart) -> None:
    # One bad round must not make all bars short: its line then ends at the words.
    highest = max([1.3 * part.value for bar in chart.bars for part in bar.parts if part] + [1e-9])
    axis.set_xlim(0, highest * 1.15)
    for place, bar in enumerate(chart.bars):
        gap, value = highest * 0.012, bar.parts[0]
        if value is None or bar.low is None or bar.high is None:
            axis.text(gap, place, bar.status, va="center", color=QUIET, fontsize=9, style="italic")
            continue
        if bar.reference:
            axis.barh(place, value.value, height=0.6, facecolor="white", edgecolor=QUIET, linewidth=1.2)
        else:
            axis.barh(place, value.value, height=0.62, color=OURS if bar.ours else PEER)
        end = min(bar.high.value, highest)
        axis.plot([min(bar.low.value, end), end], [place, place], color=INK, linewidth=1.0, alpha=0.55)
        if bar.mark is not None:
            axis.plot([bar.mark] * 2, [place - 0.4, place + 0.4], color=ALERT, linewidth=2)
        at = max(value.value, end) + gap
        axis.text(at, place, value.text, va="center", fontsize=9, bbox=BEHIND_WORDS, zorder=4)
    axis.set_ylim(len(chart.bars) - 0.4, -0.6)
    axis.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
    for label, bar in zip(axis.get_yticklabels(), chart.bars, strict=True):
        label.set_color(OURS if bar.ours else INK)
        label.set_fontweight("bold" if bar.ours else "normal")
    axis.set_title(chart.title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=8)
    axis.set_xlabel(chart.unit, color=QUIET)
    # In the unit of the words at the bars: milliseconds are measured in seconds.
    axis.xaxis.set_major_formatter(lambda value, place: chart.show(value))
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", colors=QUIET)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)
