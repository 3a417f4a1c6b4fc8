"""Every byte of a checkpoint, or of all checkpoints of a run, read and checked."""

from __future__ import annotations

import os

from everystep.errors import CheckpointNotFound, IncompleteCheckpoint, OutOfResources, ReadFailed
from everystep.inspect.run_listing import checkpoints_of, directory_nbytes, is_gone, reason_of
from everystep.store import Options, VerifyProblem, VerifyReport, verify
from everystep.store.stream.progress import Progress, no_progress


def verify_all(
    path: str | os.PathLike[str], *, options: Options | None = None, progress: Progress = no_progress
) -> tuple[VerifyReport, ...]:
    """Check every byte of a checkpoint, or of all checkpoints of a run, oldest first.

    Damage is reported, not raised. A checkpoint that cannot be read does not hide the others. One that
    retention removes in the meantime is left out.

    Args:
        path: A checkpoint, a run, or a directory of runs.
        options: How to read, as for `everystep.load`.
        progress: Called with the bytes checked so far, and the bytes in all.
    """
    targets = {target: directory_nbytes(target) for target in checkpoints_of(path)}
    total = sum(targets.values())
    reports = []
    done = 0
    for target, nbytes in targets.items():
        found = _verify(target, options, done, total, progress)
        if found is not None:
            reports.append(found)
        done += nbytes
        progress(done, total)
    return tuple(reports)


def _verify(
    target: str, options: Options | None, before: int, total: int, progress: Progress
) -> VerifyReport | None:
    try:
        return verify(target, options=options, progress=lambda nbytes: progress(before + nbytes, total))
    except IncompleteCheckpoint as error:
        return VerifyReport(
            target, None, 0, 0, (VerifyProblem(error.path or target, "the manifest is missing"),)
        )
    except OutOfResources:
        raise
    except (CheckpointNotFound, ReadFailed) as error:
        if is_gone(target):
            return None
        return VerifyReport(target, None, 0, 0, (VerifyProblem(target, reason_of(error)),))
