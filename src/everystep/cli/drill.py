"""``everystep drill -- COMMAND``: kill a training again and again. `everystep.drill` does the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from everystep.cli.session import Json, Session, session

if TYPE_CHECKING:
    from everystep.drill import DrillProgress, DrillReport, Killed, Times
    from everystep.drill.comparison import Final

_MANY = 25
_SAME = 3
"""How many problems of one kind are printed."""
_WHEN = {
    "starting": "while starting",
    "restoring": "while restoring",
    "training": "between saves",
    "saving": "in a save",
}


def drill(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The training, as you would start it: python train.py ..."),
    ],
    times: Annotated[int, typer.Option("--times", "-n", min=1, help="How often to kill it.")] = 10,
    seed: Annotated[int, typer.Option("--seed", help="Draws other moments to kill at.")] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds that one start of it may take.")
    ] = 3600.0,
    workdir: Annotated[
        Path | None,
        typer.Option(
            "--workdir",
            readable=False,
            help="Keep runs, output and logs in this directory; default: a temporary one here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Kill a training again and again, resume it, and prove that the result is the same.

    It runs once undisturbed, then with SIGKILL at random moments, in saves and restores too, until it ends.
    The script needs no change: its Checkpointer works in a directory of the drill, real runs are not touched.
    Exit code 1 if durable steps were lost, or if any bit of any checkpoint differs.
    """
    import shutil

    if shutil.which(command[0]) is None:
        why = "no such command"
        if Path(command[0]).is_file():
            why = f"not a command that can be executed; if it is a script: python {command[0]}"
        raise typer.BadParameter(f"{command[0]}: {why}", param_hint="COMMAND")
    with session(as_json) as out:
        from everystep.drill.procedure import DrillOptions, run_drill

        options = DrillOptions(tuple(command), times, seed, timeout, workdir)
        with _ended_by_signals(), _progress(out) as on_progress:
            report = run_drill(options, on_progress)
        if as_json:
            out.emit(report.document())
        else:
            _print(out, report)
            if workdir is not None:
                out.say(f"everything is kept in {workdir}", style="dim")
        out.finish(problem=not report.ok)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A SIGTERM or a closed terminal ends the drill and everything it started, as Ctrl-C does.

    The training is in a session of its own: it would not receive these signals, and would go on.
    """
    import signal

    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL
    ]

    def end(number: int, frame: object) -> NoReturn:
        for other in ours:
            signal.signal(other, signal.SIG_IGN)  # cleaning up must not be interrupted
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _progress(out: Session) -> Iterator[Callable[[DrillProgress], None]]:
    """On a terminal, one line that shows which kill is next and how far training is."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    with out.errors.status("starting") as status:
        yield lambda progress: status.update(
            f"{progress.doing}: step {progress.step:,}"
            + (f" of {progress.steps:,}" if progress.steps else "")
        )


def _print(out: Session, report: DrillReport) -> None:
    from everystep.cli import words
    from everystep.cli.session import facts

    first = f" (the first start: {words.duration(report.reference_start_seconds)})"
    rows = [
        ("command", words.plain(" ".join(report.command))),
        ("undisturbed", f"{words.count(report.steps, 'step')} in {words.duration(report.reference_seconds)}"),
        ("killed", _kills(report)),
        ("steps lost", f"{sum(report.lost):,} in all, {max(report.lost, default=0):,} at most per kill"),
        ("restored", f"{_span(report.restored_seconds)}{first}"),
        ("next durable", _span(report.durable_seconds)),
        ("every step", _agreement(report)),
        *[("last one", _final(final)) for final in report.finals],
    ]
    out.show(facts(rows))
    out.console.print()
    _print_kills(out, report.kills)
    out.console.print()
    for note in report.notes:
        out.say(words.plain(note))
    if report.ok:
        out.say("passed: nothing lost that had to survive, not one bit different", style="green")
        return
    out.say("NOT passed", style="bold red")
    _print_problems(out, report)
    if report.causes:
        out.say("What commonly causes this:")
        for cause in report.causes:
            out.say(f"  - {words.plain(cause)}")


def _kills(report: DrillReport) -> str:
    from everystep.cli import words

    phases = ", ".join(f"{count} {_WHEN[phase]}" for phase, count in report.phases.items() if count)
    again = f", in {report.rounds} trainings" if report.rounds > 1 else ""
    when = f": {phases}" if phases else ""
    return f"{words.count(len(report.kills), 'time')}{when}{again} (seed {report.seed})"


def _span(times: Times | None) -> str:
    from everystep.cli import words

    if times is None:
        return "never"
    return (
        f"{words.duration(times.median)} after the process started, at most {words.duration(times.longest)}"
    )


def _agreement(report: DrillReport) -> str:
    from everystep.cli import words

    found = report.agreement
    compared = words.count(found.compared, "checkpoint", "checkpoints")
    if not found.compared:
        return "no checkpoint was seen in both"
    if not found.differing:
        return f"{compared} seen in both, all equal"
    return f"{compared} seen in both, {found.differing:,} differ"


def _final(final: Final) -> str:
    from everystep.cli import words

    if final.equal:
        leaves = words.count(final.leaves, "leaf", "leaves")
        return f"step {final.step:,}: identical bit for bit ({leaves}, {words.size(final.nbytes)})"
    if final.step != final.reference_step:
        return f"step {final.step:,}, undisturbed {final.reference_step:,}"
    differing = words.count(len(final.differing), "leaf or value differs", "leaves and values differ")
    return f"step {final.step:,}: {differing}"


def _print_kills(out: Session, kills: tuple[Killed, ...]) -> None:
    from everystep.cli import words
    from everystep.cli.session import table

    columns = ("kill", "when", "at step", "resumed from", "lost", "restored", "next durable")
    rows = table(*columns, right=tuple(name for name in columns if name != "when"))

    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    def seconds(value: float | None) -> str:
        return "-" if value is None else words.duration(value)

    for kill in kills[:_MANY]:
        rows.add_row(
            str(kill.number),
            _WHEN[kill.phase],
            number(kill.step),
            number(kill.resumed),
            number(kill.lost) + ("" if kill.kept else " !"),
            seconds(kill.restored_seconds),
            seconds(kill.durable_seconds),
        )
    out.tabulate(rows)
    if len(kills) > _MANY:
        out.say(f"{words.ELLIPSIS} and {len(kills) - _MANY:,} more (--json has them)", style="dim")


def _print_problems(out: Session, report: DrillReport) -> None:
    from everystep.cli import words

    told: dict[str, int] = {}
    for problem in report.problems:
        told[problem.kind] = told.get(problem.kind, 0) + 1
        if told[problem.kind] > _SAME:
            continue
        out.say(f"  {words.plain(problem.message)}", style="red")
        for line in problem.details.splitlines():
            out.say(f"    {words.plain(line)}", style="dim")
    for kind, count in told.items():
        if count > _SAME:
            out.say(f"  {words.ELLIPSIS} and {count - _SAME:,} more of the kind {kind!r} (--json has them)")
