"""``everystep ls [DIR]``: the checkpoints of a run, or the runs below a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.inspect import Leftover, ListedCheckpoint, ListedRun, Listing

_SHOWN = 10


def ls(
    run: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="DIR",
            show_default=False,
            help="A run, or a directory above runs; default: here.",
        ),
    ] = Path("."),
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run: step, time, size, metrics. For a parent directory, list the runs in it.

    Reads manifests and sizes only; `everystep verify` reads everything.
    """
    with session(as_json) as out:
        from everystep import inspect

        found = inspect.list_run(run)
        if as_json:
            out.emit(_document(found))
        else:
            _print(out, found)
        out.finish(problem=bool(found.damaged))


def _document(found: Listing) -> dict[str, object]:
    return {
        "path": found.path,
        "checkpoints": found.checkpoints,
        "runs": found.runs,
        "others": found.others,
        "leftovers": found.leftovers,
        "nbytes": found.nbytes,
        "damaged": [entry.path for entry in found.damaged],
        "unreadable": found.unreadable,
    }


def _print(out: Session, found: Listing) -> None:
    import os

    from everystep.cli import words

    if found.checkpoints:
        _print_checkpoints(out, found)
    if found.checkpoints and found.runs:
        out.console.print()
    if found.runs:
        _print_runs(out, found)
    if found.foreign:
        where = words.plain(found.path)
        out.say(f"{where} is a checkpoint of another system: `everystep show` lists what it holds")
    elif found.others:
        names = ", ".join(map(words.plain, found.others[:_SHOWN]))
        left_out = f" and {len(found.others) - _SHOWN:,} more" if len(found.others) > _SHOWN else ""
        out.say(
            f"no checkpoints of Everystep in {words.plain(found.path)}, but {len(found.others):,} of other "
            f"systems: {names}{left_out}. `everystep show` lists what one of them holds"
        )
    elif not found.checkpoints and not found.runs:
        runs = "no readable runs" if found.unreadable else "no runs"
        out.say(f"no checkpoints in {words.plain(found.path)}, and {runs} below it")
    if found.damaged:
        names = ", ".join(words.plain(_title(entry, found)) for entry in found.damaged)
        out.say(
            f"damaged: {names}. `everystep verify` lists every problem; restoring skips them.", style="red"
        )
    if found.unreadable:
        first = words.plain(os.path.relpath(found.unreadable[0], found.path))
        more = len(found.unreadable) - 1
        others = f" and {more:,} more" if more else ""
        out.say(f"not readable, so not looked into: {first}{others}", style="yellow")
    for leftover in found.leftovers:
        out.say(_leftover(leftover), style="dim")


def _title(entry: ListedCheckpoint, found: Listing) -> str:
    import os

    if found.runs:
        return os.path.relpath(entry.path, found.path)
    if entry.named_by_step and entry.step is not None:
        return f"step {entry.step}"
    return entry.name


def _print_checkpoints(out: Session, found: Listing) -> None:
    import time

    from everystep.cli import words
    from everystep.cli.session import table

    now = time.time()
    # Checkpoints of a run are named by their step, others by users.
    named = not all(entry.named_by_step for entry in found.checkpoints)
    columns = (*(["name"] if named else []), "step", "saved", "age", "leaves", "size", "metrics")
    rows = table(*columns, right=("step", "age", "leaves", "size"), fold=("name", "metrics"))
    for entry in found.checkpoints:
        cells = (*([words.plain(entry.name)] if named else []), *_cells(entry, now))
        rows.add_row(*cells, style=None if entry.damage is None else "red")
    out.tabulate(rows, spare="saved")  # the age shows it, too
    out.console.print()
    nbytes = sum(entry.nbytes for entry in found.checkpoints)
    out.say(f"{words.count(len(found.checkpoints), 'checkpoint')}, {words.size(nbytes)}")


def _print_runs(out: Session, found: Listing) -> None:
    import os
    import time

    from everystep.cli import words
    from everystep.cli.session import table

    now = time.time()
    columns = ("run", "checkpoints", "newest", "age", "size", "metrics")
    rows = table(*columns, right=("checkpoints", "newest", "age", "size"), fold=("run", "metrics"))
    for run in found.runs:
        name = words.plain(os.path.relpath(run.path, found.path))
        damaged = run.newest is not None and run.newest.damage is not None
        rows.add_row(name, f"{run.checkpoints:,}", *_newest(run, now), style="red" if damaged else None)
    out.tabulate(rows)
    out.console.print()
    count = words.count(sum(run.checkpoints for run in found.runs), "checkpoint")
    nbytes = sum(run.nbytes for run in found.runs)
    out.say(f"{words.count(len(found.runs), 'run')}, {count}, {words.size(nbytes)}")


def _newest(run: ListedRun, now: float) -> tuple[str, ...]:
    from everystep.cli import words

    entry = run.newest
    if entry is None:
        return "-", "-", words.size(run.nbytes), ""
    step, _, age, _, _, last = _cells(entry, now)
    return step if entry.named_by_step else words.plain(entry.name), age, words.size(run.nbytes), last


def _cells(entry: ListedCheckpoint, now: float) -> tuple[str, ...]:
    from everystep.cli import words

    step = "?" if entry.step is None else str(entry.step)
    if entry.created is None or entry.leaves is None:
        return step, "-", "-", "-", words.size(entry.nbytes), f"damaged: {words.plain(entry.damage or '')}"
    last = words.metrics(entry.metrics) if entry.damage is None else f"damaged: {words.plain(entry.damage)}"
    saved, age = words.moment(entry.created), words.age(now - entry.created)
    return step, saved, age, f"{entry.leaves:,}", words.size(entry.nbytes), last


def _leftover(found: Leftover) -> str:
    import os

    from everystep.cli import words

    if found.kind == "partial":
        what = "a save that is under way, or that was interrupted"
    else:
        what = "a removed checkpoint, whose space the next save uses"
    name = os.path.basename(found.path)
    return f"{name}, {words.size(found.nbytes)}: {what} (`everystep prune` removes it)"
