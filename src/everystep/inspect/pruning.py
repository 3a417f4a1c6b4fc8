"""Removing the checkpoints of a run that no rule keeps, and the leftovers of unfinished saves."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from everystep.checkpointer import Keep, Kept
from everystep.checkpointer.keep import recorded_rules
from everystep.errors import CheckpointNotFound, StateMismatch
from everystep.inspect.run_listing import Leftover, ListedCheckpoint, Listing, leftovers, list_run
from everystep.store import WritableRun, is_checkpoint, locate, step_name
from everystep.store.commit import volumes
from everystep.store.locks import path_to_read


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did, or would do.

    Attributes:
        path: The run.
        dry_run: Nothing was removed: this is what would be.
        rules: By which rules.
        removed: The checkpoints that no rule keeps.
        swept: What earlier writers left: unfinished saves and retired checkpoints.
        kept: Steps of the checkpoints that stay.
        damaged: Those of them that are damaged.
        held: Directories that are still being read; the next writer removes them.
        freed_nbytes: Bytes of the files that were removed.
    """

    path: str
    dry_run: bool
    rules: Keep
    removed: tuple[ListedCheckpoint, ...]
    swept: tuple[Leftover, ...]
    kept: tuple[int, ...]
    damaged: tuple[int, ...]
    held: tuple[str, ...]
    freed_nbytes: int


def prune(run: str | os.PathLike[str], keep: Keep | None = None, *, dry_run: bool = False) -> Pruned:
    """Remove the checkpoints of a run that no rule keeps. Damaged ones stay, to be looked at.

    Raises `ValueError` if the run has no rules and `keep` is not given, `everystep.StateMismatch` if `keep`
    names a metric that no checkpoint has, and `everystep.errors.Locked` if a training is writing to the run:
    its Checkpointer prunes by itself.

    Args:
        run: The run.
        keep: Which checkpoints stay; by default the rules of the run's last training.
        dry_run: Remove nothing, and report what would be removed.
    """
    where = locate(run)
    if is_checkpoint(where):
        raise CheckpointNotFound(f"{where} is one checkpoint, not a run: name the directory around it")
    before = _own(list_run(where))
    if before.runs:
        raise CheckpointNotFound(f"{where} is not a run, but there are runs below it: prune them one by one")
    rules = keep or _recorded(before, where)
    unwanted = _unwanted(before, rules)
    if (unwanted or before.leftovers) and not dry_run:
        before, unwanted, rules = _remove(where, before, keep)
    held = () if dry_run else leftovers(where)
    return _outcome(before, unwanted, rules, dry_run, {found.path: found.nbytes for found in held})


def _recorded(run: Listing, directory: str) -> Keep:
    """The run's own rules. Without checkpoints, it makes no difference which these are."""
    found = recorded_rules(directory) or (None if run.checkpoints else Keep())
    if found is None:
        raise ValueError(
            f"{run.path} does not say which of its checkpoints to keep: a Checkpointer records that with its "
            "first save. Nothing was removed. Give a rule: --last 3, or Keep(last=3) in Python"
        )
    return found


def _remove(where: str, before: Listing, keep: Keep | None) -> tuple[Listing, list[int], Keep]:
    """Removes under the run's lock. Returns the run as it was then, the removed steps, and the rules."""
    with closing(WritableRun(where)) as writable:  # removes the leftovers of unfinished saves
        # List again: before the lock was taken, a training may have saved, or the path may have been changed.
        now = replace(_own(list_run(where)), leftovers=before.leftovers)
        writable.require_current()
        rules = keep or _recorded(now, path_to_read(writable.directory))
        unwanted = _unwanted(now, rules)
        elsewhere = {
            step: volumes.homes_of(path_to_read(writable.directory, step_name(step))) for step in unwanted
        }
        # Shards on other hosts are removed by the ranks there, with the next save.
        writable.retire(unwanted, ids={step: id for step, (id, _) in elsewhere.items()})
    for home in (home for _, homes in elsewhere.values() for home in homes):
        volumes.remove(home)
    return now, unwanted, rules


def _own(found: Listing) -> Listing:
    """Without checkpoints of other names: users saved them there on purpose, and no rule counts them."""
    return replace(found, checkpoints=tuple(entry for entry in found.checkpoints if entry.named_by_step))


def _unwanted(run: Listing, keep: Keep) -> list[int]:
    """The steps that no rule keeps."""
    # A damaged one counts for no rule: if it were the newest, the last intact one could be removed for it.
    whole = [
        Kept(entry.step, entry.created, entry.metrics)
        for entry in run.checkpoints
        if entry.damage is None and entry.step is not None and entry.created is not None
    ]
    _require_metric(run, whole, keep)
    stay = keep.chosen(whole)
    return [item.step for item in whole if item.step not in stay]


def _require_metric(run: Listing, whole: Sequence[Kept], keep: Keep) -> None:
    if not whole or keep.best is None:
        return
    metric = keep.best[0]
    known = sorted({name for item in whole for name in item.metrics})
    if metric not in known:
        names = ", ".join(map(repr, known)) or "no metrics at all"
        raise StateMismatch(
            f"no checkpoint of {run.path} has the metric {metric!r}: they have {names}. Nothing was removed",
            missing=[metric],
        )


def _outcome(
    run: Listing, unwanted: Collection[int], keep: Keep, dry_run: bool, held: dict[str, int]
) -> Pruned:
    removed = tuple(entry for entry in run.checkpoints if entry.step in unwanted)
    staying = [entry for entry in run.checkpoints if entry.step is not None and entry.step not in unwanted]
    return Pruned(
        path=run.path,
        dry_run=dry_run,
        rules=keep,
        removed=removed,
        swept=run.leftovers,
        kept=tuple(entry.step for entry in staying if entry.step is not None),
        damaged=tuple(entry.step for entry in staying if entry.step is not None and entry.damage is not None),
        held=tuple(held),
        freed_nbytes=sum(entry.nbytes for entry in removed)
        + sum(left.nbytes for left in run.leftovers)
        - sum(held.values()),
    )
