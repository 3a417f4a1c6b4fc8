"""`EverystepCallback`: saves what ``fit`` trains, and resumes it.

Like ``BackupAndRestore``, but inside of an epoch as well, and with random numbers, metrics and seeds. The
data of the epoch are run through again up to the batch that comes next, without training: Keras has no way to
begin an epoch in its middle.

Names of Keras that this relies on, most of them private: ``Model._initial_epoch``, ``train_function`` and
``_symbolic_build``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from everystep.caller import stack_level
from everystep.checkpointer import Checkpointer, check_options
from everystep.errors import StateMismatch
from everystep.integrations.keras.batches import Batches
from everystep.integrations.keras.names import named, named_slots
from everystep.integrations.keras.variables import GlobalSeed, Variables
from everystep.integrations.shared.states import ChangedAttributes
from everystep.paths import local_path
from everystep.state.mismatch import offering
from everystep.state.rng import rng
from everystep.state.torch_objects import is_stateful


class EverystepCallback(keras.callbacks.Callback):
    """``model.fit(..., callbacks=[EverystepCallback("runs/x")])``: durable checkpoints, and exact resume.

    ``fit`` goes on from the newest intact checkpoint of the run, if it has one.

    A checkpoint has the model's variables (weights, statistics, seeds), those of the optimizer and the
    metrics, epoch and batch, ``History``, and the random numbers of Python, NumPy and torch. A batch is saved
    when the next one begins, and the last of an epoch after its validation.

    Args:
        run: The directory of the run.
        data: What ``fit`` is given, if that is a `Batches` or has ``state_dict`` and ``load_state_dict``.
        remember: The callbacks whose state should be restored, such as ``EarlyStopping`` and
            ``ReduceLROnPlateau``.
        options: Those of `everystep.Checkpointer` (`every`, `keep`, `preemption`, ...). Without `every`, it
            saves each batch.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        data: Any = None,
        remember: Iterable[keras.callbacks.Callback] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self._run = local_path(run)
        self._data = data
        self._remember = list(remember)
        self._options = {"mode": "snapshot", **check_options(options, "EverystepCallback")}
        self._checkpointer: Checkpointer | None = None
        self._rng = rng(hold=True)
        self._state: dict[str, Any] = {}
        self._parts: dict[str, Variables] = {}
        self._memories: list[ChangedAttributes] = []
        self._metrics: Mapping[str, Any] = {}
        self._step = self._epoch = self._batch = 0
        self._unseen = 0
        """Batches of the epoch that were seen before the restore, and have not been taken again."""
        self._unsaved = False
        self._epoch_rng: Mapping[str, Any] = {}
        """Random numbers when the epoch began: with them, its data come in the same order again."""

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The `Checkpointer` at work, while ``fit`` runs."""
        return self._checkpointer

    # --- resuming

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        _check(model)
        self.close()  # of a fit that ended with an error
        history = getattr(model, "history", None)
        remembered = [*self._remember, *([] if history is None else [history])]
        # `min_delta` gets its sign when the first epoch ends.
        self._memories = [ChangedAttributes(callback, derived=["min_delta"]) for callback in remembered]
        self._parts = {
            "model": Variables(lambda: named(self.model.variables)),
            "metrics": Variables(lambda: named(self.model.metrics_variables)),
        }
        if model.optimizer is not None:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            self._parts["optimizer"] = Variables(self._slots)
        self._state.clear()
        self._state.update(
            self._parts, progress={}, callbacks=self._memories, seed=GlobalSeed(), rng=self._rng
        )
        if is_stateful(self._data):
            self._state["data"] = self._data
        # Arrays instead of objects: so all are compared before the first of them is changed.
        for name in self._parts:
            ready = name in ("model", "optimizer")
            self._state[name] = self._parts[name].arrays() if ready else {}
        self._step = self._epoch = self._batch = self._unseen = 0
        self._unsaved = False
        self._checkpointer = Checkpointer(self._run, self._state, **self._options)
        try:
            if not self._options.get("start_over"):
                with offering():
                    self._step = self._checkpointer.restore()
            if self._step:
                self._apply(model)
        except BaseException:
            self.close()
            raise
        self._state.update(self._parts)

    def _slots(self) -> dict[str, Any]:
        return named_slots(self.model.optimizer.variables, self.model.trainable_variables)

    def _apply(self, model: Any) -> None:
        """Sets what was restored in Keras, except what ``fit`` still resets."""
        for name in ("model", "optimizer"):
            if name in self._parts:
                self._parts[name].load_state_dict(self._state[name])
        self._metrics = self._state["metrics"]
        progress = self._state["progress"]
        self._epoch, self._batch, self._epoch_rng = (progress[key] for key in ("epoch", "batch", "epoch_rng"))
        model._initial_epoch = self._epoch
        if progress["stopped"]:
            text = f"{self._run}: a callback has ended this training in epoch {self._epoch}: nothing to do"
            warnings.warn(text, RuntimeWarning, stacklevel=stack_level())
            model._initial_epoch = self.params["epochs"]
        elif self._epoch >= self.params["epochs"]:
            text = (
                f"{self._run}: this run has completed all {self._epoch} epochs, and fit was asked for "
                f"{self.params['epochs']}: nothing to do. Ask for more epochs, or name another run; "
                "start_over=True begins this one again"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=stack_level())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for memory in self._memories:
            memory.release()
        if isinstance(self._data, Batches):
            self._data.epoch = epoch
        if self._batch:
            rng().load_state_dict(self._epoch_rng)
            self._skip()
        else:
            self._rng.release()
            self._save()
            self._epoch_rng = self._rng.state_dict()

    def _skip(self) -> None:
        """Makes the next calls of the train function take the batches that were seen, without training."""
        model, steps = self.model, self.params["steps"]
        if steps is not None and steps <= self._batch:
            raise self._other_data(steps)
        train, backend = model.train_function, keras.backend.backend()
        if backend != "tensorflow":
            self._parts["metrics"].load_state_dict(self._metrics)
        self._unseen = self._batch

        def skip(*arguments: Any) -> Any:
            state, batches = arguments[:-1], arguments[-1]
            batch = None
            for _ in range(min(model.steps_per_execution, self._unseen)):
                if backend != "torch":  # which has them in a list already
                    batch = next(batches, None)
                    self._unseen += batch is None
                self._unseen -= 1
            if not self._unseen:
                model.train_function = train
                if backend == "tensorflow":
                    model._symbolic_build(data_batch=batch)  # makes the variables of metrics
                    self._parts["metrics"].load_state_dict(self._metrics)
            return ({}, *state) if state else {}

        model.train_function = skip

    def _other_data(self, batches: int) -> StateMismatch:
        return StateMismatch(
            f"{self._run}: the checkpoint was made after {self._batch} batches of epoch {self._epoch}, but "
            f"the data have {batches}. Give fit the same data as before"
        )

    # --- saving

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch >= self._batch:  # not skipped
            self._rng.release()
            self._save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= self._batch:
            self._step += batch + 1 - self._batch
            self._batch = batch + 1
            self._unsaved = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._unseen:
            raise self._other_data(self._batch - self._unseen)
        self._epoch, self._batch = epoch + 1, 0

    def on_train_end(self, logs: Any = None) -> None:
        self._save(stopped=bool(self.model.stop_training))
        self.close()
        self.model._initial_epoch = None

    def _save(self, *, stopped: bool = False) -> None:
        if not self._unsaved or self._checkpointer is None:
            return
        self._unsaved = False
        self._state["progress"] = {
            "epoch": self._epoch,
            "batch": self._batch,
            "stopped": stopped,
            "epoch_rng": self._epoch_rng if self._batch else {},
        }
        self._checkpointer.save(self._step)

    def close(self) -> None:
        """Waits for the save under way and releases the run. ``fit`` calls it, unless it fails."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


def _check(model: Any) -> None:
    if not model.built:
        raise ValueError(
            "EverystepCallback needs a model that is built: call it on a batch of data before fit"
        )
    backend = keras.backend.backend()
    if backend == "tensorflow" and model.distribute_strategy.num_replicas_in_sync > 1:
        raise NotImplementedError("EverystepCallback does not support tf.distribute with several replicas")
    if backend == "jax" and sys.modules["jax"].process_count() > 1:
        raise NotImplementedError(
            "EverystepCallback does not support several processes of JAX: see everystep.integrations.jax"
        )
