"""The picture of a benchmark: how fast each system saves and loads, against the device's limit.

Draws what `results` hold and nothing else. matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.study import results
from holdfast.study.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, OURS_LIGHT, PEER, QUIET, new_figure
from holdfast.study.report import TIMES, size
from holdfast.study.results import BenchResult, Operation, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES: dict[Operation, str] = {"save": "Durable save", "load": "Load"}


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses PNG or SVG."""
    order = _order(result)
    with new_figure(path, 11.5, 2.35 + 0.42 * len(order)) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, operation in zip(axes, _TITLES, strict=True):
            _panel(axis, result, operation, order)
        _words(figure, result)


def _order(result: BenchResult) -> list[Row]:
    """Systems by the speed of their save, fastest first; those that were not measured at the end."""
    shown = [row for row in result.rows if row.operation == "save" and row.system != results.RAW]
    return sorted(shown, key=lambda row: -(row.rate or 0.0))


def _panel(axis: Axes, result: BenchResult, operation: Operation, order: list[Row]) -> None:
    rows = [result.row(row.system, operation) for row in order]
    raw = result.row(results.RAW, operation)
    limit = raw.summary.gb_per_second.median if raw is not None and raw.summary is not None else None
    highest = max(
        [row.summary.gb_per_second.high for row in rows if row is not None and row.summary is not None]
        + [limit or 0.0, 1e-9]
    )
    axis.set_xlim(0, highest * 1.45)  # room for the words at the end of the longest bar
    for place, row in enumerate(rows):
        if row is not None:
            _bar(axis, place, row, highest)
    if limit is not None:
        _limit_line(axis, limit, len(order))

    axis.set_ylim(len(order) - 0.4, -0.95)
    axis.set_yticks(range(len(order)), [row.title for row in order])
    # The right panel shares the names of the left one and has no labels of its own.
    for label, row in zip(axis.get_yticklabels(), order, strict=False):
        label.set_color(OURS if _is_ours(row) else INK)
        label.set_fontweight("bold" if row.system == results.HOLDFAST else "normal")
    title = _TITLES[operation]
    if operation == "load":
        title += f" ({result.temperature} page cache)"
    axis.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=8)
    axis.set_xlabel("GB/s", color=QUIET)
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", colors=QUIET)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _bar(axis: Axes, place: int, row: Row, highest: float) -> None:
    gap = highest * 0.015
    if row.summary is None:
        axis.text(gap, place, row.status, va="center", color=QUIET, fontsize=9, style="italic")
        return
    speed = row.summary.gb_per_second
    colour = OURS if row.system == results.HOLDFAST else OURS_LIGHT if _is_ours(row) else PEER
    if row.system == results.FIO:
        axis.barh(
            place, speed.median, height=0.62, color="white", edgecolor=PEER, hatch="////", linewidth=0.8
        )
    else:
        axis.barh(place, speed.median, height=0.62, color=colour)
    axis.plot([speed.low, speed.high], [place, place], color=INK, linewidth=1.0, alpha=0.55)
    end = max(speed.median, speed.high) + gap
    weight = "bold" if row.system == results.HOLDFAST else "normal"
    axis.text(
        end,
        place,
        f"{speed.median:.2f}",
        va="center",
        color=INK,
        fontweight=weight,
        fontsize=9.5,
        bbox=BEHIND_WORDS,
        zorder=4,
    )
    faster = row.summary.holdfast_is_faster_by
    if faster is not None and not _is_ours(row) and row.system != results.FIO:
        axis.annotate(
            f"Holdfast {faster:.1f}{TIMES}",
            (end, place),
            xytext=(32, 0),
            textcoords="offset points",
            va="center",
            color=QUIET,
            fontsize=9,
            bbox=BEHIND_WORDS,
            zorder=4,
        )


def _limit_line(axis: Axes, limit: float, count: int) -> None:
    axis.plot(
        [limit, limit], [-0.5, count - 0.5], color=ALERT, linewidth=1.4, linestyle=(0, (4, 3)), zorder=3
    )
    axis.text(
        limit,
        -0.58,
        f"raw device limit {limit:.2f}",
        ha="center" if limit < axis.get_xlim()[1] * 0.8 else "right",
        va="bottom",
        color=ALERT,
        fontsize=9,
    )


def _words(figure: Figure, result: BenchResult) -> None:
    inches = figure.get_figheight()
    figure.subplots_adjust(left=0.155, right=0.985, top=1 - 1.22 / inches, bottom=0.82 / inches, wspace=0.06)
    figure.text(
        0.018, 1 - 0.38 / inches, "Checkpoints at the speed of the disk", fontsize=16, fontweight="bold"
    )
    figure.text(
        0.018,
        1 - 0.64 / inches,
        f"{size(result.state_nbytes)} in {result.state_leaves:,} tensors ({result.shape}); "
        "every save synced to the device, file and directory",
        fontsize=10,
        color=QUIET,
    )
    figure.text(
        0.018,
        0.14 / inches,
        f"Medians of {result.rounds} interleaved rounds, thin lines from the slowest to the fastest. "
        f"{result.machine.cpu_count} CPUs, {result.machine.filesystem}. Holdfast with checksums.",
        fontsize=8.5,
        color=QUIET,
    )


def _is_ours(row: Row) -> bool:
    return row.system in (results.HOLDFAST, results.RECYCLED)
