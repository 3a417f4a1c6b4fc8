"""One picture for every suite: each view is a panel of bars with the range of the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from everystep.cli.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, PEER, QUIET, new_figure
from everystep_study.results import Result
from everystep_study.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(views: Sequence[View], result: Result, path: Path) -> None:
    """Writes the picture; the suffix of `path` chooses PNG or SVG."""
    shown = [view for view in views if view.rows(result)]
    heights = [len(view.rows(result)) + 1.2 for view in shown]
    with new_figure(path, 9.5, 1.6 + 0.36 * sum(heights) + 0.55 * len(shown)) as figure:
        inches = figure.get_figheight()
        axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        space = 1.3 * len(heights) / max(1.0, 0.36 * sum(heights))
        figure.subplots_adjust(0.24, 0.85 / inches, 0.98, 1 - 1.15 / inches, hspace=space)
        for axis, view in zip(axes, shown, strict=True):
            _panel(axis, view, result)
        figure.text(0.018, 1 - 0.36 / inches, f"Everystep: {result.suite}", fontsize=15, fontweight="bold")
        figure.text(0.018, 1 - 0.6 / inches, result.subject, fontsize=9.5, color=QUIET)
        said = (
            f"Medians of {result.rounds} interleaved rounds, thin lines from the lowest to the highest. "
            f"{result.machine.cpu_count} CPUs, {result.machine.filesystem}."
        )
        figure.text(0.018, 0.12 / inches, said, fontsize=8.5, color=QUIET)


def _panel(axis: Axes, view: View, result: Result) -> None:
    reference = [row for row in result.section(view.section) if row.case == view.reference]
    rows = [*reference, *(row for row in view.rows(result) if row.case != view.reference)]
    values = [view.value(row) if row.samples else None for row in rows]
    # One bad round must not make all bars short: its line then ends at the words.
    highest = max([1.3 * value.median for value in values if value is not None] + [1e-9])
    axis.set_xlim(0, highest * 1.15)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        gap = highest * 0.012
        if value is None:
            axis.text(gap, place, row.status, va="center", color=QUIET, fontsize=9, style="italic")
            continue
        if row.case == view.reference:
            axis.barh(place, value.median, height=0.6, facecolor="white", edgecolor=QUIET, linewidth=1.2)
        else:
            axis.barh(place, value.median, height=0.62, color=OURS if row.case in view.ours else PEER)
        end = min(value.high, highest)
        axis.plot([min(value.low, end), end], [place, place], color=INK, linewidth=1.0, alpha=0.55)
        mark = view.mark(row)
        if mark is not None:
            axis.plot([mark] * 2, [place - 0.4, place + 0.4], color=ALERT, linewidth=2)
        at, words = max(value.median, end) + gap, view.show(value.median)
        axis.text(at, place, words, va="center", fontsize=9, bbox=BEHIND_WORDS, zorder=4)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [view.named_by(row) for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(OURS if row.case in view.ours else INK)
        label.set_fontweight("bold" if row.case in view.ours else "normal")
    axis.set_title(view.title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=8)
    axis.set_xlabel(view.unit, color=QUIET)
    # In the unit of the words at the bars: milliseconds are measured in seconds.
    axis.xaxis.set_major_formatter(lambda value, place: view.show(value))
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", colors=QUIET)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)
