"""The picture of a training benchmark: the cost of a step, where the device is too slow, and a restart.

Draws what `results` hold and nothing else. matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.study.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, OURS_LIGHT, PEER, QUIET, new_figure
from holdfast.study.report import TIMES
from holdfast.study.training.bars import STEP_TO_NONE
from holdfast.study.training.results import (
    HOLDFAST_COLD,
    NONE,
    OVERLAP,
    SNAPSHOT,
    SYNC,
    ArmRow,
    RecoveryRow,
    SweepPoint,
    TrainingResult,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = (
    ("interpreter and imports", "#dfe4ea"),
    ("model", "#c3ccd5"),
    ("restore", ALERT),
    ("first step", OURS_LIGHT),
)


def draw(result: TrainingResult, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses PNG or SVG."""
    below = bool(result.sweep or result.recovery)
    with new_figure(path, 11.5, 8.9 if below else 5.0) as figure:
        inches = figure.get_figheight()
        top = 1 - 1.25 / inches
        first_bottom = 1 - 4.3 / inches
        steps = figure.add_axes((0.155, first_bottom, 0.83, top - first_bottom))
        _steps(steps, result.rows)
        low, high = 1.0 / inches, 3.55 / inches
        if result.sweep:
            _sweep(figure.add_axes((0.075, low, 0.385, high - low)), result.sweep)
        if result.recovery:
            _recovery(figure.add_axes((0.635, low, 0.35, high - low)), result.recovery)
        _words(figure, result)


