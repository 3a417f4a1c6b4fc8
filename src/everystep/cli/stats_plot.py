"""The picture of ``everystep stats --plot``: metrics, time until durable, stall and speed over the steps.

It imports matplotlib when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from everystep.checkpointer.events import Event, Failed, Restored, Saved
from everystep.cli.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, OURS_LIGHT, PEER, QUIET, new_figure
from everystep.cli.words import plain, shortened, size
from everystep.inspect.event_summary import MetricPoint, metric_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STALL = "#b08900"
_PHASES = (("stage", "#d8a657"), ("write", OURS), ("sync", OURS_LIGHT), ("commit", PEER))
_PHASE_NAMES = [name for name, _ in _PHASES]
_MOST_COLUMNS = 240
"""If there are more saves than this, neighbours are drawn together."""
_TICK_CHARACTERS = 100
_MOST_METRICS = 6

_Column = tuple[float, list[Saved]]
"""A place on the axis of steps, and the saves there: most often one."""


def draw(events: Sequence[Event], path: Path, *, name: str) -> None:
    """Writes the picture of at least one durable save; the suffix of `path` chooses PNG or SVG."""
    saves = sorted((event for event in events if isinstance(event, Saved)), key=lambda event: event.step)
    failed = [event for event in events if isinstance(event, Failed)]
    restored = [event for event in events if isinstance(event, Restored)]
    points = metric_points(events)
    metrics = list(dict.fromkeys(name for point in points for name in point.values))[:_MOST_METRICS]
    inches = 8.2 + 1.9 * len(metrics)
    with new_figure(path, 11.5, inches) as figure:
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        heights = (1.5, 1.0, 1.0, *(1.0 for _ in metrics))
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        top, bottom = 1 - 1.1 / inches, 0.86 / inches
        figure.subplots_adjust(left=0.075, right=0.975, top=top, bottom=bottom, hspace=0.3)
        marked: list[Saved | Failed | Restored] = [*saves, *failed, *restored]
        steps = [event.step for event in marked]
        margin = max((max(steps) - min(steps)) * 0.02, 0.6)
        low, high = min(steps) - margin, max(steps) + margin
        axes[0].set_xlim(low, high)
        columns, width = _columns(saves, low, high)
        _phases(axes[0], columns, width)
        _stalls(axes[1], columns)
        rates = [(at, [save.gb_per_second for save in group]) for at, group in columns]
        _line(axes[2], rates, OURS)
        axes[2].set_ylim(0, 1.15 * max(1e-9, *(rate for _, group in rates for rate in group)))
        _title(axes[2], "Speed, GB/s")
        for axis, metric in zip(axes[3:], metrics, strict=True):
            _metric(axis, metric, points, low, high)
        for axis in axes:
            _marks(axis, failed, restored)
            _plain(axis)
        axes[-1].set_xlabel("step", color=QUIET)
        # Whole steps only, and no more of them than their digits leave space for.
        ticks = min(9, _TICK_CHARACTERS // len(f"{high:,.0f}"))
        axes[-1].xaxis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))
        axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        _words(figure, name, saves, len(failed), len(restored), grouped=len(columns) < len(saves))


def _metric(axis: Axes, name: str, points: Sequence[MetricPoint], low: float, high: float) -> None:
    """One metric: its values, or medians of neighbours with the span from lowest to highest."""
    found = [(point.step, point.values[name]) for point in points if isfinite(point.values.get(name, nan))]
    groups: dict[float, list[float]] = {}
    slot = (high - low) / _MOST_COLUMNS
    for step, value in found:
        at = float(step) if len(found) <= _MOST_COLUMNS else low + (int((step - low) / slot) + 0.5) * slot
        groups.setdefault(at, []).append(value)
    if groups:
        _line(axis, sorted(groups.items()), INK)
    # matplotlib would take text between two dollars for a formula.
    _title(axis, shortened(plain(name), 60).replace("$", r"\$"))


def _columns(saves: Sequence[Saved], low: float, high: float) -> tuple[list[_Column], float]:
    slot = (high - low) / _MOST_COLUMNS
    if len(saves) <= _MOST_COLUMNS:
        steps = sorted({save.step for save in saves})
        closest = min((after - before for before, after in pairwise(steps)), default=1)
        # As wide as the closest neighbours allow, within what looks like a bar.
        return [(float(save.step), [save]) for save in saves], min(max(0.8 * closest, slot), 10 * slot)
    groups: dict[int, list[Saved]] = {}
    for save in saves:
        groups.setdefault(int((save.step - low) / slot), []).append(save)
    return [(low + (place + 0.5) * slot, group) for place, group in groups.items()], slot


def _phases(axis: Axes, columns: Sequence[_Column], width: float) -> None:
    """The phases of a save on top of each other, and their names above the panel."""
    heights = {
        name: [median(getattr(save.seconds, name) for save in group) for _, group in columns]
        for name in _PHASE_NAMES
    }
    totals = [sum(phases) for phases in zip(*heights.values(), strict=True)]
    scale, unit = _unit(_usual(totals))
    base = [0.0] * len(columns)
    right = 1.0 - sum(map(_label_width, _PHASE_NAMES))
    for name, colour in _PHASES:
        scaled = [height * scale for height in heights[name]]
        axis.bar([at for at, _ in columns], scaled, width=width, bottom=base, color=colour, linewidth=0)
        base = [below + height for below, height in zip(base, scaled, strict=True)]
        right += _label_width(name)
        label = axis.text(right, 1.035, name, transform=axis.transAxes, ha="right", va="bottom")
        label.set(fontsize=9.5, fontweight="bold", color=colour)
    _ceiling(axis, [at for at, _ in columns], totals, scale)
    _title(axis, f"Until durable, {unit}")


def _label_width(name: str) -> float:
    """As a share of the panel's width, with the space before it."""
    return 0.009 * len(name) + 0.018


