"""`Checkpointer`: durable checkpoints of a training loop, and resuming from the newest one that is whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from holdfast.checkpointer.keep import Keep, Kept
from holdfast.checkpointer.retention import history
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, HoldfastError, ReadFailed, SaveFailed
from holdfast.state import flatten
from holdfast.store import Checkpoint, CheckpointInfo, Options, WritableRun, check_step, list_steps

Mode = Literal["sync"]


class Checkpointer:
    """Saves `state` into a run directory and restores it from there. One per run and training.

    `state` is any nesting of dicts, lists and tuples with tensors, arrays, values, and objects that have
    ``state_dict``/``load_state_dict``; each save takes them as they are then. `every` skips steps that are
    not its multiple. ``mode="sync"``: a save that returned is durable.

    >>> import holdfast, numpy, tempfile
    >>> state = {"w": numpy.zeros(3)}
    >>> with holdfast.Checkpointer(tempfile.mkdtemp(), state) as ckpt:
    ...     for step in range(ckpt.restore(), 5):
    ...         state["w"] += 1
    ...         _ = ckpt.save(step + 1)
    ...     ckpt.steps
    [3, 4, 5]
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        state: object,
        *,
        every: int = 1,
        keep: Keep | None = None,
        mode: Mode = "sync",
        options: Options | None = None,
    ) -> None:
        if mode != "sync":
            raise ValueError(f"mode must be 'sync', not {mode!r}")
        if every < 1:
            raise ValueError("every must be at least 1")
        self.state = state
        self.every = every
        self.keep = keep or Keep()
        self._run = WritableRun(os.path.abspath(os.fspath(run)), (options or Options()).tuning())
        self._open = True
        try:
            self._history: list[Kept] = history(self._run.path)
        except BaseException:
            self._run.close()
            raise

    @property
    def path(self) -> str:
        return self._run.path

    @property
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return list_steps(self._run.path)

    @property
    def last_durable(self) -> int | None:
        """The newest step that survives a power cut now."""
        return self._history[-1].step if self._history else None

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> CheckpointInfo | None:
        """Makes the state after `step` completed steps durable; None when `every` skips it.

        When it fails (`SaveFailed`, `StorageFull`), earlier checkpoints are untouched and training may go on.
        """
        self._check_open()
        check_step(step)
        if step % self.every:
            return None
        info = self._run.save(step, dict(metrics or {}), flatten(self.state))
        others = [item for item in self._history if item.step != step]
        self._history = sorted([*others, Kept(step, info.created, info.metrics)], key=lambda item: item.step)
        self._apply_keep(step)
        return info

    def restore(self, step: int | None = None) -> int:
        """Puts the newest intact checkpoint back into the state and returns its step; 0 for a new run.

        A damaged checkpoint is passed over with a warning. When checkpoints exist but none is whole, that is
        an error, never a silent start from nothing. With `step`, exactly that checkpoint.
        """
        self._check_open()
        candidates = self.steps if step is None else [step]
        failures: list[HoldfastError] = []
        for candidate in reversed(candidates):
            try:
                with Checkpoint(self._run.path_of(candidate)) as checkpoint:
                    if checkpoint.step != candidate:
                        reason = f"it is a checkpoint of step {checkpoint.step}, put in the place of another"
                        raise CorruptCheckpoint(reason, path=checkpoint.path)
                    checkpoint.load(self.state)
                return candidate
            except (CorruptCheckpoint, ReadFailed) as error:
                if step is not None:
                    raise
                failures.append(error)
                # It stays on disk to be looked at, but takes no place among those to keep.
                self._history = [item for item in self._history if item.step != candidate]
                warnings.warn(f"passing over step {candidate}: {error}", RuntimeWarning, stacklevel=2)
            except CheckpointNotFound:
                raise CheckpointNotFound(f"run {self.path} has no checkpoint of step {candidate}") from None
        if failures:
            raise CorruptCheckpoint(
                f"none of the {len(failures)} checkpoints is intact, the newest: {failures[0]}",
                path=self.path,
            ) from failures[0]
        return 0

    def _apply_keep(self, newest: int) -> None:
        # After going back to an older step, the one just saved is not the last by number; it stays anyway.
        stay = self.keep.chosen(self._history) | {newest}
        gone = [item.step for item in self._history if item.step not in stay]
        try:
            self._run.retire(gone)
        except SaveFailed as error:
            # The save itself is durable. What could not be taken away stays a candidate for the next time.
            warnings.warn(
                f"step {newest} is saved, but an old checkpoint could not be retired: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
            gone = [step for step in gone if not os.path.isdir(self._run.path_of(step))]
        self._history = [item for item in self._history if item.step not in gone]

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("this Checkpointer is closed")

    def close(self) -> None:
        """Gives up the run's lock. What was saved stays."""
        if self._open:
            self._open = False
            self._run.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
