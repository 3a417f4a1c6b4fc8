"""Which checkpoints a run has, as its `Keep` sees them, and which of them go when one is added."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from holdfast.checkpointer.keep import Keep, Kept
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    OutOfResources,
    ReadFailed,
    SaveFailed,
    UnsupportedCheckpoint,
)
from holdfast.store import Checkpoint, CheckpointInfo, FollowedRun, WritableRun, list_steps, step_name
from holdfast.store.volumes import Ledger, id_at


class Retention:
    """The checkpoints of one run, while it is being written."""

    def __init__(
        self,
        run: WritableRun | FollowedRun,
        keep: Keep,
        known: Sequence[Kept],
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger`: of a run whose shards go to volumes, where it is this process that retires them."""
        self._run = run
        self._ledger = ledger
        self._keep = keep
        self._known = list(known)
        self._superseded: list[int] = []

    @property
    def newest(self) -> int | None:
        return self._known[-1].step if self._known else None

    def forget(self, step: int) -> None:
        """One that turned out damaged takes no place among those to keep; it stays to be looked at."""
        self._known = [item for item in self._known if item.step != step]

    def supersede(self, steps: Sequence[int]) -> None:
        """Training goes back on these: the next one that is committed removes them."""
        self._superseded = list(steps)

    def make_way(self, step: int) -> None:
        """One is about to be committed: what training went back on goes first, the last step first, for good.

        Whoever is killed between the two finds what training went back to. The other way round, it would find
        what that has given up.
        """
        self._known = [item for item in self._known if item.step not in self._superseded]
        later = sorted(filter(self._is_there, self._superseded), reverse=True)
        self._superseded = []
        if later:
            try:
                self._retire(later, durable=True)
            except SaveFailed as error:
                self._superseded = list(filter(self._is_there, later))
                self._warn(
                    f"a checkpoint that training went back on could not be retired for step {step}, and "
                    f"restore() may find it; the next save tries again: {error}"
                )

    def add(self, info: CheckpointInfo) -> None:
        """One that has just become durable; retires what is not to be kept any more."""
        newest = info.step
        # Those that the coordinator has made way with; what resisted has to go before the next one.
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
            self._warn(f"step {newest} is saved, but an old checkpoint could not be retired: {error}")
            gone = [step for step in gone if not self._is_there(step)]
        self._known = [item for item in known if item.step not in gone]

    def _retire(self, steps: list[int], *, durable: bool = False) -> None:
        if self._ledger is None:
            self._run.retire(steps, durable=durable)
            return
        paths = map(self._run.path_of, steps)
        with self._ledger.retiring({path: id_at(path) for path in paths}):
            self._run.retire(steps, durable=durable)

    def _is_there(self, step: int) -> bool:
        return os.path.isdir(self._run.path_of(step))

    @staticmethod
    def _warn(message: str) -> None:
        """The save itself is none the worse for it."""
        warnings.warn(message, RuntimeWarning, stacklevel=5)


def history(run: str) -> list[Kept]:
    """The run's checkpoints in order of step, as far as they look intact without being read.

    One that is visibly damaged is nobody's candidate: were it the newest, the last whole one would go in its
    favour. Of shards on volumes of other hosts nothing can be told from here: they count as intact.
    """
    found = []
    for step in list_steps(run):
        try:
            with Checkpoint(os.path.join(run, step_name(step))) as checkpoint:
                if checkpoint.visible_damage(far=False) is None:
                    found.append(Kept(step, checkpoint.created, checkpoint.metrics))
        except OutOfResources:
            raise
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint, CheckpointNotFound):
            continue
    return found


def ids(run: str) -> tuple[str, ...] | None:
    """The ids of all checkpoints of a run, damaged or not; None when one cannot even be told."""
    found = []
    for step in list_steps(run):
        path = os.path.join(run, step_name(step))
        try:
            with Checkpoint(path) as checkpoint:
                found.append(checkpoint.id)
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint, CheckpointNotFound):
            if os.path.lexists(path):  # else somebody has taken it away just now
                return None
    return tuple(found)
