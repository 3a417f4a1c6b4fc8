"""One save of a Checkpointer, from its call to its end, step by step.

On the training's thread:

1. `prepare`: the state is taken apart, and it is known which leaves this rank writes.
2. `stage`: leaves that may change without an announcement are copied, as far as the memory for copies goes.
3. `start`: the rest runs on a thread of its own. `start` returns when everything has left the state's memory
   that may be neither copied nor read in place; in ``mode="sync"``, when the checkpoint is durable.

On the save's thread, in `run`:

4. Space is made on the device, and the checkpoint is committed. `SaveTask` is the commit's `SaveObserver`.
5. The checkpoint is durable: retention removes old ones, and the observers and the schedule are called.

`release` is called by the training's thread before it changes leaves that are read in place. What the user
holds of all this is a `PendingSave`. The thread is not a daemon: an interpreter that ends waits for the
checkpoint that is under way.

What a signal handler raises (Ctrl-C) may come between any two steps of the training's thread, also while an
earlier one is being dealt with. So nothing that the save's thread needs is half done there: files and locks
are handled on the save's thread only, waits are those of `engine.threads`, and that the training was
interrupted is noted by storing one attribute, which no signal can divide.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from everystep.checkpointer.events import Failed, Phases, Saved
from everystep.checkpointer.live_memory import LiveMemory
from everystep.checkpointer.opening import Mode, RunContext
from everystep.checkpointer.ownership import UNCHANGED, Owner
from everystep.checkpointer.pending_save import PendingSave, Stall
from everystep.checkpointer.retention import ids
from everystep.checkpointer.run_observer import Durable, Saving
from everystep.checkpointer.schedule import Cost
from everystep.checkpointer.staging import Division
from everystep.engine import WriteJob
from everystep.engine.threads import start_thread
from everystep.errors import CheckpointExists, MutatedDuringSave, SaveFailed
from everystep.plan import ShardPlan
from everystep.state import LeafSource
from everystep.state.boxed import Immutable
from everystep.store import (
    CheckpointInfo,
    SaveObserver,
    SaveRound,
    Transaction,
    plain_metrics,
)
from everystep.store.commit.share import Share
from everystep.store.locks import path_to_read

_RUNS = "runs"


class SaveTask(SaveObserver):
    """One save.

    Args:
        context: The Checkpointer's.
        step: The number of completed steps.
        mode: The Checkpointer's. From `prepare` on, the attribute is the mode at work.
        save_round: The messages between ranks about this save.
        bound: Whether every save has this state. Otherwise it was passed to this save, and its arrays change
            afterwards only if they can.
    """

    def __init__(
        self, context: RunContext, step: int, mode: Mode, save_round: SaveRound | None, *, bound: bool
    ) -> None:
        self.step = step
        self.mode = mode
        self._bound = bound
        self._context = context
        self._save_round = save_round
        self._stall = Stall()
        self._began = time.perf_counter()
        self._stage_seconds = 0.0
        self._metrics: Mapping[str, float] = {}
        self._replace = False
        self._share: Share | None = None
        self._live: tuple[str, ...] | None = None
        self._fate: dict[str, bool] = {}
        """Whether the save runs, once its thread has begun or an interrupt has been noticed before."""
        self._on_this_thread = False
        self._awaited = True
        self.interrupted = False
        """`start` has raised what a signal handler raised. The save may run nevertheless."""

    # --- on the training's thread

    def prepare(self, state: object, metrics: Mapping[str, float] | None) -> None:
        """Takes the state apart, and plans what this rank writes where that has changed."""
        context, group = self._context, self._context.group
        if self.mode == "overlap":
            context.announced.attach(state)
            if self._bound and not context.announced.announced:
                self.mode = "snapshot"
                context.announced.warn_if_none()
        context.observers.tell(Saving(self.step, self.mode))
        self._metrics = plain_metrics(metrics) if group.is_coordinator else {}  # those of rank 0 are stored
        self._replace = context.retention.begin(self.step)
        self._share = group.prepare(state, self._save_round)
        if context.ledger is not None and context.run.directory is not None:
            self._live = ids(path_to_read(context.run.directory))

    def stage(self, state: object) -> None:
        """Decides which leaves are read in place, and copies the others."""
        context = self._context
        if self._bound:
            context.observed.warn_if_stale(self._leaves())
        if self.mode == "sync":
            division = Division()  # training does not run until all is over
        elif self.mode == "overlap":
            owner_of = context.observed.corrected(context.announced.owner_of(state))
            division = context.staging.divide(self._leaves(), owner_of)
        else:
            division = context.staging.divide(self._leaves(), _owner_in_snapshot)
        copies = bool(division.copied or division.urgent)
        if self.mode == "overlap" and not self._bound and copies and not division.in_place:
            context.announced.warn_if_none()
        self._stage_seconds = time.perf_counter() - self._began
        self._memory = LiveMemory(self.step, division)
        self._must_leave = self.mode == "sync" or bool(division.urgent)
        self.pending = PendingSave(self.step, self._memory, self._stall)

    def failed(self, error: BaseException) -> None:
        """It could not be prepared or staged: reports that to the observers and the other ranks."""
        self._stall.add(time.perf_counter() - self._began)
        self._tell_failed(error)
        self._context.group.failed(self._save_round, error)

    def start(self, timeout: float) -> None:
        """Runs the save on a thread of its own. Waits at most `timeout` for urgent leaves.

        In ``mode="sync"`` it waits until the save has ended.
        """
        self._context.schedule.started(self.step, time.monotonic())
        self._stall.add(time.perf_counter() - self._began)
        try:
            with self._stall:
                if not self._start_thread():
                    self._on_this_thread = True
                    self.run()
                elif self.mode == "sync":
                    self.pending.wait_for_end(None)
                else:
                    self._memory.leave_urgent(timeout)
        except BaseException:
            # The training goes on to change what may not have been read. A store that no signal comes before.
            self._memory.interrupted = self._must_leave
            raise

    def give_up(self, error: BaseException) -> None:
        """After an interrupt of `start`: a save that reads what may change now ends soon, one that has not
        begun ends at once. Other saves go on."""
        if self._memory.interrupted:
            self._memory.cancel()
        if not self.pending.ended and self.ended:
            failure = SaveFailed(f"the save of step {self.step} was interrupted")
            failure.__cause__ = error
            self._end(None, failure, seen=True)

    def release(self, owner: Owner | None, timeout: float) -> float:
        """Returns when an owner (None: every owner) may change its leaves: they have left memory.

        The last owner waits until the checkpoint is durable. Its change completes a step, and no step is
        completed before the checkpoint of an earlier one is safe: a crash then costs one step, not two.
        After `timeout` seconds training goes on all the same. Returns the seconds that it waited.
        """
        if self.ended or self._memory.is_abandoned or not self._awaited:
            return 0.0
        began = time.monotonic()
        with self._stall:
            if self._memory.leave(owner, timeout):
                left = max(0.0, began + timeout - time.monotonic())
                # One that is late may become durable yet, but training waits for it no longer.
                self._awaited = self.pending.wait_for_end(left)
        return time.monotonic() - began

    def join(self, timeout: float | None) -> bool:
        """Waits for the end of the save; returns whether it came in time."""
        with self._stall:
            return self.ended or self.pending.wait_for_end(timeout)

    @property
    def ended(self) -> bool:
        """Whether no part of it is under way or still to come."""
        if self.pending.ended:
            return True
        return self.interrupted and (self._on_this_thread or not self._fate.setdefault(_RUNS, False))

    def _start_thread(self) -> bool:
        """Whether a thread was started. An interpreter that is ending starts no more."""
        try:
            start_thread(self.run, f"everystep-step-{self.step}")
        except RuntimeError:  # no more threads: the interpreter is ending
            return False
        return True

    def _leaves(self) -> tuple[LeafSource, ...]:
        """Those that this rank writes."""
        assert self._share is not None
        return self._share.leaves

    # --- on the save's thread

    def run(self) -> None:
        """Makes the checkpoint. The outcome goes to the `PendingSave`; nothing is raised here."""
        if not self._fate.setdefault(_RUNS, True):
            return  # interrupted before it began
        info: CheckpointInfo | None = None
        failure: BaseException | None = None
        try:
            info = self._save()
        except BaseException as error:
            failure = error
            if self._memory.is_abandoned:
                failure = self._memory.abandoned_error()
                failure.__cause__ = error
        finally:
            self._end(info, failure)

    def _save(self) -> CheckpointInfo:
        try:
            self._make_space()
            info = self._commit()
        except BaseException as error:
            self._learn_from(error)
            self._tell_failed(error)
            if isinstance(error, CheckpointExists):
                raise self._context.retention.exists(self.step) from error
            raise
        self._finish(info)
        return info

    def _make_space(self) -> None:
        space = self._context.free_space
        if space is not None:
            space.make(self.step, 0 if space.knows_size else self._array_nbytes())

    def _commit(self) -> CheckpointInfo:
        """Writes the checkpoint; returns when it is durable."""
        run = self._context.run
        transaction = run.begin(self.step, overwrite=self._replace)
        try:
            info = self._write(transaction)
        except BaseException:
            run.failed(self.step, transaction)
            raise
        run.committed(self.step, transaction, info)
        return info

    def _write(self, transaction: Transaction) -> CheckpointInfo:
        assert self._share is not None
        groups = None if self.mode == "sync" else self._memory.groups
        return self._context.group.commit(
            self._share,
            self._save_round,
            transaction,
            self.step,
            self._metrics,
            groups=groups,
            observer=self,
            ledger=self._context.ledger,
            live=self._live,
        )

    def _finish(self, info: CheckpointInfo) -> None:
        """The checkpoint is durable."""
        context = self._context
        context.observers.tell(Durable(self.step, info.path))
        began = time.perf_counter()
        context.retention.add(info)
        if context.free_space is not None:
            context.free_space.used(info.stored_nbytes)
        retention = time.perf_counter() - began
        seconds = info.phases
        phases = Phases(self._stage_seconds, seconds.write, seconds.sync, seconds.commit + retention)
        stall = self._stall.seconds
        context.observers.tell(
            Saved(
                step=self.step,
                time=time.time(),
                mode=self.mode,
                nbytes=info.nbytes,
                stored_nbytes=info.stored_nbytes,
                leaves=info.leaves,
                seconds=phases,
                stall_seconds=stall,
                in_place_nbytes=self._memory.in_place_nbytes,
                copied_nbytes=self._memory.copied_nbytes,
                metrics=dict(self._metrics),
            )
        )
        context.schedule.finished(Cost(self.step, stall, phases.total, info.nbytes))

    def _learn_from(self, error: BaseException) -> None:
        """Remembers why it failed, so that the next save does not fail for the same reason."""
        if isinstance(error, MutatedDuringSave):
            self._context.observed.add_changed(error.leaves)
        if self._context.free_space is not None:
            self._context.free_space.failed(error)

    def _tell_failed(self, error: BaseException) -> None:
        kind, stall = type(error).__name__, self._stall.seconds
        self._context.observers.tell(Failed(self.step, time.time(), self.mode, kind, str(error), stall))

    def _end(self, info: CheckpointInfo | None, failure: BaseException | None, *, seen: bool = False) -> None:
        """Forgets the state's arrays, then says how the save ended.

        `seen`: what interrupted it is raised already.
        """
        self._share = None
        self._memory.end()
        if info is not None:
            self.pending.set_result(info)
        else:
            self.pending.set_exception(
                failure or SaveFailed(f"the save of step {self.step} failed"),
                seen=seen or (self.mode == "sync" and self.interrupted),
            )

    def _array_nbytes(self) -> int:
        """The size of the whole checkpoint's arrays, those of other ranks included."""
        assert self._share is not None
        return self._share.whole_nbytes or sum(leaf.nbytes for leaf in self._share.leaves)

    # --- SaveObserver: called by the commit, on the save's thread

    def writing(self, files: Sequence[tuple[ShardPlan, WriteJob]]) -> None:
        self._memory.writing(files)

    def written(self) -> None:
        self._memory.written()

    def committing(self) -> None:
        self._context.retention.remove_superseded(self.step)

    def committed(self) -> None:
        self._context.retention.remove_outdated(self.step)


def _owner_in_snapshot(leaf: LeafSource) -> Owner | None:
    """All leaves are copied, except those that cannot change."""
    return UNCHANGED if type(leaf.source.owner) is Immutable else None
