"""The systems that save and load a state, alone or as one of several ranks."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.peers.base import Done, Member, Peer, missing_everystep, remove, sync_tree, tensors_of
from everystep_study.states import State

_PAGE = 4096


class Everystep(Peer):
    """`everystep.save` into a new directory; checksums on, as by default."""

    key = "everystep"
    title = "Everystep"

    def missing(self) -> str | None:
        return missing_everystep()

    def save(self, path: Path, state: State) -> Done:
        import everystep

        everystep.save(path, dict(state.leaves), timeout=self.member.timeout)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        import everystep

        target = None if into is None else dict(into.leaves)
        loaded: Any = everystep.load(path, target, timeout=self.member.timeout)
        return Done(path, leaves=loaded)


class RecycledEverystep(Everystep):
    """The steady state of a training: a `Checkpointer` that overwrites the files of retired checkpoints."""

    key = "everystep-recycled"
    title = "Everystep, recycling"

    def __init__(self, member: Member | None = None, writers: int | None = None) -> None:
        super().__init__(member)
        self._writers = writers
        self._checkpointer: Any = None
        self._run = Path()
        self._step = 0

    def start(self, directory: Path, state: State) -> None:
        import everystep

        self._run = directory / "run"
        self._checkpointer = everystep.Checkpointer(
            self._run,
            dict(state.leaves),
            mode="sync",
            keep=everystep.Keep(last=1),
            options=everystep.Options(writers="all" if self._writers is None else self._writers),
            timeout=self.member.timeout,
            preemption=False,
        )
        # The first save has nothing to recycle; the second retires the first; from the third on it is steady.
        for _ in range(2):
            self._save_next()

    def save(self, path: Path, state: State) -> Done:
        return self._save_next()

    def remove(self, saved: Done) -> None:
        """Retention retires it when the next one is durable."""

    def stop(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
            if self.member.world == 1:
                remove(self._run)  # of several ranks, others may still be using it

    def _save_next(self) -> Done:
        self._step += 1
        self._checkpointer.save(self._step)
        return Done(self._run / f"step-{self._step:012d}")


class TorchSave(Peer):
    """`torch.save` to a path, its fastest way. Of several ranks the first saves and the others wait."""

    key = "torch"
    title = "torch.save"
    needs = ("torch",)

    def save(self, path: Path, state: State) -> Done:
        import torch

        if self.member.rank == 0:
            torch.save(tensors_of(state), path)
            sync_tree(path)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        import torch

        return Done(path, leaves=torch.load(path, weights_only=True))


class TorchSaveWithoutCrc(TorchSave):
    """The same with its CRC-32 switched off: faster, and blind to damage."""

    key = "torch-no-crc"
    title = "torch.save, no CRC"

    def missing(self) -> str | None:
        absent = super().missing()
        if absent is None:
            import torch

            if not hasattr(torch.serialization, "set_crc32_options"):
                return f"needs torch >= 2.6, this is {torch.__version__}"
        return absent

    def save(self, path: Path, state: State) -> Done:
        from torch.serialization import get_crc32_options, set_crc32_options

        before = get_crc32_options()
        set_crc32_options(False)
        try:
            return super().save(path, state)
        finally:
            set_crc32_options(before)


class Safetensors(Peer):
    """`safetensors.torch`: no checksums. Its loaded tensors are maps of the file until they are touched."""

    key = "safetensors"
    title = "safetensors"
    needs = ("safetensors", "torch")

    def start(self, directory: Path, state: State) -> None:
        import safetensors.torch  # noqa: F401

    def save(self, path: Path, state: State) -> Done:
        from safetensors.torch import save_file

        save_file(tensors_of(state), path)
        sync_tree(path)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        from safetensors.torch import load_file

        leaves = load_file(path)
        # One byte of every page is the cheapest way to have them all in memory.
        for tensor in leaves.values():
            if tensor.numel():
                tensor.numpy().reshape(-1).view(np.uint8)[::_PAGE].max()
        return Done(path, leaves=leaves)


class DistributedCheckpoint(Peer):
    """`torch.distributed.checkpoint` with its own `sync_files`."""

    key = "dcp"
    title = "torch DCP"
    needs = ("torch",)

    def missing(self) -> str | None:
        absent = super().missing()
        if absent is None:
            import torch.distributed

            if not torch.distributed.is_available():
                return "this torch was built without torch.distributed"
        return absent

    def start(self, directory: Path, state: State) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

    def save(self, path: Path, state: State) -> Done:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with _no_warnings():
            writer = FileSystemWriter(path, sync_files=True)
            save(tensors_of(state), storage_writer=writer, no_dist=self._alone)
        # It syncs its files but not the directories that name them.
        if self.member.rank == 0:
            sync_tree(path)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(path)
        leaves: dict[str, Any] = {} if into is None else tensors_of(into)
        for name, meta in reader.read_metadata().state_dict_metadata.items() if into is None else ():
            if isinstance(meta, TensorStorageMetadata):
                leaves[name] = torch.empty(meta.size, dtype=meta.properties.dtype)
        with _no_warnings():
            load(leaves, storage_reader=reader, no_dist=self._alone)
        return Done(path, leaves=leaves)

    @property
    def _alone(self) -> bool:
        import torch.distributed

        return not torch.distributed.is_initialized()


class Pickle(Peer):
    """`pickle` protocol 5 of numpy arrays, which it writes without a copy."""

    key = "pickle"
    title = "pickle 5"

    def save(self, path: Path, state: State) -> Done:
        with path.open("wb") as file:
            pickle.dump(dict(state.arrays), file, protocol=5)
        sync_tree(path)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        # Only ever a file that this very process has just written.
        with path.open("rb") as file:
            return Done(path, leaves=pickle.load(file))


class Savez(Peer):
    """`np.savez`, uncompressed."""

    key = "savez"
    title = "np.savez"

    def save(self, path: Path, state: State) -> Done:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **dict(state.arrays))
        sync_tree(path)
        return Done(path)

    def load(self, path: Path, into: State | None = None) -> Done:
        with np.load(path, allow_pickle=False) as archive:
            return Done(path, leaves={name: archive[name] for name in archive.files})


@contextmanager
def _no_warnings() -> Iterator[None]:
    """DCP warns that there is no process group, and about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
