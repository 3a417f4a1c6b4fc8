"""``everystep prune RUN``: remove the checkpoints that no rule keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.checkpointer import Keep
    from everystep.inspect import Pruned

_DEFAULT_LAST = 3


def prune(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run's directory.")],
    last: Annotated[int | None, typer.Option("--last", min=1, metavar="N", help="Keep the newest N.")] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, metavar="N", help="Keep steps that are multiples of N.")
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            "--best", metavar="METRIC:min|max:N", help="Keep the N best by a metric, as in loss:min:2."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="Keep checkpoints that are at least S seconds apart."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints that no rule keeps, and the leftovers of unfinished saves.

    Without a rule, the rules of the run's last training apply (Keep). Rules given here replace them; the
    newest 3 stay unless --last says otherwise. A checkpoint stays if any rule keeps it. Damaged ones stay
    too, to be looked at. Fails if a training is writing to the run: its Checkpointer prunes by itself.
    """
    with session(as_json) as out:
        from everystep import inspect
        from everystep.cli import words

        given = _keep(last, every, best, seconds)
        try:
            done = inspect.prune(run, given, dry_run=dry_run)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise typer.BadParameter(words.plain(str(error))) from None
        if as_json:
            out.emit(done)
        else:
            _print(out, done, "rules" if given else "rules of the run")
        out.finish(problem=False)


def _keep(last: int | None, every: int | None, best: str | None, seconds: float | None) -> Keep | None:
    """The rules that were given; None if there are none."""
    from everystep.checkpointer import Keep

    if (last, every, best, seconds) == (None, None, None, None):
        return None
    try:
        ranking = None if best is None else _best(best)
        return Keep(_DEFAULT_LAST if last is None else last, every, ranking, seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _best(text: str) -> tuple[str, Literal["min", "max"], int]:
    parts = text.rsplit(":", 2)  # a metric's name may have colons of its own
    if len(parts) != 3 or not parts[0] or parts[1] not in ("min", "max") or not parts[2].isdecimal():
        raise typer.BadParameter(f"--best wants METRIC:min:N or METRIC:max:N, as in loss:min:2, not {text!r}")
    return parts[0], "min" if parts[1] == "min" else "max", int(parts[2])


def _print(out: Session, done: Pruned, whose: str) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    if done.removed or done.swept:
        verb = "would go" if done.dry_run else "removed"
        rows = table(verb, "size", right=("size",))
        for item in done.removed:
            rows.add_row(item.name, words.size(item.nbytes))
        for left in done.swept:
            what = "unfinished" if left.kind == "partial" else "removed before"
            rows.add_row(f"{left.name} ({what})", words.size(left.nbytes))
        out.tabulate(rows)
        out.console.print()
    out.say(f"{whose}: {_rules(done.rules)}")
    steps = ", ".join(map(str, done.kept[-10:]))
    more = f"{words.ELLIPSIS}, " if len(done.kept) > 10 else ""
    if done.kept:
        out.say(f"{'stays' if done.dry_run else 'kept'}: step {more}{steps}")
    elif not done.removed:
        out.say(f"nothing to prune in {words.plain(done.path)}: no checkpoint there is named by its step")
    if done.damaged:
        out.say(f"damaged, kept to be looked at: step {', '.join(map(str, done.damaged))}", style="yellow")
    for path in done.held:
        out.say(
            f"{words.plain(path)} is still being read: the next save, or the next prune, removes it",
            style="yellow",
        )
    out.say(f"{words.size(done.freed_nbytes)} {'would be freed' if done.dry_run else 'freed'}")


def _rules(keep: Keep) -> str:
    said = [f"the last {keep.last}"]
    if keep.every is not None:
        said.append(f"every {keep.every} steps")
    if keep.best is not None:
        metric, direction, count = keep.best
        said.append(f"the best {count} by {metric} ({direction})")
    if keep.seconds is not None:
        said.append(f"one every {keep.seconds:g} s")
    return "keep " + ", ".join(said)