def _steps(axis: Axes, rows: Sequence[ArmRow]) -> None:
    """A bar per arm: training and stall, as multiples of a step without checkpoints."""
    # What was not measured stands at the end, under its name.
    order = sorted(rows, key=lambda row: row.summary.ratio if row.summary is not None else float("inf"))
    # One bad round must not make all bars short: its line then ends at the words.
    highest = 1.15 * max([row.summary.ratio for row in order if row.summary is not None] + [1.0])
    axis.set_xlim(0, highest * 1.42)
    gap = highest * 0.012
    for place, row in enumerate(order):
        summary = row.summary
        if summary is None:
            axis.text(gap, place, row.status, va="center", color=QUIET, fontsize=9, style="italic")
            continue
        stall = summary.ratio * summary.stall_share.median
        colour = OURS if row.arm == OVERLAP else OURS_LIGHT if _is_ours(row.arm) else PEER
        axis.barh(place, summary.ratio - stall, height=0.62, color=colour)
        axis.barh(place, stall, left=summary.ratio - stall, height=0.62, color=ALERT)
        rounds = summary.ratio_by_round
        high = min(rounds.high, highest)
        axis.plot([rounds.low, high], [place, place], color=INK, linewidth=1.0, alpha=0.55)
        said = f"{summary.ratio:.2f}{TIMES}"
        if row.arm != NONE:
            said += f"   stall {100 * summary.stall_share.median:.1f} %   crash loses {_lost(row)}"
        axis.text(
            max(summary.ratio, high, STEP_TO_NONE) + gap,
            place,
            said,
            va="center",
            fontsize=9.5,
            fontweight="bold" if row.arm == OVERLAP else "normal",
            bbox=BEHIND_WORDS,
            zorder=4,
        )
    axis.plot([STEP_TO_NONE] * 2, [-0.5, len(order) - 0.5], color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axis.text(
        STEP_TO_NONE, -0.58, f"promised: {STEP_TO_NONE:.2f}", ha="center", va="bottom", fontsize=9, color=INK
    )
    axis.set_ylim(len(order) - 0.4, -0.95)
    axis.set_yticks(range(len(order)), [row.title for row in order])
    for label, row in zip(axis.get_yticklabels(), order, strict=True):
        label.set_color(OURS if _is_ours(row.arm) else INK)
        label.set_fontweight("bold" if row.arm == OVERLAP else "normal")
    _title(axis, "What it costs a training step")
    _legend(axis, (("training waits", ALERT),), "lower right", (1.0, 0.985))
    axis.set_xlabel("times a step without checkpoints", color=QUIET)
    _plain(axis, "x")


def _lost(row: ArmRow) -> str:
    assert row.summary is not None
    typical, worst = row.summary.lost_typical, row.summary.lost_worst
    return f"{typical:g}" if typical == worst else f"{typical:g} to {worst}"


def _sweep(axis: Axes, points: Sequence[SweepPoint]) -> None:
    """Both axes in units of forward+backward: the prediction is then one line for all sizes and speeds."""
    ordered = sorted(points, key=lambda point: point.pressure)
    pressures = [point.pressure for point in ordered]
    stalls = [point.stall_seconds.median / point.compute_seconds for point in ordered]
    furthest = max(2.0, 1.12 * max(pressures))
    tallest = max(furthest - 1, 1.1 * max(p.stall_seconds.high / p.compute_seconds for p in ordered))
    axis.axvspan(0, 1, color="#f1f5f7", zorder=0)
    axis.plot(
        [0, 1, furthest], [0, 0, furthest - 1], color=QUIET, linewidth=1.6, linestyle=(0, (4, 3)), zorder=2
    )
    for point in ordered:
        spread = point.stall_seconds
        ends = [spread.low / point.compute_seconds, spread.high / point.compute_seconds]
        axis.plot([point.pressure] * 2, ends, color=OURS, linewidth=1.0, alpha=0.6, zorder=3)
    axis.plot(pressures, stalls, "o", color=OURS, markersize=7, zorder=4)
    axis.text(0.5, 0.93 * tallest, "hidden", ha="center", va="top", color=QUIET, fontsize=9, style="italic")
    axis.text(
        furthest * 0.97,
        tallest * 0.12,
        "measured stall",
        ha="right",
        color=OURS,
        fontsize=9,
        fontweight="bold",
    )
    axis.text(
        furthest * 0.97, tallest * 0.04, "predicted: max(0, x - 1)", ha="right", color=QUIET, fontsize=9
    )
    axis.set_xlim(0, furthest)
    axis.set_ylim(-0.02 * tallest, tallest)
    axis.set_xlabel("time to write a checkpoint / (forward + backward)", color=QUIET)
    axis.set_ylabel("stall / (forward + backward)", color=QUIET)
    _title(axis, "Beyond the device's bandwidth")
    _plain(axis, "both")


def _recovery(axis: Axes, rows: Sequence[RecoveryRow]) -> None:
    totals = [statistics.median(s.seconds for s in row.samples) for row in rows if row.samples]
    longest = max([*totals, 1e-9])
    axis.set_xlim(0, 1.2 * longest)
    for place, row in enumerate(rows):
        if not row.samples:
            axis.text(
                longest * 0.012, place, row.status, va="center", color=QUIET, fontsize=9, style="italic"
            )
            continue
        parts = [
            statistics.median(values)
            for values in (
                [s.import_seconds for s in row.samples],
                [s.build_seconds for s in row.samples],
                [s.restore_seconds for s in row.samples],
                [s.step_seconds for s in row.samples],
            )
        ]
        left = 0.0
        for (name, colour), part in zip(_PARTS, parts, strict=True):
            axis.barh(place, part, left=left, height=0.55, color=colour, label=name if place == 0 else None)
            if part > 0.045 * longest:
                ink = "white" if colour == ALERT else INK
                axis.text(
                    left + part / 2, place, f"{part:.2f}", ha="center", va="center", fontsize=8.5, color=ink
                )
            left += part
        axis.text(
            left + longest * 0.015,
            place,
            f"{left:.1f} s",
            va="center",
            fontsize=9.5,
            fontweight="bold" if row.system == HOLDFAST_COLD else "normal",
        )
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [row.title for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(OURS if row.system == HOLDFAST_COLD else INK)
        label.set_fontweight("bold" if row.system == HOLDFAST_COLD else "normal")
    _title(axis, "Killed: until the next step has ended")
    axis.set_xlabel("seconds from the start of the new process", color=QUIET)
    _legend(axis, _PARTS, "upper center", (0.36, -0.19))
    _plain(axis, "x")


def _legend(
    axis: Axes,
    names: Sequence[tuple[str, str]],
    corner: Literal["lower right", "upper center"],
    at: tuple[float, float],
) -> None:
    from matplotlib.patches import Patch

    axis.legend(
        [Patch(color=colour) for _, colour in names],
        [name for name, _ in names],
        loc=corner,
        bbox_to_anchor=at,
        ncols=len(names),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        columnspacing=1.0,
        handletextpad=0.4,
        borderpad=0.0,
    )


def _title(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=8)


def _plain(axis: Axes, grid: Literal["x", "both"]) -> None:
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", colors=QUIET)
    if grid == "both":
        axis.tick_params(axis="y", colors=QUIET)
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _words(figure: Figure, result: TrainingResult) -> None:
    inches = figure.get_figheight()
    model = result.model
    figure.text(
        0.018, 1 - 0.38 / inches, "A durable checkpoint at every step", fontsize=16, fontweight="bold"
    )
    figure.text(
        0.018,
        1 - 0.64 / inches,
        f"GPT-2 of {model.layers} layers, width {model.width}: {model.state_nbytes / 1e6:.0f} MB of weights "
        f"and Adam moments; {model.batch} {TIMES} {model.sequence} tokens per step; "
        "every save synced to the device",
        fontsize=10,
        color=QUIET,
    )
    figure.text(
        0.018,
        0.14 / inches,
        f"Medians of {result.rounds} interleaved rounds of {result.steps} steps, thin lines from the lowest "
        f"to the highest. {result.machine.cpu_count} CPUs, {result.machine.filesystem}. "
        "Holdfast with checksums.",
        fontsize=8.5,
        color=QUIET,
    )


def _is_ours(arm: str) -> bool:
    return arm in (OVERLAP, SNAPSHOT, SYNC)
