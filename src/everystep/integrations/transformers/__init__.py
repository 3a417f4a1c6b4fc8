"""Everystep under the Trainer of transformers: `EverystepTrainer`, and `EverystepMixin` for other trainers.

Where Trainer writes optimizer, scheduler, scaler and random numbers into ``checkpoint-N``, an Everystep
checkpoint of the whole training goes instead, into ``checkpoint-N/everystep``, beside the files that others
read (weights, ``config.json``, tokenizer, ``trainer_state.json``). A directory without it is not complete,
and not resumed from. With `every`, a `Checkpointer` saves between these as well, into the run
``output_dir/everystep``.

Methods of Trainer that are replaced, most of them private: ``train``, ``_load_from_checkpoint``,
``_load_optimizer_and_scheduler``, ``_load_scaler``, ``_load_rng_state``, ``_save_checkpoint``,
``_save_optimizer_and_scheduler``, ``_save_scaler``, ``_save_rng_state``, ``_maybe_log_save_evaluate``,
``_load_best_model``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from everystep.integrations.shared.frameworks import require
from everystep.paths import local_path
from everystep.state.mismatch import offering

require("transformers", "5.23", "5.24", extra="transformers")
require("accelerate", "1.15", "1.16", extra="transformers")

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerState

from everystep.caller import stack_level
from everystep.checkpointer import Checkpointer, check_options
from everystep.checkpointer.drilling import DIRECTORY
from everystep.engine import fs
from everystep.errors import CheckpointNotFound, CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.integrations.shared.folders import by_rank_zero, newest_intact, numbered
from everystep.state.marks import per_rank, rank_zero
from everystep.state.rng import rng
from everystep.store import load, save, step_name
from everystep.store import open as open_checkpoint

FOLDER = "everystep"
"""In `output_dir`, the run of the saves between checkpoints; in each of these, our checkpoint."""

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class EverystepMixin(_Base):
    """In front of a Trainer class: ``class MyTrainer(EverystepMixin, SFTTrainer): ...``.

    Args:
        args: Those of the Trainer class.
        everystep: Arguments of an `everystep.Checkpointer` that saves between Trainer's own checkpoints, such
            as ``{"every": 1}`` for every step. None: there are only Trainer's own checkpoints.
        kwargs: Those of the Trainer class.
    """

    def __init__(self, *args: Any, everystep: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                local_path(given.output_dir)  # Trainer makes that directory
        self._options = None if everystep is None else check_options(everystep, "everystep=")
        super().__init__(*args, **kwargs)
        self._run: Checkpointer | None = None
        self._source: str | None = None
        self._state: dict[str, Any] = {}
        self._rng = rng(hold=True)
        self._saved_step = self._epoch_step = -1

    # --- resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's.

        Args:
            resume_from_checkpoint: As Trainer's; ``"auto"``: the newest, or the beginning if there is none.
            args: Those of Trainer's ``train``.
            kwargs: Those of Trainer's ``train``.
        """
        if self.is_deepspeed_enabled:
            raise NotImplementedError(
                "EverystepTrainer does not support DeepSpeed, which saves its own files"
            )
        new = resume_from_checkpoint is None or resume_from_checkpoint is False
        self._source, self._saved_step, self._epoch_step = None, -1, -1
        self._open_run(start_over=new)
        try:
            output = self._train(None if new else resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self._run is not None:
                self._run.close(error)
            raise
        if self._run is not None:
            self._run.close()
        return output

    def _open_run(self, *, start_over: bool) -> None:
        if self._options is not None:
            run = os.path.join(self.args.output_dir, FOLDER)
            self._run = Checkpointer(run, self._state, start_over=start_over, **self._options)

    def _train(self, wanted: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        path = wanted
        if wanted is True or wanted == "auto":
            path = self._newest()
            if path is None and wanted is True:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        source = None if path is None else _complete(str(path))
        if source is None:  # from the beginning, or from a checkpoint that Trainer wrote by itself
            return super().train(path, *args, **kwargs)
        self._source, state = source
        with tempfile.TemporaryDirectory() as folder:  # Trainer reads its state from a file of this name
            with open(os.path.join(folder, "trainer_state.json"), "w") as file:
                file.write(state)
            return super().train(folder, *args, **kwargs)

    def _newest(self) -> str | None:
        """The newest intact checkpoint, of Trainer's own and those between them. Rank 0 looks for it."""
        folder = self.args.output_dir
        saved = [] if _drilled() else numbered(folder, "checkpoint-")
        foreign = {path for _, path in saved if _is_trainers_own(path)}
        there = [(step, path if path in foreign else os.path.join(path, FOLDER)) for step, path in saved]
        if self._run is not None:
            there += [(step, os.path.join(self._run.path, step_name(step))) for step in self._run.steps]
        rank = self.args.process_index
        return by_rank_zero(lambda: newest_intact(there, folder, foreign), rank, broadcast_object_list)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self._source is None:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._source is None:
            if checkpoint is not None:
                self._restore_run(-1)
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._collect()
        self._saved_step = self.state.global_step
        if not self._restore_run(self._saved_step):
            load(self._source, into=self._state)
        self.current_flos = self._state["flos"].value["current"]

    def _restore_run(self, step: int) -> bool:
        """Lets the run go on after `step`, so that its next save removes later ones.

        Returns whether the run has the checkpoint to resume from, and has restored it.
        """
        if self._run is None:
            return False
        for there in reversed([there for there in self._run.steps if there <= step]):
            try:
                with offering():
                    self._run.restore(step=there)
                return os.path.join(self._run.path, step_name(there)) == self._source
            except CorruptCheckpoint as error:
                text = f"passing over step {there}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=stack_level())
        if self._run.steps:
            self._run.close()
            self._open_run(start_over=True)
        return False

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called when the batches that had been seen are skipped."""
        if self._source is None:
            super()._load_rng_state(checkpoint)
        else:
            self._rng.release()

    def _load_best_model(self) -> None:
        best = _complete(self.state.best_model_checkpoint)
        if best is None:
            super()._load_best_model()
            return
        if self._run is not None:
            self._run.wait()  # a save under way may read the weights
        load(best[0], into={"model": self.model_wrapped}, select="model.*")

    # --- saving

    def _collect(self) -> None:
        """The state of the training as it is now."""
        parts = [*self.callback_handler.callbacks, self.control]
        exported = TrainerState(
            stateful_callbacks=[part for part in parts if isinstance(part, ExportableState)]
        )
        trainer = {**dataclasses.asdict(self.state), "stateful_callbacks": exported.stateful_callbacks}
        self._state.update(
            model=self.model_wrapped,
            optimizer=getattr(self.optimizer, "optimizer", self.optimizer),
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            trainer=rank_zero({"json": json.dumps(trainer, indent=2, sort_keys=True)}),
            flos=per_rank({"current": self.current_flos}),
            rng=per_rank(self._rng),
        )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not _drilled():
            super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """`_save_rng_state` does it, as the last of them."""

    def _save_scaler(self, output_dir: str) -> None:
        """`_save_rng_state` does it."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            _sync(output_dir)
        self._collect()
        path = os.path.join(output_dir, FOLDER)
        save(path, self._state, step=self.state.global_step, overwrite=True)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step = self.state.global_step
        if self._run is None or step == self._saved_step:
            return
        if float(self.state.epoch).is_integer() and self._epoch_step != step:
            self._epoch_step = step  # this is called once more, after what belongs to the end of the epoch
            return
        self._saved_step = step
        self._collect()
        self._run.save(step)


class EverystepTrainer(EverystepMixin, Trainer):
    """``Trainer`` with durable checkpoints and exact resume. `EverystepMixin` explains `everystep`."""


def _drilled() -> bool:
    """Whether this is a drill, which has a run of its own and leaves the `output_dir` alone."""
    return DIRECTORY in os.environ


def _complete(path: str) -> tuple[str, str] | None:
    """Where our checkpoint in a directory is, and its ``trainer_state.json``; None if there is none."""
    for place in (os.path.join(path, FOLDER), path):
        try:
            with open_checkpoint(place) as found:
                return found.path, str(found.values["trainer.json"])
        except (CheckpointNotFound, IncompleteCheckpoint, UnsupportedSource, KeyError):
            continue
    return None


def _is_trainers_own(path: str) -> bool:
    """Whether Trainer wrote a checkpoint without Everystep. Its state is the last file that it writes."""
    names = os.listdir(path)
    whole = "trainer_state.json" in names and any(name.startswith("optimizer") for name in names)
    return whole and FOLDER not in names


def _sync(folder: str) -> None:
    """Makes durable what Trainer has written. There may be no such folder: FSDP can save without weights."""
    for place, _, names in os.walk(folder):
        for name in names:
            fs.sync_file(os.path.join(place, name))
        fs.sync_dir(place)
