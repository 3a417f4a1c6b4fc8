"""`Checkpointer`: durable checkpoints of a training loop, and resuming from the newest one that is whole.

Owns what the user calls, and the order in which it happens. The steps of one save are `save_task`'s, finding
what to resume from is `restore`'s, when to save and when to end is `preemption_duty`'s and `schedule`'s, and
which checkpoints stay is `retention`'s.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from everystep.caller import stack_level
from everystep.checkpointer.announced_changes import AnnouncedChanges
from everystep.checkpointer.context import Mode
from everystep.checkpointer.events import EventLog, Preempted
from everystep.checkpointer.keep import Keep
from everystep.checkpointer.open_runs import register
from everystep.checkpointer.opening import Arguments, OnError, open_context
from everystep.checkpointer.ownership import Owner
from everystep.checkpointer.pending_save import PendingSave
from everystep.checkpointer.preemption_duty import PreemptionDuty, checked_exit_code
from everystep.checkpointer.restore import Beginning, restore
from everystep.checkpointer.run_observer import Closed, Completed
from everystep.checkpointer.save_task import SaveTask
from everystep.checkpointer.schedule import Schedule
from everystep.engine import forks
from everystep.errors import DeviceTimeout, EngineTimeout
from everystep.paths import local_path
from everystep.state.mismatch import offering
from everystep.store import Options, WritableRun, check_step, list_steps
from everystep.store.ranks.group import ProcessGroup
from everystep.store.read.foreign import renaming


class Checkpointer:
    """Saves `state` into a run directory and restores it from there. One per run and training.

    `state` is any nesting of dicts, lists and tuples with tensors, arrays, values, and objects that have
    ``state_dict``/``load_state_dict``; each save takes them as they are then.

    `mode`: with ``"overlap"`` a save returns at once, and is written while the next forward and backward run;
    an optimizer's next step waits for what it would change. ``"snapshot"`` returns when every byte has left
    the state's memory: what fits `Options.memory_nbytes` is copied at once, the rest goes at the disk's pace.
    It is what ``"overlap"`` does, with a notice, for a state without an optimizer. ``"sync"`` returns when
    the checkpoint is durable.

    `every`: steps, a time such as ``"30s"``, or ``"auto"``: as often as `budget`, a share of the time,
    allows, or best for failures every `mtbf` seconds. `optimizers`: those to hook, if not all in `state`.
    `on_error`: whether a save that failed in the background is raised by the next call, or warned of.
    `timeout`: seconds after which training waits no longer for a device, or for another rank. With
    `preemption`, SIGTERM and SIGUSR1 make the next call of `save` save and end the process, with
    `preemption_exit_code`: many schedulers take 0 for finished, and start again what ends with another code.

    A run belongs to one training. Where it holds checkpoints already, call `restore` before the first save,
    or that save is an error (`RunInUse`). With `start_over` a new training takes the run over, without
    `restore`: the old checkpoints go once its first one is durable, at every launch of such a script.

    Under ``torch.distributed`` every rank makes one, with the same run and its own state, and all call the
    same methods: each writes its share of one checkpoint, and when to save is the coordinator's, rank 0's,
    decision. `process_group`: some ranks instead of all; with ``"none"`` this rank has the run to itself.

    >>> import everystep, numpy, tempfile
    >>> state = {"w": numpy.zeros(3)}
    >>> with everystep.Checkpointer(tempfile.mkdtemp(), state, mode="snapshot") as ckpt:
    ...     for step in range(ckpt.restore(), 5):
    ...         state["w"] += 1
    ...         _ = ckpt.save(step + 1)
    ...     ckpt.wait()
    ...     ckpt.steps
    [3, 4, 5]
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        state: object,
        *,
        every: int | str = 1,
        keep: Keep | None = None,
        mode: Mode = "overlap",
        options: Options | None = None,
        optimizers: Sequence[Any] | None = None,
        budget: float = 0.03,
        mtbf: float | str | None = None,
        on_error: OnError = "raise",
        timeout: float = 600.0,
        preemption: bool = True,
        preemption_exit_code: int = 0,
        start_over: bool = False,
        process_group: ProcessGroup = None,
    ) -> None:
        given = Arguments(
            run, every, keep, mode, options, budget, mtbf, on_error, timeout, start_over, process_group
        )
        exit_code = checked_exit_code(preemption_exit_code)
        self.state = state
        self._mode: Mode = mode
        self._on_error = on_error
        self._timeout = timeout
        self._pid, self._forks = os.getpid(), forks()
        self._task: SaveTask | None = None
        self._stalled = 0.0
        self._overlapped = False
        self._open = True
        self._awaited = False
        self._closed = False
        self._announced = AnnouncedChanges(self._before_step, optimizers)
        self._context = open_context(given, state, self._announced)
        self._group, self._run = self._context.group, self._context.run
        self._schedule, self._observers = self._context.schedule, self._context.observers
        self._duty = PreemptionDuty(self._group, self._schedule, exit_code, listens=preemption)
        if isinstance(self._run, WritableRun):
            register(self, self._run)

    # --- what there is

    @property
    def path(self) -> str:
        return self._run.path

    @property
    def mode(self) -> Mode:
        """The mode at work: ``"overlap"`` is ``"snapshot"`` while nothing announces changes of weights."""
        if self._open and self._mode == "overlap" and not self._announced.announced:
            return "snapshot"
        return self._mode

    @property
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return list_steps(self._run.path)

    @property
    def last_durable(self) -> int | None:
        """The newest step of this training that survives a power cut now. None: it has not restored or saved.

        Checkpoints that the run held before are in `steps`.
        """
        return self._context.retention.newest

    @property
    def schedule(self) -> Schedule:
        """When saves are made; `explain` says why."""
        return self._schedule

    @property
    def events(self) -> EventLog:
        """What happened, newest last; also in ``events.jsonl`` in the run."""
        return self._context.events

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked this process to end. The next `save` does so."""
        return self._duty.received is not None

    def progress(self) -> str:
        """One line: what is under way, and what is durable."""
        durable = "nothing durable yet" if self.last_durable is None else f"step {self.last_durable} durable"
        task = self._task
        if task is None or task.ended:
            return f"idle, {durable}"
        done, total = task.pending.progress
        share = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB written" if total else "starting"
        return f"saving step {task.step}: {share}, {durable}"

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.path}: {'closed' if self._closed else self.progress()}>"

    # --- saving

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> PendingSave | None:
        """Saves the state after `step` completed steps; None when `every` skips it.

        A save that failed in the background is raised by the next call, once (`SaveFailed`, `StorageFull`,
        `MutatedDuringSave`), unless its `PendingSave` has shown the error before; that call has begun its own
        save nevertheless. Earlier checkpoints are untouched by a failure, and training may go on.
        """
        self._check_usable()
        step = check_step(step)
        if self.last_durable is None:  # nothing restored or saved so far
            self._context.retention.require_ours(step)
        now = time.monotonic()
        self._schedule.stepped(step, now, self._stalled, self._overlapped)
        self._stalled = 0.0
        try:
            return self._save(step, metrics, now)
        finally:
            self._stalled += time.monotonic() - now
            self._overlapped = self._task is not None and not self._task.ended

    def _save(self, step: int, metrics: Mapping[str, float] | None, now: float) -> PendingSave | None:
        self._observers.tell(Completed(step))
        earlier = self._task
        decision = self._duty.decide(step, now)
        if not decision.due:
            self._report(earlier)
            return None
        try:
            self._require_ended(earlier, step)
            self._context.retention.require_ours(step)
        except BaseException as error:
            self._group.failed(decision.save_round, error)
            raise
        task = SaveTask(self._context, step, self._mode, decision.save_round)
        try:
            task.prepare(self.state, metrics)
            task.stage(self.state)
        except BaseException as error:
            task.failed(error)
            raise
        try:
            self._task = task
            task.start(self._timeout)
        except BaseException as error:
            task.interrupted = True  # at once: another signal may come before the next line
            task.give_up(error)
            raise
        if decision.signal is not None:
            self._end_process(task, decision.signal)
        self._report(earlier)
        if self._mode == "sync":
            self._report(task)
        return task.pending

    def wait(self, timeout: float | None = None) -> None:
        """Returns when all that was saved is durable. Raises what failed in the background."""
        self._check_usable()
        task = self._task
        if task is not None and not task.join(timeout):
            raise EngineTimeout(f"step {task.step} was not durable within {timeout} s; its save goes on")
        self._report(task)

    @contextmanager
    def update(self) -> Iterator[None]:
        """For changes of the weights that no hooked optimizer makes: ``with ckpt.update(): ...``.

        Waits, before the block, until a save under way does not read the weights any more. Inside of the
        block they may change at any moment, so a save that is started there copies them. From the block's end
        on saves read them in place again: they must not change until the next block, or step of an optimizer.
        """
        self._check_usable()
        with self._announced.update():
            self._release(None)
            yield

    def check_replicas(self) -> None:
        """Compares, bit by bit, what several ranks hold the same of; `RanksDisagree` names what differs.

        All ranks call it, between two steps. It is done by itself when it is first planned who writes what.
        """
        self._check_usable()
        self._group.check_replicas(self.state)

    def _before_step(self, owner: Owner) -> None:
        """An optimizer is about to change what it owns."""
        if self._open:
            self._release(owner)

    def _release(self, owner: Owner | None) -> None:
        if self._task is not None:
            self._stalled += self._task.release(owner, self._timeout)

    def _require_ended(self, earlier: SaveTask | None, step: int) -> None:
        """One save at a time: the earlier one ends first, or this one is not made."""
        if earlier is None or earlier.ended:
            return
        patience = self._group.patience
        if not earlier.join(patience):
            raise DeviceTimeout(
                f"step {step} was not saved: the save of step {earlier.step} is still under way after "
                f"{patience:g} s. Earlier checkpoints are untouched; look at the device (`everystep "
                "doctor`), or save less often"
            )

    def _report(self, task: SaveTask | None) -> None:
        """Raises the error of a save that has failed, or warns of it, unless it was seen before."""
        error = task.pending.unseen_error() if task is not None else None
        if error is not None:
            self._raise_or_warn(error)

    def _raise_or_warn(self, error: BaseException) -> None:
        if self._on_error == "raise" or not isinstance(error, Exception):
            raise error
        warnings.warn(f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=stack_level())

    def _end_process(self, task: SaveTask, signal: str) -> None:
        """Ends the process once the save is durable. If it fails, the next step tries again."""
        error = task.pending.exception()
        if error is not None:
            self._raise_or_warn(error)
            return
        self._observers.tell(Preempted(task.step, time.time(), signal))
        code = self._duty.fulfilled(self._run.path, task.step, signal)
        if code is not None:
            self.close()
            raise SystemExit(code)

    # --- restoring

    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        rename: object = None,
        init_from: str | os.PathLike[str] | None = None,
        continue_steps: bool = False,
    ) -> int:
        """Puts the newest intact checkpoint back into the state and returns its step; 0 for a new run.

        In a run that holds checkpoints the first save needs it to have been called: see `RunInUse`.

        A damaged checkpoint is passed over with a warning. When checkpoints exist but none is whole, that is
        an error, never a silent start from nothing. With `step`, exactly that checkpoint; should newer ones
        exist, training goes back on them: the first save removes them.

        What the state and the checkpoint do not have alike is a `StateMismatch`, before anything is touched;
        ``strict=False``, on all ranks, restores what fits and warns about the rest; that no array fits on any
        rank is still an error. All goes into the objects that are in the state already; one that cannot take
        it and is held by no dict, list or object of the state, such as a number in a tuple, is a
        `StateMismatch`, too, in a new run as well.

        `init_from`: where a run without checkpoints begins: a checkpoint or run, of Everystep or of another
        system. It fills those entries of the state that it has something for, such as ``"model"``; each of
        them must fit, and the others stay as they are. A warning names what was filled and what was not. The
        new run counts from 0; with `continue_steps` from the step of `init_from`, if that says one. Later
        launches find checkpoints in the run, and do not look at `init_from`.

        `rename` gives parameters of the checkpoint the names that they have in the state: see
        `everystep.load`. With `init_from` it is for that checkpoint alone; without, for those of the run, so
        leave it out again once a checkpoint with the new names is durable.
        """
        self._check_usable()
        if init_from is not None:
            init_from = local_path(init_from)
        if step is not None:
            step = check_step(step)
        if self._context.retention.starts_over:
            raise ValueError(
                "restore() and start_over=True contradict each other: to resume, leave start_over out; to "
                "begin anew, do not call restore() before the first save"
            )
        if continue_steps and init_from is None:
            raise ValueError("continue_steps=True goes with init_from=: it continues the steps of that")
        new_names = renaming(rename)
        self._release(None)
        self.wait()
        with offering("rename", "strict"):
            if init_from is None:
                return restore(self._context, self.state, step, strict=strict, rename=new_names)
            begin = Beginning(init_from, new_names, continue_steps)
            return restore(self._context, self.state, step, strict=strict, begin=begin)

    # --- the end

    def _check_usable(self) -> None:
        if not self._open:
            raise ValueError("this Checkpointer is closed")
        if forks() != self._forks:
            raise RuntimeError(
                f"this Checkpointer belongs to process {self._pid}, of which this is a forked child: "
                "only that process may use it"
            )

    def close(self) -> None:
        """Finishes what is under way and releases the run's lock. Raises what failed in the background."""
        if self._closed or forks() != self._forks:
            return
        task, patience = self._task, self._group.patience
        mode = self.mode  # afterwards there are no hooks to tell it by
        # All of it, whatever is interrupted; what is left then is for another call.
        with ExitStack() as rest:
            rest.callback(self._release_run, task)
            rest.callback(self._context.events.close)
            rest.callback(self._duty.close)
            rest.callback(self._context.staging.clear)
            rest.callback(self._announced.detach)
            self._open = False
            self._mode = mode
            if not self._awaited:  # else an earlier call has waited to the end
                ended = task is None or task.join(patience)
                self._awaited = True
                if not ended:
                    assert task is not None
                    raise DeviceTimeout(
                        f"the save of step {task.step} is still under way after {patience:g} s and may "
                        "never become durable; earlier checkpoints are untouched"
                    )
                self._report(task)

    def _release_run(self, task: SaveTask | None) -> None:
        """Releases the run, unless a save that is late may still write to it: then another call does."""
        if task is None or task.ended:
            self._run.close()
            self._group.close()
            self._closed = True
            self._observers.tell(Closed())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._group.transport is not None and forks() == self._forks:
            # The save under way may wait for a dead rank: a launcher that clears up is obeyed at once.
            self._duty.close()
        try:
            self.close()
        except Exception as failure:  # the error that ends the block is the one to see
            warnings.warn(f"{type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=stack_level())
