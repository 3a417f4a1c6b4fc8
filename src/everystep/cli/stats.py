"""``everystep stats RUN``: how the saves of a run went."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from rich.table import Table

    from everystep.checkpointer.events import Event, Saved
    from everystep.inspect import Distribution, EventSummary, MetricPoint, MetricSummary, RunEvents

_NOTHING = "-"


def stats(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run's directory.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", readable=False, help="Also draw a .png or .svg.")
    ] = None,
    last: Annotated[int, typer.Option("--last", min=0, metavar="N", help="List the latest N events.")] = 10,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Only the table of metrics: every step, pruned ones too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how the saves of a run went: metrics, speed, phases, and how long training waited.

    Reads the run's events.jsonl, also while a training writes to it.
    """
    with session(as_json) as out:
        from everystep import inspect
        from everystep.cli.picture import check_suffix

        if plot is not None:
            try:
                check_suffix(plot)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        found = inspect.summarize(run)
        latest = found.events[len(found.events) - min(last, len(found.events)) :]
        drawn = plot is not None and _draw(out, found, plot)
        if as_json:
            picture = os.path.abspath(plot) if plot is not None and drawn else None
            out.emit(
                {
                    "path": found.path,
                    "summary": found.summary,
                    "skipped_lines": found.skipped_lines,
                    "latest": latest,
                    "metrics": found.metrics,
                    "plot": picture,
                }
            )
        else:
            if metrics:
                _print_metrics(out, found.metrics)
            else:
                _print(out, found, latest)
            if plot is not None:
                nothing = "nothing to plot: no save of this run was durable"
                out.say(f"drawn: {plot}" if drawn else nothing, style="dim" if drawn else "yellow")
        out.finish(problem=False)


def _draw(out: Session, found: RunEvents, plot: Path) -> bool:
    """Whether there was a save to draw."""
    from everystep.cli import stats_plot, words

    if found.summary.saves is None:
        return False
    try:
        stats_plot.draw(found.events, plot, name=words.plain(os.path.basename(found.path)))
    except RuntimeError as error:  # no matplotlib
        out.fail(type(error).__name__, str(error))
    return True


def _print(out: Session, found: RunEvents, latest: tuple[Event, ...]) -> None:
    from everystep.cli import words
    from everystep.cli.session import facts

    skipped = found.skipped_lines
    out.show(facts(_facts(found.path, found.summary)))
    out.console.print()
    if found.summary.metrics:
        out.tabulate(_metric_table(found.summary.metrics))
        out.console.print()
    rows = _measurements(found.summary)
    if rows.row_count:
        out.tabulate(rows)
        out.console.print()
    for event in latest:
        text, style = _line(event)
        out.say(f"{words.moment(event.time)}  {words.plain(text)}", style=style)
    if skipped:
        noun = words.count(skipped, "line")
        out.say(f"{noun} skipped: torn by a crash, or written by another version", style="dim")


def _print_metrics(out: Session, points: Sequence[MetricPoint]) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    if not points:
        out.say("no metrics; save them with ckpt.save(step, metrics={'loss': loss})", style="yellow")
        return
    names = list(dict.fromkeys(name for point in points for name in point.values))
    shown = [words.plain(name) for name in names]
    rows = table("step", "saved", *shown, right=("step", *shown))
    for point in points:
        values = (words.measured(point.values[name]) if name in point.values else _NOTHING for name in names)
        rows.add_row(str(point.step), words.moment(point.time), *values)
    out.tabulate(rows, spare="saved")


def _metric_table(found: Mapping[str, MetricSummary]) -> Table:
    from everystep.cli import words
    from everystep.cli.session import table

    columns = ("first", "last", "lowest", "low step", "highest", "high step")
    made = table("metric", *columns, right=columns, fold=("metric",))
    for name, metric in found.items():
        ends = (metric.low, metric.low_step, metric.high, metric.high_step)
        told = (_NOTHING if value is None else words.measured(value) for value in ends)
        made.add_row(words.plain(name), words.measured(metric.first), words.measured(metric.last), *told)
    return made


