"""Which checkpoints a run has, whose they are, and which of them go when one is added.

A run belongs to one training. The checkpoints that this training has resumed from or saved are *ours*. A save
may replace one of ours, or one that was found damaged, and no other. A training that has not resumed may save
only into a run that was empty when it was opened. The exception is a training that starts over: it removes
all that the run held, once its first checkpoint is durable and before that one is reported durable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from everystep.checkpointer.events import warn
from everystep.checkpointer.keep import Keep, Kept, record_rules
from everystep.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
    OutOfResources,
    ReadFailed,
    RunInUse,
    SaveFailed,
    UnsupportedCheckpoint,
)
from everystep.store import CheckpointInfo, FollowedRun, WritableRun, list_steps, step_name
from everystep.store.commit.volumes import Ledger, id_at
from everystep.store.locks import path_to_read
from everystep.store.read.checkpoint import open_checkpoint
from everystep.store.read.verify import visible_damage


class Retention:
    """The checkpoints of one run, while it is being written."""

    def __init__(
        self,
        run: WritableRun | FollowedRun,
        keep: Keep,
        known: Sequence[Kept],
        ledger: Ledger | None = None,
        *,
        found: Sequence[int] = (),
        start_over: bool = False,
    ) -> None:
        """`found`: the steps that the run held when it was opened, damaged ones included. `ledger`: of a run
        whose shards go to volumes, on the process that retires them."""
        self._run = run
        self._ledger = ledger
        self._keep = keep
        self._recorded = False
        self._known = list(known)
        self._superseded: list[int] = []
        self._found = tuple(found)
        self._resumed = not found
        self._outdated: list[int] = list(found) if start_over else []
        self.starts_over = start_over
        """Until the first checkpoint of a training that starts over is durable."""
        self._ours: set[int] = set()
        self._damaged: set[int] = set()
        self._attempted: int | None = None

    @property
    def newest(self) -> int | None:
        """The newest step of ours, without those that training went back on."""
        ours = self._ours.difference(self._superseded)
        return max(ours.intersection([item.step for item in self._known]), default=None)

    def resumed(self, step: int | None) -> None:
        """This training goes on from that step (None: begins in an empty run), and may save into the run."""
        self._resumed = True
        if step is not None:
            self._ours.add(step)

    def require_ours(self, step: int) -> None:
        """Raises, unless this training may save that step into the run."""
        if not self._resumed and not self._outdated:
            raise RunInUse(
                f"run {self._run.path} holds checkpoints already ({_steps(self._found)}), and this training "
                f"has not resumed from one. Step {step} was not saved, nothing was changed. To go on from "
                "the newest one, call restore() before the first save. For a new training, use another "
                "directory, or Checkpointer(..., start_over=True): that removes the old checkpoints once the "
                "first new one is durable",
                steps=self._found,
            )
        if not self.may_replace(step) and any(item.step == step for item in self._known):
            raise self.exists(step)

    def may_replace(self, step: int) -> bool:
        """Whether a save of that step may take the place of a checkpoint of the same step."""
        if step == self._attempted or step in self._ours or step in self._damaged:
            return True
        return step in self._superseded or step in self._outdated

    def begin(self, step: int) -> bool:
        """A save of that step begins; returns whether it may replace a checkpoint of the same step. If it
        fails but leaves a checkpoint all the same, the next save of that step may replace that one."""
        replace = self.may_replace(step)
        self._attempted = step
        return replace

    def exists(self, step: int) -> CheckpointExists:
        """The error for a step whose checkpoint exists and may not be replaced."""
        self._attempted = None
        return CheckpointExists(
            f"step {step} was not saved: run {self._run.path} has a checkpoint of step {step} already, which "
            "this training did not make. To train on from an earlier step and drop the later ones, call "
            "restore(step=...) with it before; for another training, use another directory"
        )

    def mark_damaged(self, step: int) -> None:
        """A checkpoint that turned out damaged does not count for the rules.

        It stays on the disk, for people to look at, until training comes to that step again.
        """
        self._known = [item for item in self._known if item.step != step]
        self._damaged.add(step)

    def supersede(self, steps: Sequence[int]) -> None:
        """Training goes back to before these steps: the next commit removes them."""
        self._superseded = list(steps)

    @property
    def count(self) -> int:
        """The number of checkpoints in the run."""
        return len(self._known)

    def dispensable(self) -> list[int]:
        """Those that safety does not need, and no rule keeps for good; the first to go first.

        The newest of this training stays; before it has one, the newest of all.
        """
        newest = self.newest
        if newest is None and self._known:
            newest = self._known[-1].step
        going = {*self._superseded, *self._outdated}
        for_good = replace(self._keep, last=1).chosen(
            [item for item in self._known if item.step not in going]
        )
        steps = [item.step for item in self._known if item.step != newest]
        kept = [step for step in steps if step not in going and step not in for_good]
        return [step for step in steps if step in going] + kept

    def remove_early(self, step: int) -> None:
        """Removes one that is dispensable, although `Keep` wants it: the device needs its space."""
        self._retire([step], durable=True)
        self._known = [item for item in self._known if item.step != step]
        self._superseded = [other for other in self._superseded if other != step]

    def remove_superseded(self, step: int) -> None:
        """That step is about to be committed: first removes what training went back on, the last step first.

        A process that is killed between the two finds the step that training went back to. The other way
        round, it would find one that training has left.
        """
        self._known = [item for item in self._known if item.step not in self._superseded]
        later = sorted(filter(self._is_there, self._superseded), reverse=True)
        self._superseded = []
        if later:
            try:
                self._retire(later, durable=True)
            except SaveFailed as error:
                self._superseded = list(filter(self._is_there, later))
                warn(
                    f"could not remove a checkpoint that training went back on before step {step}; restore() "
                    f"may find it, and the next save tries again: {error}"
                )

    def add(self, info: CheckpointInfo) -> None:
        """Adds one that has just become durable, and retires those that no rule keeps any more."""
        newest = info.step
        if self._run.directory is not None and not self._recorded:
            self._recorded = True
            record_rules(self._run.directory, self._keep)
        self._ours.add(newest)
        self._damaged.discard(newest)
        self.remove_outdated(newest)
        # Those that the coordinator has removed; what resisted has to go before the next one.
        others = [item for item in self._known if item.step not in (newest, *self._superseded)]
        self._superseded = [step for step in self._superseded if step != newest and self._is_there(step)]
        known = sorted([*others, Kept(newest, info.created, info.metrics)], key=lambda item: item.step)
        # After going back to an older step, the one just saved need not be the last by number; it stays.
        stay = self._keep.chosen(known) | {newest}
        gone = [item.step for item in known if item.step not in stay]
        try:
            self._retire(gone)
        except SaveFailed as error:
            # What could not be taken away stays a candidate for the next time.
            warn(f"step {newest} is saved, but an old checkpoint could not be removed: {error}")
            gone = [step for step in gone if not self._is_there(step)]
        self._known = [item for item in known if item.step not in gone]
        self._ours &= {item.step for item in self._known}

    def remove_outdated(self, newest: int) -> None:
        """The first checkpoint of a training that starts over is durable: removes what the run held before.

        The old ones are gone for good before the new one is reported durable. The newest of them goes last: a
        crash in between leaves it, or only the new one.
        """
        outdated = sorted(set(self._outdated) - {newest})
        self._resumed = True  # before the next line: the training's thread asks for both
        self._outdated, self.starts_over = [], False
        self._known = [item for item in self._known if item.step not in outdated]
        old = list(filter(self._is_there, outdated))
        if old:
            try:
                self._retire(old, durable=True)
            except (SaveFailed, OSError) as error:
                self._superseded += filter(self._is_there, old)
                warn(
                    f"step {newest} is saved, but a checkpoint of an older training could not be removed; "
                    f"restore() may find it, and the next save tries again: {error}"
                )

    def _retire(self, steps: list[int], *, durable: bool = False) -> None:
        if self._ledger is None:
            self._run.retire(steps, durable=durable)
            return
        assert self._run.directory is not None
        ids = {step: id_at(path_to_read(self._run.directory, step_name(step))) for step in steps}
        self._run.retire(steps, durable=durable, ids=ids)

    def _is_there(self, step: int) -> bool:
        return self._run.has(step)


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def history(run: str) -> list[Kept]:
    """The run's checkpoints in order of step, without those that are visibly damaged.

    A damaged one must not count among those to keep: if it were the newest, the last whole one could be
    removed. Shards on volumes of other hosts cannot be seen from here; they count as intact.
    """
    found = []
    for step in list_steps(run):
        try:
            with open_checkpoint(os.path.join(run, step_name(step))) as checkpoint:
                if visible_damage(checkpoint, far=False) is None:
                    found.append(Kept(step, checkpoint.created, checkpoint.metrics))
        except OutOfResources:
            raise
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint, CheckpointNotFound):
            continue
    return found


def ids(run: str) -> tuple[str, ...] | None:
    """The ids of all checkpoints of a run, damaged or not; None if one of them cannot be read."""
    found = []
    for step in list_steps(run):
        path = os.path.join(run, step_name(step))
        try:
            with open_checkpoint(path) as checkpoint:
                found.append(checkpoint.id)
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint, CheckpointNotFound):
            if os.path.lexists(path):  # else it was removed just now
                return None
    return tuple(found)
