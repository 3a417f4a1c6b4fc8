"""The picture of a run's saves: time until durable, stall and speed over the steps, with what failed.

Draws the events it is given and nothing else. matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from holdfast.checkpointer.events import Event, Failed, Phases, Restored, Saved
from holdfast.study.picture import ALERT, BEHIND_WORDS, GRID, INK, OURS, OURS_LIGHT, PEER, QUIET, new_figure
from holdfast.study.report import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STALL = "#b08900"
_PHASES = (("stage", "#d8a657"), ("write", OURS), ("sync", OURS_LIGHT), ("commit", PEER))
_MOST_POINTS = 240
"""More saves than a reader can tell apart are drawn in groups of neighbours."""
_MARGIN = 0.02
_TICK_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class _Column:
    """Neighbouring saves, most often one: where they stand, their medians, and the ends of what is drawn."""

    step: float
    width: float
    phases: Phases
    stall: tuple[float, float, float]
    rate: tuple[float, float, float]


def draw(events: Sequence[Event], path: Path, *, name: str) -> bool:
    """Writes the picture; the suffix of `path` chooses PNG or SVG. False: no save was durable, so there is
    nothing to draw."""
    saves = sorted((event for event in events if isinstance(event, Saved)), key=lambda event: event.step)
    failed = [event for event in events if isinstance(event, Failed)]
    restored = [event for event in events if isinstance(event, Restored)]
    if not saves:
        return False
    with new_figure(path, 11.5, 8.2) as figure:
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        axes = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1.0, 1.0))
        figure.subplots_adjust(left=0.075, right=0.975, top=0.865, bottom=0.105, hspace=0.26)
        marked: list[Saved | Failed | Restored] = [*saves, *failed, *restored]
        ends = _ends([event.step for event in marked])
        columns = _columns(saves, ends)
        _durable(axes[0], columns)
        _stall(axes[1], columns)
        _rate(axes[2], columns)
        for axis in axes:
            _marks(axis, failed, restored)
            _plain(axis)
        axes[0].set_xlim(*ends)
        axes[2].set_xlabel("step", color=QUIET)
        # Whole steps only, and no more of them than their digits leave room for.
        places = min(9, _TICK_CHARACTERS // len(f"{ends[1]:,.0f}"))
        axes[2].xaxis.set_major_locator(MaxNLocator(places, integer=True, min_n_ticks=1))
        axes[2].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        _words(figure, name, saves, failed, restored, grouped=len(columns) < len(saves))
    return True


def _ends(steps: Sequence[int]) -> tuple[float, float]:
    low, high = min(steps), max(steps)
    margin = max((high - low) * _MARGIN, 0.6)
    return low - margin, high + margin


def _columns(saves: Sequence[Saved], ends: tuple[float, float]) -> list[_Column]:
    slot = (ends[1] - ends[0]) / _MOST_POINTS
    if len(saves) <= _MOST_POINTS:
        steps = sorted({save.step for save in saves})
        closest = min((after - before for before, after in pairwise(steps)), default=1)
        # As wide as the closest neighbours allow, within what looks like a bar.
        width = min(max(0.8 * closest, slot), 10 * slot)
        return [_column([save], float(save.step), width) for save in saves]
    groups: dict[int, list[Saved]] = {}
    for save in saves:
        groups.setdefault(int((save.step - ends[0]) / slot), []).append(save)
    return [_column(group, ends[0] + (place + 0.5) * slot, slot) for place, group in groups.items()]


def _column(group: list[Saved], step: float, width: float) -> _Column:
    stalls = [save.stall_seconds for save in group]
    rates = [save.gb_per_second for save in group]
    return _Column(
        step,
        width,
        Phases(*(median(getattr(save.seconds, name) for save in group) for name, _ in _PHASES)),
        (min(stalls), median(stalls), max(stalls)),
        (min(rates), median(rates), max(rates)),
    )


def _durable(axis: Axes, columns: Sequence[_Column]) -> None:
    """The phases of a save on top of each other."""
    scale, unit = _unit(_usual([column.phases.total for column in columns]))
    base = [0.0] * len(columns)
    for name, colour in _PHASES:
        heights = [getattr(column.phases, name) * scale for column in columns]
        axis.bar(
            [column.step for column in columns],
            heights,
            width=[column.width for column in columns],
            bottom=base,
            color=colour,
            linewidth=0,
        )
        base = [low + height for low, height in zip(base, heights, strict=True)]
    _ceiling(axis, [(column.step, column.phases.total) for column in columns], scale)
    _title(axis, f"Until durable, {unit}")
    place = 1.0
    for name, colour in reversed(_PHASES):
        axis.text(
            place,
            1.035,
            name,
            transform=axis.transAxes,
            ha="right",
            va="bottom",
            fontsize=9.5,
            fontweight="bold",
            color=colour,
        )
        place -= 0.009 * len(name) + 0.018


def _stall(axis: Axes, columns: Sequence[_Column]) -> None:
    scale, unit = _unit(_usual([column.stall[2] for column in columns]))
    _line(axis, [(column.step, *(value * scale for value in column.stall)) for column in columns], _STALL)
    _ceiling(axis, [(column.step, column.stall[2]) for column in columns], scale)
    _title(axis, f"Stall: training waited, {unit}")


def _rate(axis: Axes, columns: Sequence[_Column]) -> None:
    _line(axis, [(column.step, *column.rate) for column in columns], OURS)
    axis.set_ylim(0, 1.15 * max([column.rate[2] for column in columns] + [1e-9]))
    _title(axis, "Speed, GB/s")


def _line(axis: Axes, points: Sequence[tuple[float, ...]], colour: str) -> None:
    """The medians as a line, with dots while they are few; the span from lowest to highest behind it."""
    steps = [point[0] for point in points]
    axis.fill_between(
        steps,
        [point[1] for point in points],
        [point[3] for point in points],
        color=colour,
        alpha=0.22,
        linewidth=0,
    )
    dots = "o" if len(points) <= 60 else None
    axis.plot(steps, [point[2] for point in points], color=colour, linewidth=1.5, marker=dots, markersize=4)


def _ceiling(axis: Axes, points: Sequence[tuple[float, float]], scale: float) -> None:
    """One slow save must not press all others to the ground: what is far above them is told in words.

    `points` are steps and seconds, drawn times `scale`.
    """
    usual, highest = _usual([height for _, height in points]), max(height for _, height in points)
    if highest <= 4 * usual or usual <= 0:
        axis.set_ylim(0, 1.15 * highest * scale if highest > 0 else 1.0)
        return
    top = 1.8 * usual * scale
    axis.set_ylim(0, top)
    beyond = [(step, height) for step, height in points if height * scale > top]
    axis.plot(
        [step for step, _ in beyond], [top * 0.96] * len(beyond), "^", color=INK, markersize=6, zorder=5
    )
    step, height = max(beyond, key=lambda point: point[1])
    left, right = axis.get_xlim()
    late = step > (left + right) / 2
    axis.annotate(
        f"{'up to ' if len(beyond) > 1 else ''}{_say(height)}",
        (step, top * 0.96),
        xytext=(-8 if late else 8, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize=9,
        bbox=BEHIND_WORDS,
        zorder=5,
    )


def _usual(values: Sequence[float]) -> float:
    """What only one in twenty exceeds."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _marks(axis: Axes, failed: Sequence[Failed], restored: Sequence[Restored]) -> None:
    """Failed saves and resumed trainings, at their steps, in every panel."""
    upright = axis.get_xaxis_transform()
    resumed, lost = sorted({event.step for event in restored}), sorted({event.step for event in failed})
    axis.vlines(resumed, 0, 1, color=QUIET, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1, transform=upright)
    axis.vlines(lost, 0, 1, color=ALERT, linewidth=1.0, alpha=0.55, zorder=1, transform=upright)
    # On the axis itself, where no bar hides them.
    axis.plot(
        lost,
        [0.0] * len(lost),
        "X",
        color=ALERT,
        markersize=8,
        markeredgecolor="white",
        clip_on=False,
        zorder=6,
    )


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
    """What a number of seconds is multiplied by to be read in this unit."""
    return (1.0, "s") if highest_seconds >= 1 else (1e3, "ms")


