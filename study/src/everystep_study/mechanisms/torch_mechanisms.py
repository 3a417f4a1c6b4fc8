"""The mechanisms of PyTorch: `torch.save`, `torch.distributed.checkpoint`, safetensors.

For trainings and for a `State` of tensors. Torch is imported when it is used, so that a report can name the
mechanisms where it is not installed.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from everystep_study.harness.files import sync_tree
from everystep_study.mechanisms.mechanism import PATIENCE_SECONDS, Mechanism

if TYPE_CHECKING:
    import torch


class TorchSave(Mechanism):
    """`torch.save` of state dicts to a path, as the tutorial on checkpoints has it."""

    key, title, suffix = "torch-zip", "torch.save", ".pt"
    needs = ("torch",)
    only_first_rank = True
    zipped = True

    def write(self, target: Path) -> None:
        self.write_tree(self.subject.tree(self.weights_only), target)

    def write_tree(self, tree: Any, target: Path) -> None:
        import torch

        torch.save(tree, target, _use_new_zipfile_serialization=self.zipped)

    def load(self) -> None:
        self.subject.put(self._loaded(self.path))

    def resume(self) -> int:
        """Goes on from the older file if a kill came in the middle of saving the newer one."""
        files = sorted(self.directory.glob(f"?{self.suffix}"), key=lambda file: file.stat().st_mtime_ns)
        for path in reversed(files):
            try:
                found = self._loaded(path)
            except (RuntimeError, EOFError, pickle.UnpicklingError):
                continue
            self.subject.put(found)
            self.saves = int(found["step"])
            return self.saves
        return 0

    def _loaded(self, path: Path) -> Any:
        import torch

        return torch.load(path, weights_only=True)

    def read_part(self, name: str) -> NDArray[Any]:
        import torch

        found: torch.Tensor = torch.load(self.path, mmap=True)["model"][name]
        return found.clone().numpy()


class TorchSaveLegacy(TorchSave):
    """The form before 1.6: pickles one after the other in one stream."""

    key, title = "torch-legacy", "torch.save, legacy"
    zipped = False

    def read_part(self, name: str) -> NDArray[Any]:
        raise NotImplementedError("this form can only be read whole")


class TorchSaveWithoutCrc(TorchSave):
    """The same with its CRC-32 switched off: faster, and blind to damage."""

    key, title = "torch-no-crc", "torch.save, no CRC"

    @classmethod
    def missing(cls) -> str | None:
        absent = super().missing()
        if absent is None:
            import torch

            if not hasattr(torch.serialization, "set_crc32_options"):
                return f"needs torch >= 2.6, this is {torch.__version__}"
        return absent

    def write_tree(self, tree: Any, target: Path) -> None:
        from torch.serialization import get_crc32_options, set_crc32_options

        before = get_crc32_options()
        set_crc32_options(False)
        try:
            super().write_tree(tree, target)
        finally:
            set_crc32_options(before)


class CheckFreq(TorchSave):
    """CheckFreq's two phases: a snapshot beside forward and backward, then `torch.save` behind training.

    A background thread copies into memory that is kept from save to save; the next update waits for the copy,
    the next save for the write.
    """

    key, title = "checkfreq", "CheckFreq style"
    background = True

    def open(self) -> None:
        import torch

        tree = self.subject.tree(self.weights_only)
        self._buffers = {name: torch.empty_like(tensor) for name, tensor in flatten(tree)}
        self._copied = threading.Event()
        self._copied.set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkfreq")
        self._hook = self.subject.optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def write(self, target: Path) -> None:
        self.wait()
        self._copied.clear()
        self._pending = self._pool.submit(self._copy_and_write, self.subject.tree(self.weights_only), target)

    def close(self) -> None:
        self._hook.remove()
        self._pool.shutdown()
        self._buffers = {}

    def _wait_for_copy(self) -> None:
        if not self._copied.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"the snapshot was not taken within {PATIENCE_SECONDS:.0f} s")

    def _copy_and_write(self, tree: Mapping[str, Any], target: Path) -> None:
        try:
            taken = snapshot(tree, self._buffers)
        finally:
            self._copied.set()
        self.write_tree(taken, target)
        if self.durable:
            sync_tree(target)


class Dcp(Mechanism):
    """`torch.distributed.checkpoint`, alone or of all ranks. It syncs its files, not their directory, if
    told to.
    """

    key, title = "dcp", "DCP"
    needs = ("torch",)

    @classmethod
    def missing(cls) -> str | None:
        absent = super().missing()
        if absent is None:
            import torch.distributed

            if not torch.distributed.is_available():
                return "this torch was built without torch.distributed"
        return absent

    @classmethod
    def prepare(cls) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

    def write(self, target: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _quietly():
            save(self.subject.tree(self.weights_only), storage_writer=self._writer(target), no_dist=_alone())

    def load(self) -> None:
        found = self.subject.target(self.weights_only)
        self._read(found)
        self.subject.put(found)

    def read_part(self, name: str) -> NDArray[Any]:
        import torch

        empty = torch.empty_like(self.subject.tree(weights_only=True)["model"][name])
        self._read({"model": {name: empty}})
        return empty.numpy()

    def _writer(self, target: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(target, sync_files=self.durable)

    def _read(self, into: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with _quietly():
                load(into, storage_reader=FileSystemReader(self.path), no_dist=_alone())
        except CheckpointException as error:  # no Exception: it would end the process
            raise RuntimeError(str(error)) from error


class DcpAsync(Dcp):
    """`async_save`: copied in the call, into memory that is kept where this torch has that, and written by a
    thread.
    """

    key, title = "dcp-async", "DCP, async"
    background = True

    def open(self) -> None:
        self._stager: Any = None
        try:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        except ImportError:
            return  # then it makes a copy of its own in each save
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def write(self, target: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()  # it has one save under way at most
        kept = {} if self._stager is None else {"async_stager": self._stager}
        with _quietly():
            begun: Any = async_save(
                self.subject.tree(self.weights_only),
                storage_writer=self._writer(target),
                no_dist=True,
                **kept,
            )
        done = getattr(begun, "upload_completion", begun)
        # The files are synced where they are written; the directory where the writing ends.
        self._pending = _after(done, lambda: sync_tree(target)) if self.durable else done

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()


class Safetensors(Mechanism):
    """`safetensors.torch` of all tensors under flat names: no checksums, and no place for learning rates.

    Its loaded tensors are maps of the file until they are touched.
    """

    key, title, suffix = "safetensors", "safetensors", ".safetensors"
    needs = ("safetensors", "torch")

    @classmethod
    def prepare(cls) -> None:
        import safetensors.torch  # noqa: F401

    def write(self, target: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(flatten(self.subject.tree(self.weights_only))), target)

    def load(self) -> None:
        from safetensors.torch import load_file

        self.subject.put_flat(load_file(self.path))

    def read_part(self, name: str) -> NDArray[Any]:
        from safetensors import safe_open

        with safe_open(self.path, framework="np") as file:
            return np.asarray(file.get_tensor(f"model.{name}"))


class NoCheckpoints(Mechanism):
    """Training without checkpoints: what all others are compared with."""

    key, title = "none", "no checkpoints"
    always_durable = True
    needs = ("torch",)

    def write(self, target: Path) -> None: ...

    def load(self) -> None:
        raise NotImplementedError


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, by their path; what is no tensor is left out."""
    import torch

    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")


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


def _alone() -> bool:
    import torch.distributed

    return not torch.distributed.is_initialized()


def _after(done: Any, call: Callable[[], None]) -> Future[None]:
    """A future that ends when `done` has ended and `call` has been made, on the thread that ended `done`."""
    after: Future[None] = Future()

    def finish(ended: Any) -> None:
        try:
            ended.result()
            call()
        except BaseException as error:
            after.set_exception(error)
        else:
            after.set_result(None)

    done.add_done_callback(finish)
    return after


@contextmanager
def _quietly() -> Iterator[None]:
    """DCP warns that there is no process group, and about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
