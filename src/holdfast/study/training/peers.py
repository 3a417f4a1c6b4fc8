"""The other ways to checkpoint a training after every step, made as durable as Holdfast's.

They write over two names in turns, in place: the newest durable one is never touched, and the cost of a
temporary name and a rename, which Holdfast bears, is theirs to save.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.study.peers import missing_modules, sync_tree
from holdfast.study.training.arms import (
    PATIENCE_SECONDS,
    Arm,
    Nothing,
    Overlap,
    Snapshot,
    Sync,
    difference,
    snapshot,
    state_dicts,
)
from holdfast.study.training.model import Trainer, flatten
from holdfast.study.training.results import CHECKFREQ, DCP_ASYNC, NONE, TORCH


class TorchSave(Arm):
    """`torch.save` and fsync in the training loop, as most programs have it."""

    key = TORCH
    title = "torch.save"

    def missing(self) -> str | None:
        return missing_modules("torch")

    def open(self, directory: Path, trainer: Trainer) -> None:
        self._directory, self._trainer = directory, trainer

    def save(self, step: int) -> None:
        import torch

        path = self._path(step)
        torch.save(state_dicts(self._trainer), path)
        sync_tree(path)
        self.durable = step

    def differs(self, trainer: Trainer) -> str | None:
        import torch

        assert self.durable is not None
        loaded = torch.load(self._path(self.durable), weights_only=True)
        return difference(trainer.tensors, dict(flatten(loaded)))

    def _path(self, step: int) -> Path:
        return self._directory / f"{step % 2}.pt"


class CheckFreq(TorchSave):
    """CheckFreq's two phases: a snapshot beside forward and backward, then `torch.save` behind training.

    The copy is taken by the background thread into memory that is kept from save to save; the next update
    waits for it, the next save for the write.
    """

    key = CHECKFREQ
    title = "CheckFreq style"

    def open(self, directory: Path, trainer: Trainer) -> None:
        import torch

        super().open(directory, trainer)
        self._buffers = {name: torch.empty_like(tensor) for name, tensor in trainer.tensors.items()}
        self._copied = threading.Event()
        self._copied.set()
        self._writing: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkfreq")
        self._hook = trainer.optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def save(self, step: int) -> None:
        self.drain()
        self._copied.clear()
        self._writing = self._pool.submit(self._write, step, state_dicts(self._trainer))

    def drain(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result(PATIENCE_SECONDS)

    def close(self) -> None:
        if hasattr(self, "_pool"):
            self._hook.remove()
            self._pool.shutdown()
            self._buffers = {}

    def _wait_for_copy(self) -> None:
        if not self._copied.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"the snapshot was not taken within {PATIENCE_SECONDS:.0f} s")

    def _write(self, step: int, state: Mapping[Any, Any]) -> None:
        import torch

        try:
            taken = snapshot(state, self._buffers)
        finally:
            self._copied.set()
        path = self._path(step)
        torch.save(taken, path)
        sync_tree(path)
        self.durable = step


class DcpAsync(Arm):
    """`torch.distributed.checkpoint.async_save` of one process: copied in the call, written behind training.

    Its stager is kept, so that it copies into the same memory each time, where this torch has that.
    """

    key = DCP_ASYNC
    title = "dcp.async_save"

    def missing(self) -> str | None:
        return missing_modules("torch")

    def open(self, directory: Path, trainer: Trainer) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

        self._directory, self._trainer = directory, trainer
        self._stager = _kept_stager()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.drain()
        path = self._path(step)
        self._idle.clear()
        try:
            begun: Any = async_save(
                state_dicts(self._trainer),
                storage_writer=FileSystemWriter(path, sync_files=True),
                no_dist=True,
                **({} if self._stager is None else {"async_stager": self._stager}),
            )
        except BaseException:
            self._idle.set()
            raise
        # It syncs its files but not the directories that name them: that is done where the writing ends.
        getattr(begun, "upload_completion", begun).add_done_callback(
            lambda written: self._finish(step, path, written)
        )

    def drain(self) -> None:
        if not self._idle.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"async_save was not done within {PATIENCE_SECONDS:.0f} s")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        if getattr(self, "_stager", None) is not None:
            self._idle.wait(PATIENCE_SECONDS)
            self._stager.close()
            self._stager = None

    def differs(self, trainer: Trainer) -> str | None:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        assert self.durable is not None
        empty = {name: torch.empty_like(tensor) for name, tensor in trainer.tensors.items()}
        loaded = snapshot(state_dicts(trainer), empty)
        for tensor in empty.values():
            tensor.zero_()
        load(loaded, storage_reader=FileSystemReader(self._path(self.durable)), no_dist=True)
        return difference(trainer.tensors, dict(flatten(loaded)))

    def _finish(self, step: int, path: Path, written: Future[Any]) -> None:
        try:
            written.result()
            sync_tree(path)
            self.durable = step
        except BaseException as error:
            self._error = error  # raised where the training loop next asks
        finally:
            self._idle.set()

    def _path(self, step: int) -> Path:
        return self._directory / str(step % 2)


def _kept_stager() -> Any:
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        return None  # then it makes a copy of its own in each save
    return DefaultStager(StagingOptions(False, False, False, False))


def every_arm() -> tuple[Arm, ...]:
    """In the order of the table. `overlap` stands beside the training it is held against."""
    return (Nothing(), Overlap(), Snapshot(), Sync(), CheckFreq(), DcpAsync(), TorchSave())


def choose(keys: tuple[str, ...]) -> tuple[Arm, ...]:
    """The arms by these keys; all when none is named. Training without checkpoints is always among them."""
    everyone = every_arm()
    unknown = sorted(set(keys) - {arm.key for arm in everyone})
    if unknown:
        known = ", ".join(arm.key for arm in everyone)
        raise ValueError(f"unknown system {', '.join(unknown)}; in a training there are: {known}")
    return tuple(arm for arm in everyone if not keys or arm.key in keys or arm.key == NONE)
