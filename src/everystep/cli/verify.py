"""``everystep verify PATH``: every byte of a checkpoint, or of all checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli.session import Json, MaxInflation, Session, session

if TYPE_CHECKING:
    from everystep.store import VerifyReport


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="PATH", help="A checkpoint; or a run, or a directory of runs: all in it."
        ),
    ],
    max_inflation: MaxInflation = 100,
    as_json: Json = False,
) -> None:
    """Read every byte and check it. Names each damaged file and leaf; exit code 1 if there is one.

    A checkpoint of another system has no checksums: its sizes, its structure and the CRCs of its archives are
    checked, and it is called readable.
    """
    with session(as_json) as out:
        import os
        import time

        from everystep import Options, inspect

        options = Options(max_inflation=max_inflation)
        began = time.perf_counter()
        with out.progress("verifying") as progress:
            reports = inspect.verify_all(path, options=options, progress=progress)
        seconds = time.perf_counter() - began
        damaged = [report for report in reports if not report.intact]
        if as_json:
            documents = [_document(report) for report in reports]
            out.emit({"path": os.path.abspath(path), "intact": not damaged, "checkpoints": documents})
        else:
            for report in reports:
                _print(out, report, _name(report, reports, path))
            _summary(out, reports, len(damaged), seconds)
        out.finish(problem=bool(damaged))


def _document(report: VerifyReport) -> dict[str, object]:
    return {
        "path": report.path,
        "step": report.step,
        "intact": report.intact,
        "instead": report.instead,
        "leaves": report.leaves,
        "nbytes": report.nbytes,
        "files": report.files,
        "problems": report.problems,
        "strangers": report.strangers,
    }


def _name(report: VerifyReport, reports: tuple[VerifyReport, ...], path: Path) -> str:
    """The name of its directory; with its run if there are several."""
    import os

    from everystep.cli import words

    one_run = len({os.path.dirname(other.path) for other in reports}) == 1
    return words.plain(os.path.basename(report.path) if one_run else os.path.relpath(report.path, path))


def _print(out: Session, report: VerifyReport, name: str) -> None:
    from everystep.cli import words

    if report.intact:
        amount = f"{words.count(report.leaves, 'leaf', 'leaves')}, {words.size(report.nbytes)}"
        if report.files > 2:
            amount += f" in {words.count(report.files, 'file')}"
        word = "readable" if report.instead else "intact  "
        out.say(f"{word} {name}   {amount}", style="green")
        if report.instead:
            out.say(f"         {words.plain(report.instead)}", style="dim")
    else:
        out.say(f"DAMAGED  {name}   {words.count(len(report.problems), 'problem')}", style="bold red")
    for problem in report.problems:
        leaf = f", leaf {words.plain(problem.leaf)!r}" if problem.leaf is not None else ""
        out.say(f"         {words.plain(problem.file)}{leaf}: {words.plain(problem.reason)}", style="red")
    for stranger in report.strangers:
        out.say(f"         {words.plain(stranger)} does not belong to the checkpoint (harmless)", style="dim")


def _summary(out: Session, reports: tuple[VerifyReport, ...], damaged: int, seconds: float) -> None:
    from everystep.cli import words

    nbytes = sum(report.nbytes for report in reports)
    if damaged:
        out.say(f"{damaged} of {words.count(len(reports), 'checkpoint')} damaged", style="bold red")
    elif len(reports) > 1 or nbytes > 100_000_000:
        checked = words.count(len(reports), "checkpoint")
        amount = f"{words.size(nbytes)} at {words.speed(nbytes, seconds)}"
        how = (
            "every byte read" if any(report.instead for report in reports) else "every byte read and checked"
        )
        out.say(f"{checked} intact: {how}, {amount}")
