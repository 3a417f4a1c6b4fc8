"""``holdfast verify PATH``: every byte of a checkpoint, or of all checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.session import Advance, Json, Session, session

if TYPE_CHECKING:
    from holdfast.store import Report


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="PATH", help="A checkpoint, or a run: all of its checkpoints."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Read every byte and check it. Names each damaged file and leaf; exit code 1 when there is one."""
    with session(as_json) as out:
        import os
        import time

        from holdfast.cli.listing import checkpoints_of, directory_nbytes

        targets = {target: directory_nbytes(target) for target in checkpoints_of(path)}
        began = time.perf_counter()
        reports = []
        done = 0
        with out.progress("verifying", sum(targets.values())) as advance:
            for target, nbytes in targets.items():
                found = _verify(target, _from(done, advance))
                if found is not None:
                    reports.append(found)
                done += nbytes
                advance(done)
        seconds = time.perf_counter() - began
        damaged = [report for report in reports if not report.intact]
        if as_json:
            documents = [_document(report) for report in reports]
            out.emit({"path": os.path.abspath(path), "intact": not damaged, "checkpoints": documents})
        else:
            for report in reports:
                _print(out, report)
            _summary(out, reports, len(damaged), seconds)
        out.finish(problem=bool(damaged))


def _verify(target: str, advance: Advance) -> Report | None:
    """None when retention took it away meanwhile. One that cannot be read does not hide the others."""
    from holdfast.cli.listing import is_gone, why
    from holdfast.errors import CheckpointNotFound, IncompleteCheckpoint, OutOfResources, ReadFailed
    from holdfast.store import Problem, Report, verify

    try:
        return verify(target, progress=advance)
    except IncompleteCheckpoint as error:
        return Report(target, None, 0, 0, (Problem(error.path or target, "the manifest is missing"),))
    except OutOfResources:
        raise
    except (CheckpointNotFound, ReadFailed) as error:
        if is_gone(target):
            return None
        return Report(target, None, 0, 0, (Problem(target, why(error)),))


def _from(start: int, advance: Advance) -> Advance:
    return lambda nbytes: advance(start + nbytes)


def _document(report: Report) -> dict[str, object]:
    return {
        "path": report.path,
        "step": report.step,
        "intact": report.intact,
        "leaves": report.leaves,
        "nbytes": report.nbytes,
        "files": report.files,
        "problems": report.problems,
        "strangers": report.strangers,
    }


def _print(out: Session, report: Report) -> None:
    import os

    from holdfast.cli import words

    name = words.plain(os.path.basename(report.path))
    if report.intact:
        amount = f"{words.count(report.leaves, 'leaf', 'leaves')}, {words.size(report.nbytes)}"
        if report.files > 2:
            amount += f" in {words.count(report.files, 'file')}"
        out.say(f"intact   {name}   {amount}", style="green")
    else:
        out.say(f"DAMAGED  {name}   {words.count(len(report.problems), 'problem')}", style="bold red")
    for problem in report.problems:
        leaf = f", leaf {words.plain(problem.leaf)!r}" if problem.leaf is not None else ""
        out.say(f"         {words.plain(problem.file)}{leaf}: {words.plain(problem.reason)}", style="red")
    for stranger in report.strangers:
        out.say(f"         {words.plain(stranger)} does not belong to the checkpoint (harmless)", style="dim")


def _summary(out: Session, reports: list[Report], damaged: int, seconds: float) -> None:
    from holdfast.cli import words

    nbytes = sum(report.nbytes for report in reports)
    if damaged:
        out.say(f"{damaged} of {words.count(len(reports), 'checkpoint')} damaged", style="bold red")
    elif len(reports) > 1 or nbytes > 100_000_000:
        checked = words.count(len(reports), "checkpoint")
        amount = f"{words.size(nbytes)} at {words.speed(nbytes, seconds)}"
        out.say(f"{checked} intact: every byte read and checked, {amount}")
