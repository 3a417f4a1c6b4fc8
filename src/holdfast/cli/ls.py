"""``holdfast ls RUN``: the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.session import Json, Session, session

if TYPE_CHECKING:
    from holdfast.inspect import Entry, Leftover, Listing


def ls(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run's directory.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run: step, time, size, metrics.

    Reads manifests and sizes only; `holdfast verify` reads everything.
    """
    with session(as_json) as out:
        from holdfast import inspect

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
        "leftovers": found.leftovers,
        "nbytes": found.nbytes,
        "damaged": [entry.path for entry in found.damaged],
    }


def _print(out: Session, found: Listing) -> None:
    import time

    from holdfast.cli import words
    from holdfast.cli.session import table

    now = time.time()
    if found.checkpoints:
        rows = table(
            "step",
            "saved",
            "age",
            "leaves",
            "size",
            "metrics",
            right=("step", "age", "leaves", "size"),
            fold=("metrics",),
        )
        for entry in found.checkpoints:
            rows.add_row(*_cells(entry, now), style=None if entry.damage is None else "red")
        out.tabulate(rows)
        out.console.print()
    total = words.count(len(found.checkpoints), "checkpoint")
    out.say(
        f"{total}, {words.size(found.nbytes)}"
        if found.checkpoints
        else f"no checkpoints in {words.plain(found.path)}"
    )
    if found.damaged:
        names = ", ".join("?" if entry.step is None else str(entry.step) for entry in found.damaged)
        out.say(
            f"damaged: step {names}. `holdfast verify` lists every problem; restoring skips them.",
            style="red",
        )
    for leftover in found.leftovers:
        out.say(_leftover(leftover), style="dim")


def _cells(entry: Entry, now: float) -> tuple[str, ...]:
    from holdfast.cli import words

    step = "?" if entry.step is None else str(entry.step)
    if entry.created is None or entry.leaves is None:
        return step, "-", "-", "-", words.size(entry.nbytes), f"damaged: {words.plain(entry.damage or '')}"
    last = words.metrics(entry.metrics) if entry.damage is None else f"damaged: {words.plain(entry.damage)}"
    saved, age = words.moment(entry.created), words.age(now - entry.created)
    return step, saved, age, f"{entry.leaves:,}", words.size(entry.nbytes), last


def _leftover(found: Leftover) -> str:
    import os

    from holdfast.cli import words

    what = (
        "a save that did not finish, or is under way"
        if found.kind == "partial"
        else "retired, kept to be recycled"
    )
    return f"{os.path.basename(found.path)}, {words.size(found.nbytes)}: {what}; the next writer removes it"
