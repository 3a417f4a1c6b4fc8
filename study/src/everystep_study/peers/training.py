"""The ways to checkpoint a training after every step, all equally durable.

None has more than one save in flight: a save that is due waits for the one before it. What must be waited for
before the weights change is waited for in a hook on the optimizer, so that one clock around the hooks sees
all of them alike. Peers write over two names in turns, in place: the newest durable one is never touched.
"""

from __future__ import annotations

import copy
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from everystep_study.peers.base import difference, missing_everystep, missing_modules, sync_tree
from everystep_study.training_model import Trainer, flatten

if TYPE_CHECKING:
    import torch

PATIENCE_SECONDS = 300.0
"""No save of a benchmark takes this long; one that does is reported as failed."""


class TrainingPeer(ABC):
    """One way to train. It is opened before a block of steps and closed after it; its files stay."""

    key: ClassVar[str]
    title: ClassVar[str]

    def __init__(self) -> None:
        self.durable: int | None = None
        """The newest step that survives a power cut now; None while there is none."""

    def missing(self) -> str | None:
        return missing_modules("torch")

    def open(self, directory: Path, trainer: Trainer) -> None:
        self._directory, self._trainer = directory, trainer

    def resume(self, directory: Path, trainer: Trainer) -> int:
        """`open`, in a new process, with the newest checkpoint restored; the steps completed, 0 for none."""
        raise NotImplementedError(f"{self.title} is not measured in restarts")

    @abstractmethod
    def save(self, step: int) -> None:
        """What the training loop calls after each step; returns when training may go on."""

    def newest(self) -> int | None:
        return self.durable

    def drain(self) -> None:  # noqa: B027  (nothing is in flight where a save ends durable)
        """Wait until everything is durable; raises what went wrong in the background."""

    def close(self) -> None:  # noqa: B027
        """Let go of memory, threads and hooks."""

    @abstractmethod
    def differs(self, trainer: Trainer) -> str | None:
        """How the newest checkpoint differs from the state as it is now, or None. Only after `drain`."""


class NoCheckpoints(TrainingPeer):
    """Training without checkpoints: what all others are compared with."""

    key = "none"
    title = "no checkpoints"

    def save(self, step: int) -> None: ...

    def differs(self, trainer: Trainer) -> str | None:
        return None


class Overlap(TrainingPeer):
    """A `Checkpointer` as a user would make it."""

    key = mode = "overlap"
    title = "Everystep, overlap"

    def __init__(self) -> None:
        super().__init__()
        self._checkpointer: Any = None

    def missing(self) -> str | None:
        return super().missing() or missing_everystep()

    def open(self, directory: Path, trainer: Trainer) -> None:
        # Each round goes on with the trainer as it is, not as the last round saved it.
        self._make(directory, trainer, start_over=True)

    def resume(self, directory: Path, trainer: Trainer) -> int:
        self._make(directory, trainer, start_over=False)
        completed: int = self._checkpointer.restore()
        return completed

    def _make(self, directory: Path, trainer: Trainer, *, start_over: bool) -> None:
        import everystep

        self._checkpointer = everystep.Checkpointer(
            directory / "run",
            trainer.state,
            mode=self.mode,  # type: ignore[arg-type]
            keep=everystep.Keep(last=2),
            preemption=False,  # a benchmark that is told to stop stops
            start_over=start_over,
        )
        if self._checkpointer.mode != self.mode:
            raise RuntimeError(f"asked for {self.mode!r}, the Checkpointer does {self._checkpointer.mode!r}")

    def save(self, step: int) -> None:
        self._checkpointer.save(step)

    def newest(self) -> int | None:
        durable: int | None = self._checkpointer.last_durable
        return durable

    def drain(self) -> None:
        self._checkpointer.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def differs(self, trainer: Trainer) -> str | None:
        before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
        for tensor in trainer.tensors.values():
            tensor.zero_()  # a restore that does nothing must not pass
        self._checkpointer.restore()
        return difference(before, trainer.tensors)


class Snapshot(Overlap):
    key = mode = "snapshot"
    title = "Everystep, snapshot"


class Sync(Overlap):
    key = mode = "sync"
    title = "Everystep, sync"


class TorchSaveEachStep(TrainingPeer):
    """`torch.save` and fsync in the training loop, as most programs have it."""

    key = "torch"
    title = "torch.save"

    def save(self, step: int) -> None:
        self.write(step, state_dicts(self._trainer))

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        import torch

        path = self._path(step)
        torch.save({**state, "step": step}, path)
        sync_tree(path)
        self.durable = step

    def resume(self, directory: Path, trainer: Trainer) -> int:
        import torch

        self.open(directory, trainer)
        files = sorted(directory.glob("?.pt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files:
            try:
                loaded: dict[str, Any] = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError):
                continue  # the kill came in the middle of its save
            trainer.model.load_state_dict(loaded["model"])
            trainer.optimizer.load_state_dict(loaded["optimizer"])
            return int(loaded["step"])
        return 0

    def differs(self, trainer: Trainer) -> str | None:
        import torch

        assert self.durable is not None
        loaded = torch.load(self._path(self.durable), weights_only=True)
        return difference(trainer.tensors, dict(flatten(loaded)))

    def _path(self, step: int) -> Path:
        return self._directory / f"{step % 2}.pt"


class CheckFreq(TorchSaveEachStep):
    """CheckFreq's two phases: a snapshot beside forward and backward, then `torch.save` behind training.

    A background thread copies into memory that is kept from save to save; the next update waits for the copy,
    the next save for the write.
    """

    key = "checkfreq"
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
        self._writing = self._pool.submit(self._copy_and_write, step, state_dicts(self._trainer))

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

    def _copy_and_write(self, step: int, state: Mapping[str, Any]) -> None:
        try:
            taken = snapshot(state, self._buffers)
        finally:
            self._copied.set()
        self.write(step, taken)


class DcpAsync(TrainingPeer):
    """`torch.distributed.checkpoint.async_save` of one process: copied in the call, written behind training.

    Its stager is kept, so that it copies into the same memory each time, where this torch has that.
    """

    key = "dcp-async"
    title = "dcp.async_save"

    def open(self, directory: Path, trainer: Trainer) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

        super().open(directory, trainer)
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


def state_dicts(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def snapshot(
    tree: Mapping[Any, Any], buffers: Mapping[str, torch.Tensor], prefix: str = ""
) -> dict[Any, Any]:
    """The same tree with every tensor copied into the buffer of its path, and values copied as they are."""
    import torch

    taken: dict[Any, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            taken[key] = buffers[name].copy_(value)
        elif isinstance(value, Mapping):
            taken[key] = snapshot(value, buffers, f"{name}.")
        else:
            taken[key] = copy.deepcopy(value)
    return taken
