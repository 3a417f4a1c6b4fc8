"""``holdfast prune RUN``: removing checkpoints that no rule wants."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from holdfast.cli.session import Json, Session, session

if TYPE_CHECKING:
    from holdfast.checkpointer import Keep
    from holdfast.cli.listing import Listing

_DEFAULT_LAST = 3


def prune(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run's directory.")],
    last: Annotated[int, typer.Option("--last", min=1, help="Keep the newest so many.")] = _DEFAULT_LAST,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Keep steps that are a multiple of this.")
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            "--best", metavar="METRIC:min|max:N", help="Keep the N best by a metric, as in loss:min:2."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Keep checkpoints at least this far apart in time.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints that no rule wants, and what unfinished saves left.

    A checkpoint stays if any rule wants it. Damaged ones stay too, to be looked at. A run that a training is
    writing to is refused: its Checkpointer prunes by itself.
    """
    with session(as_json) as out:
        done = _prune(run, _keep(last, every, best, seconds), dry_run=dry_run)
        if as_json:
            out.emit(done)
        else:
            _print(out, done)
        out.finish(problem=False)


@dataclass(frozen=True, slots=True)
class Removed:
    """A directory that is gone, or would be."""

    path: str
    step: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was done. `held`: given up, but still open somewhere; the next writer removes them."""

    path: str
    dry_run: bool
    rules: dict[str, object]
    removed: tuple[Removed, ...]
    swept: tuple[Removed, ...]
    kept: tuple[int, ...]
    damaged: tuple[int, ...]
    held: tuple[str, ...]
    freed_nbytes: int


def _keep(last: int, every: int | None, best: str | None, seconds: float | None) -> Keep:
    from holdfast.checkpointer import Keep

    try:
        return Keep(last=last, every=every, best=None if best is None else _best(best), seconds=seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _best(text: str) -> tuple[str, Literal["min", "max"], int]:
    parts = text.rsplit(":", 2)  # a metric's name may have colons of its own
    if len(parts) != 3 or not parts[0] or parts[1] not in ("min", "max") or not parts[2].isdecimal():
        raise typer.BadParameter(f"--best wants METRIC:min:N or METRIC:max:N, as in loss:min:2, not {text!r}")
    return parts[0], "min" if parts[1] == "min" else "max", int(parts[2])


def _prune(run: Path, keep: Keep, *, dry_run: bool) -> Pruned:
    import os

    from holdfast.cli.listing import leftovers, list_run
    from holdfast.errors import CheckpointNotFound
    from holdfast.store import WritableRun, is_checkpoint, step_name
    from holdfast.store.commit import volumes
    from holdfast.store.locks import path_to_read

    where = os.path.abspath(run)
    if is_checkpoint(where):
        raise CheckpointNotFound(f"{where} is one checkpoint, not a run: name the directory around it")
    before = list_run(where)
    gone = _superfluous(before, keep)
    if (gone or before.leftovers) and not dry_run:
        unfinished = before.leftovers
        with closing(WritableRun(where)) as writable:  # sweeps what unfinished saves left
            # Again: until the lock was taken, a training may have saved, or the path have led elsewhere.
            before = replace(list_run(where), leftovers=unfinished)
            writable.require_current()
            gone = _superfluous(before, keep)
            paths = {step_name(step): path_to_read(writable.directory, step_name(step)) for step in gone}
            elsewhere = {name: volumes.homes_of(path) for name, path in paths.items()}
            # Those of other hosts are removed by the ranks there, with the next save.
            ledger = volumes.Ledger(writable.directory)
            with ledger.retiring({name: id for name, (id, _) in elsewhere.items()}):
                writable.retire(gone)
        for home in (home for _, homes in elsewhere.values() for home in homes):
            volumes.remove(home)
    removed = tuple(
        Removed(entry.path, entry.step, entry.nbytes) for entry in before.checkpoints if entry.step in gone
    )
    swept = tuple(Removed(found.path, None, found.nbytes) for found in before.leftovers)
    held = () if dry_run else leftovers(where)
    return Pruned(
        path=where,
        dry_run=dry_run,
        rules={"last": keep.last, "every": keep.every, "best": keep.best, "seconds": keep.seconds},
        removed=removed,
        swept=swept,
        kept=tuple(
            entry.step for entry in before.checkpoints if entry.step is not None and entry.step not in gone
        ),
        damaged=tuple(
            entry.step for entry in before.damaged if entry.step is not None and entry.step not in gone
        ),
        held=tuple(found.path for found in held),
        freed_nbytes=sum(item.nbytes for item in (*removed, *swept)) - sum(found.nbytes for found in held),
    )


def _superfluous(run: Listing, keep: Keep) -> list[int]:
    """The steps that no rule wants."""
    from holdfast.checkpointer import Kept

    # One that is damaged counts for no rule: were it the newest, the last whole one would go in its favour.
    whole = [
        Kept(entry.step, entry.created, entry.metrics)
        for entry in run.checkpoints
        if entry.damage is None and entry.step is not None and entry.created is not None
    ]
    stay = keep.chosen(whole)
    return [item.step for item in whole if item.step not in stay]


def _print(out: Session, done: Pruned) -> None:
    import os

    from holdfast.cli import words
    from holdfast.cli.session import table

    if done.removed or done.swept:
        verb = "would go" if done.dry_run else "removed"
        rows = table(verb, "size", right=("size",))
        for item in (*done.removed, *done.swept):
            name = os.path.basename(item.path)
            rows.add_row(name if item.step is not None else f"{name} (unfinished)", words.size(item.nbytes))
        out.tabulate(rows)
        out.console.print()
    out.say(f"rules: {_rules(done.rules)}")
    steps = ", ".join(map(str, done.kept[-10:]))
    more = f"{words.ELLIPSIS}, " if len(done.kept) > 10 else ""
    out.say(f"{'stays' if done.dry_run else 'kept'}: {f'step {more}{steps}' if done.kept else 'nothing'}")
    if done.damaged:
        out.say(f"damaged, kept to be looked at: step {', '.join(map(str, done.damaged))}", style="yellow")
    for path in done.held:
        out.say(f"{words.plain(path)} is still being read; the next writer removes it", style="yellow")
    out.say(f"{words.size(done.freed_nbytes)} {'would be freed' if done.dry_run else 'freed'}")


def _rules(rules: dict[str, object]) -> str:
    said = [f"the last {rules['last']}"]
    if rules["every"] is not None:
        said.append(f"every {rules['every']} steps")
    if isinstance(rules["best"], tuple):
        metric, direction, count = rules["best"]
        said.append(f"the best {count} by {metric} ({direction})")
    if rules["seconds"] is not None:
        said.append(f"one every {rules['seconds']:g} s")
    return "keep " + ", ".join(said)
