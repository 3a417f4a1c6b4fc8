"""The picture of a benchmark of several ranks: speed over the number of ranks, of writers, and of loads.

Draws what `results` hold and nothing else. matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.study import results
from holdfast.study.picture import ALERT, GRID, INK, OURS, OURS_LIGHT, PEER, QUIET, new_figure
from holdfast.study.ranks.results import RanksResult, Row
from holdfast.study.report import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    results.RAW: ALERT,
    results.RECYCLED: OURS,
    results.HOLDFAST: OURS_LIGHT,
    results.DCP: QUIET,
    results.TORCH: PEER,
}


def draw(result: RanksResult, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses PNG or SVG."""
    with new_figure(path, 13, 5.2) as figure:
        saves, writers, loads = figure.subplots(1, 3, width_ratios=(1.25, 0.8, 1.25))
        _groups(saves, "Durable save, by ranks", result.of("save"), lambda row: f"{row.world}")
        best = result.best_writers
        said = "" if best is None else f"; best: {best}"
        _groups(writers, f"By writers{said}", result.of("writers"), lambda row: f"{row.writers}")
        _groups(
            loads,
            f"Load, saved \N{RIGHTWARDS ARROW} loaded by ({result.temperature} cache)",
            result.of("load"),
            lambda row: f"{row.saved_by}\N{RIGHTWARDS ARROW}{row.world}",
        )
        _words(figure, saves, result)


def _groups(axis: Axes, title: str, rows: Sequence[Row], place_of: Callable[[Row], str]) -> None:
    """One group of bars per place, one bar per system, with the span of the rounds."""
    places = list(dict.fromkeys(place_of(row) for row in rows))
    for place, name in enumerate(places):
        here = [row for row in rows if place_of(row) == name]
        width = 0.82 / len(here)
        for number, row in enumerate(here):
            if row.summary is None:
                continue
            speed = row.summary.gb_per_second
            at = place + (number - (len(here) - 1) / 2) * width
            colour = _COLOURS.get(row.system, _COLOURS[results.RECYCLED])
            label = row.title if place == 0 else None
            axis.bar(at, speed.median, width=0.92 * width, color=colour, label=label)
            axis.plot([at, at], [speed.low, speed.high], color=INK, linewidth=1.0, alpha=0.55)
    axis.set_xticks(range(len(places)), places)
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=8)
    axis.tick_params(axis="both", length=0, colors=QUIET)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _words(figure: Figure, first: Axes, result: RanksResult) -> None:
    figure.subplots_adjust(left=0.05, right=0.985, top=0.74, bottom=0.17, wspace=0.16)
    first.set_ylabel("GB/s", color=QUIET)
    handles, labels = first.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(0.012, 0.885),
            ncols=5,
            frameon=False,
            fontsize=9.5,
        )
    figure.text(0.018, 0.925, "Ranks that save together", fontsize=16, fontweight="bold")
    figure.text(
        0.018,
        0.03,
        f"{size(result.state_nbytes)} in {result.state_leaves:,} tensors on every rank, one copy stored, "
        f"every save synced. Medians of {result.rounds} interleaved rounds, thin lines from the slowest to "
        f"the fastest. {result.machine.cpu_count} CPUs, {result.machine.filesystem}.",
        fontsize=8.5,
        color=QUIET,
    )