def _say(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.3g} {unit}"


def _words(
    figure: Figure,
    name: str,
    saves: Sequence[Saved],
    failed: Sequence[Failed],
    restored: Sequence[Restored],
    *,
    grouped: bool,
) -> None:
    inches = figure.get_figheight()
    figure.text(0.018, 1 - 0.38 / inches, f"Saves of {_short(name)}", fontsize=16, fontweight="bold")
    durable = _say(median(save.seconds.total for save in saves))
    stall = _say(median(save.stall_seconds for save in saves))
    rate = median(save.gb_per_second for save in saves)
    figure.text(
        0.018,
        1 - 0.64 / inches,
        f"{len(saves):,} durable {'save' if len(saves) == 1 else 'saves'} of {_size(saves)}; medians: "
        f"{durable} until durable, {rate:.2f} GB/s, {stall} stall",
        fontsize=10,
        color=QUIET,
    )
    place = 0.982
    if failed:
        said = f"\N{MULTIPLICATION SIGN} {len(failed):,} failed"
        figure.text(place, 1 - 0.38 / inches, said, ha="right", fontsize=10.5, fontweight="bold", color=ALERT)
    if restored:
        said = f"\N{VERTICAL FOUR DOTS} resumed {len(restored):,} {'time' if len(restored) == 1 else 'times'}"
        figure.text(place, 1 - 0.64 / inches, said, ha="right", fontsize=10, color=QUIET)
    note = "stage: on the training's thread. Speed counts every phase."
    if grouped:
        note += " Neighbouring saves are drawn together: medians, and bands from the lowest to the highest."
    figure.text(0.018, 0.14 / inches, note, fontsize=8.5, color=QUIET)


def _size(saves: Sequence[Saved]) -> str:
    nbytes = round(median(save.nbytes for save in saves))
    return size(nbytes) if nbytes >= 1 << 20 else f"{nbytes / 1024:.1f} KiB"


def _short(name: str) -> str:
    # matplotlib would take what is between two dollars for a formula.
    shown = name if len(name) <= 60 else name[:59] + "\N{HORIZONTAL ELLIPSIS}"
    return shown.replace("$", r"\$")