def _facts(where: str, found: EventSummary) -> list[tuple[str, str]]:
    from everystep.cli import words

    period = f"{words.moment(found.first_time)} to {words.moment(found.last_time)}"
    rows = [("run", words.plain(where)), ("events", f"{found.events:,}, {period}")]
    if found.trainings > 1:
        rows.append(("opened", f"{found.trainings:,} times by a Checkpointer"))
    saves = found.saves
    if saves is None:
        rows.append(("saves", "none durable" + (f", {found.failed:,} failed" if found.failed else "")))
    else:
        steps = f"step {saves.first_step:,} to {saves.last_step:,}"
        rows.append(("saves", f"{saves.count:,} durable, {found.failed:,} failed; {steps}"))
        in_place = ""
        if saves.in_place_nbytes + saves.copied_nbytes:
            share = saves.in_place_nbytes / (saves.in_place_nbytes + saves.copied_nbytes)
            in_place = f"; {share:.0%} read in place"
        leaves = words.count(saves.leaves, "leaf", "leaves")
        rows.append(("state", f"{words.size(saves.state_nbytes)} in {leaves}{in_place}"))
        rows.append(("written", words.size(saves.stored_nbytes)))
    if found.stall_share is not None:
        rows.append(("stall", f"{found.stall_share:.2%} of the time between saves"))
    if found.restores is not None:
        rows.append(("restores", f"{found.restores.count:,}, {words.size(found.restores.nbytes)} read"))
    if found.passed_over:
        rows.append(("skipped", f"{words.count(found.passed_over, 'damaged checkpoint')}, by restores"))
    if found.preempted:
        rows.append(("preempted", f"{found.preempted:,} times" if found.preempted > 1 else "once"))
    return rows


def _measurements(found: EventSummary) -> Table:
    from everystep.cli import words
    from everystep.cli.session import table

    columns = ("median", "lowest", "95%", "highest", "total")
    made = table("", *columns, right=columns)

    def seconds(name: str, values: Distribution | None) -> None:
        if values is not None:
            ends = (values.median, values.low, values.p95, values.high, values.total)
            made.add_row(name, *map(words.duration, ends))

    saves = found.saves
    if saves is not None:
        rate = saves.gb_per_second
        told = [
            f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"
            for value in (rate.median, rate.low, rate.high)
        ]
        made.add_row("GB/s", told[0], told[1], _NOTHING, told[2], _NOTHING)
        for phase in ("stage", "write", "sync", "commit"):
            seconds(phase, getattr(saves.seconds, phase))
        seconds("until durable", saves.seconds.total)
    seconds("stall", found.stall_seconds)
    if saves is not None:
        seconds("between saves", saves.between_seconds)
    if saves is not None and saves.between_steps is not None:
        steps = saves.between_steps
        made.add_row(
            "  in steps",
            *(f"{value:,.4g}" for value in (steps.median, steps.low, steps.p95, steps.high)),
            _NOTHING,
        )
    if found.restores is not None:
        seconds("restore", found.restores.seconds)
    return made


def _line(event: Event) -> tuple[str, str]:
    """One line about an event, and its style."""
    from everystep.checkpointer.events import (
        Failed,
        Opened,
        PassedOver,
        Preempted,
        RemovedEarly,
        Restored,
        Saved,
        ShortOfSpace,
    )
    from everystep.cli import words

    if isinstance(event, Saved):
        return f"step {event.step}  saved {_saved(event)}", ""
    if isinstance(event, Failed):
        return f"step {event.step}  failed, {event.error}: {words.shortened(event.message, 300)}", "red"
    if isinstance(event, Restored):
        took = f"in {words.duration(event.seconds)}, {words.speed(event.nbytes, event.seconds)}"
        return f"step {event.step}  restored {words.size(event.nbytes)} {took}", ""
    if isinstance(event, PassedOver):
        return (
            f"step {event.step}  damaged, skipped by a restore: {words.shortened(event.reason, 300)}",
            "yellow",
        )
    if isinstance(event, Preempted):
        return f"step {event.step}  preempted by {event.signal}", "yellow"
    if isinstance(event, ShortOfSpace):
        size = f"{words.size(event.needed_nbytes)} each, {words.size(event.free_nbytes)} free"
        return f"step {event.step}  space for {event.fit} of {event.wanted} checkpoints ({size})", "yellow"
    if isinstance(event, RemovedEarly):
        steps = ", ".join(map(str, event.steps[:20]))
        return f"step {event.step}  no space: removed {steps}", "yellow"
    assert isinstance(event, Opened)
    return f"opened by process {event.pid} on {event.host}, mode {event.mode}, every {event.every}", "dim"


def _saved(event: Saved) -> str:
    from everystep.cli import words

    spent = event.seconds
    phases = ", ".join(
        f"{name} {words.duration(getattr(spent, name))}" for name in ("stage", "write", "sync", "commit")
    )
    took = f"in {words.duration(spent.total)} ({phases}), {words.speed(event.nbytes, spent.total)}"
    return f"{words.size(event.nbytes)} {took}, stall {words.duration(event.stall_seconds)}"