def _stalls(axis: Axes, columns: Sequence[_Column]) -> None:
    highest = [max(save.stall_seconds for save in group) for _, group in columns]
    scale, unit = _unit(_usual(highest))
    _line(axis, [(at, [save.stall_seconds * scale for save in group]) for at, group in columns], _STALL)
    _ceiling(axis, [at for at, _ in columns], highest, scale)
    _title(axis, f"Stall: training waited, {unit}")


def _line(axis: Axes, columns: Sequence[tuple[float, list[float]]], colour: str) -> None:
    """Medians as a line, with dots while they are few; the span from lowest to highest behind it."""
    steps = [at for at, _ in columns]
    lowest, highest = [min(group) for _, group in columns], [max(group) for _, group in columns]
    axis.fill_between(steps, lowest, highest, color=colour, alpha=0.22, linewidth=0)
    dots = "o" if len(columns) <= 60 else None
    medians = [median(group) for _, group in columns]
    axis.plot(steps, medians, color=colour, linewidth=1.5, marker=dots, markersize=4)


def _ceiling(axis: Axes, steps: Sequence[float], seconds: Sequence[float], scale: float) -> None:
    """One slow save must not flatten all others: it is labelled, not drawn to scale."""
    usual, highest = _usual(seconds), max(seconds)
    if highest <= 4 * usual or usual <= 0:
        axis.set_ylim(0, 1.15 * highest * scale if highest > 0 else 1.0)
        return
    top = 1.8 * usual * scale
    axis.set_ylim(0, top)
    beyond = [(height, at) for at, height in zip(steps, seconds, strict=True) if height * scale > top]
    axis.plot([at for _, at in beyond], [top * 0.96] * len(beyond), "^", color=INK, markersize=6, zorder=5)
    height, at = max(beyond)
    late = at > sum(axis.get_xlim()) / 2
    axis.annotate(
        f"{'up to ' if len(beyond) > 1 else ''}{_say(height)}",
        (at, top * 0.96),
        xytext=(-8 if late else 8, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize=9,
        bbox=BEHIND_WORDS,
        zorder=5,
    )


def _usual(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _marks(axis: Axes, failed: Sequence[Failed], restored: Sequence[Restored]) -> None:
    """Failed saves and resumed trainings, at their steps, in every panel."""
    upright = axis.get_xaxis_transform()
    resumed, lost = sorted({event.step for event in restored}), sorted({event.step for event in failed})
    axis.vlines(resumed, 0, 1, color=QUIET, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1, transform=upright)
    axis.vlines(lost, 0, 1, color=ALERT, linewidth=1.0, alpha=0.55, zorder=1, transform=upright)
    # On the axis itself, where no bar hides them.
    (crosses,) = axis.plot(
        lost, [0.0] * len(lost), "X", color=ALERT, markersize=8, zorder=6, transform=upright
    )
    crosses.set(markeredgecolor="white", clip_on=False)


def _plain(axis: Axes) -> None:
    axis.tick_params(axis="both", length=0, colors=QUIET)
    axis.tick_params(axis="x", pad=8)  # below the marks of failed saves
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.spines["bottom"].set_visible(True)
    axis.spines["bottom"].set_color(GRID)


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=12, fontweight="bold", color=INK, pad=7)


def _unit(highest_seconds: float) -> tuple[float, str]:
    """The factor from seconds to this unit."""
    return (1.0, "s") if highest_seconds >= 1 else (1e3, "ms")


def _say(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.3g} {unit}"


def _words(
    figure: Figure, name: str, saves: Sequence[Saved], failed: int, resumed: int, *, grouped: bool
) -> None:
    inches = figure.get_figheight()
    title, under, bottom = 1 - 0.38 / inches, 1 - 0.64 / inches, 0.14 / inches
    # matplotlib would take text between two dollars for a formula.
    shown = (name if len(name) <= 60 else name[:59] + "\N{HORIZONTAL ELLIPSIS}").replace("$", r"\$")
    figure.text(0.018, title, f"Saves of {shown}", fontsize=16, fontweight="bold")
    facts = (
        f"{len(saves):,} durable {'save' if len(saves) == 1 else 'saves'} of "
        f"{size(median(save.nbytes for save in saves))}; medians: "
        f"{_say(median(save.seconds.total for save in saves))} until durable, "
        f"{median(save.gb_per_second for save in saves):.2f} GB/s, "
        f"{_say(median(save.stall_seconds for save in saves))} stall"
    )
    figure.text(0.018, under, facts, fontsize=10, color=QUIET)
    if failed:
        said = f"\N{MULTIPLICATION SIGN} {failed:,} failed"
        figure.text(0.982, title, said, ha="right", fontsize=10.5, fontweight="bold", color=ALERT)
    if resumed:
        said = f"\N{VERTICAL FOUR DOTS} resumed {resumed:,} {'time' if resumed == 1 else 'times'}"
        figure.text(0.982, under, said, ha="right", fontsize=10, color=QUIET)
    note = "stage: on the training's thread. Speed counts every phase."
    if grouped:
        note += " Neighbouring saves are drawn together: medians, and bands from the lowest to the highest."
    figure.text(0.018, bottom, note, fontsize=8.5, color=QUIET)
