"""Each system that saves a state, made equally durable and equally finished.

Durable: a save ends when its files, and every directory entry that leads to them, have been synced.
Finished: a load ends when every byte is in memory that the caller may use, none still to be faulted in.
What they cost is read by `measure`; the device's own limit is in `limits`.

Names are written in place, without the temporary name and rename that would make the peers atomic: a cost
that Holdfast bears and they are spared.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from holdfast.study import results
from holdfast.study.states import State

if TYPE_CHECKING:
    import torch

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Done:
    """An operation that has ended. Where the system read its own clocks, those readings count."""

    path: Path
    leaves: Mapping[str, object] | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None


class Peer(ABC):
    """A system that saves and loads. `save` and `load` are timed; everything else is not."""

    key: ClassVar[str]
    title: ClassVar[str]
    cost_is_ours: ClassVar[bool] = True
    """False when the CPU time and memory of this process are not those of the transfer."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why this system cannot be measured here (what is not installed), or None when it can."""

    def start(self, directory: Path, state: State) -> None:  # noqa: B027  (most have nothing to prepare)
        """Import and prepare, so that no round pays for it."""

    @abstractmethod
    def save(self, path: Path, state: State) -> Done:
        """Save durably at `path`, which does not exist yet; `Done.path` says where it really is."""

    @abstractmethod
    def load(self, saved: Done) -> Done:
        """Load what `save` returned into fresh memory, completely."""

    def remove(self, saved: Done) -> None:
        """Delete what `save` wrote: disks are finite."""
        remove(saved.path)

    def stop(self) -> None:  # noqa: B027
        """Let go of what `start` took."""


class Holdfast(Peer):
    """`holdfast.save` into a new directory; checksums on, as by default."""

    key = results.HOLDFAST
    title = "Holdfast"

    def missing(self) -> str | None:
        return missing_holdfast()

    def save(self, path: Path, state: State) -> Done:
        import holdfast

        holdfast.save(path, dict(state.leaves))
        return Done(path)

    def load(self, saved: Done) -> Done:
        import holdfast

        return Done(saved.path, leaves=cast("Mapping[str, object]", holdfast.load(saved.path)))


class RecycledHoldfast(Holdfast):
    """The steady state of a training: a `Checkpointer` that overwrites the files of retired checkpoints."""

    key = results.RECYCLED
    title = "Holdfast, recycling"

    def __init__(self) -> None:
        self._checkpointer: Any = None
        self._run = Path()
        self._step = 0

    def start(self, directory: Path, state: State) -> None:
        import holdfast

        self._run = directory / "run"
        self._checkpointer = holdfast.Checkpointer(
            self._run, dict(state.leaves), mode="sync", keep=holdfast.Keep(last=1)
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
            remove(self._run)

    def _save_next(self) -> Done:
        self._step += 1
        self._checkpointer.save(self._step)
        return Done(self._run / f"step-{self._step:012d}")


class TorchSave(Peer):
    """`torch.save` to a path, its fastest way, as it comes."""

    key = results.TORCH
    title = "torch.save"

    def missing(self) -> str | None:
        return missing_modules("torch")

    def save(self, path: Path, state: State) -> Done:
        import torch

        torch.save(tensors_of(state), path)
        sync_tree(path)
        return Done(path)

    def load(self, saved: Done) -> Done:
        import torch

        return Done(saved.path, leaves=torch.load(saved.path, weights_only=True))


class TorchSaveWithoutCrc(TorchSave):
    """The same with its CRC-32 switched off: faster, and blind to damage."""

    key = results.TORCH_NO_CRC
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

    key = results.SAFETENSORS
    title = "safetensors"

    def missing(self) -> str | None:
        return missing_modules("safetensors", "torch")

    def start(self, directory: Path, state: State) -> None:
        import safetensors.torch  # noqa: F401

    def save(self, path: Path, state: State) -> Done:
        from safetensors.torch import save_file

        save_file(tensors_of(state), path)
        sync_tree(path)
        return Done(path)

    def load(self, saved: Done) -> Done:
        from safetensors.torch import load_file

        leaves = load_file(saved.path)
        # One byte of every page is the gentlest way to have them all present; a copy would cost it more.
        for tensor in leaves.values():
            _touch(tensor)
        return Done(saved.path, leaves=leaves)


class DistributedCheckpoint(Peer):
    """`torch.distributed.checkpoint` in a single process, with its own `sync_files`."""

    key = results.DCP
    title = "torch DCP"

    def missing(self) -> str | None:
        absent = missing_modules("torch")
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

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it remarks that there is no process group
            save(tensors_of(state), storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
        # It syncs its files but not the directories that name them.
        sync_tree(path)
        return Done(path)

    def load(self, saved: Done) -> Done:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(saved.path)
        leaves: dict[str, Any] = {}
        for name, meta in reader.read_metadata().state_dict_metadata.items():
            if isinstance(meta, TensorStorageMetadata):
                leaves[name] = torch.empty(meta.size, dtype=meta.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load(leaves, storage_reader=reader, no_dist=True)
        return Done(saved.path, leaves=leaves)


class Pickle(Peer):
    """`pickle` protocol 5 of numpy arrays, which it writes without a copy."""

    key = results.PICKLE
    title = "pickle 5"

    def missing(self) -> str | None:
        return None

    def save(self, path: Path, state: State) -> Done:
        with path.open("wb") as file:
            pickle.dump(dict(state.arrays), file, protocol=5)
        sync_tree(path)
        return Done(path)

    def load(self, saved: Done) -> Done:
        # Only ever a file that this very process has just written.
        with saved.path.open("rb") as file:
            return Done(saved.path, leaves=pickle.load(file))


class Savez(Peer):
    """`np.savez`, uncompressed."""

    key = results.SAVEZ
    title = "np.savez"

    def missing(self) -> str | None:
        return None

    def save(self, path: Path, state: State) -> Done:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **dict(state.arrays))
        sync_tree(path)
        return Done(path)

    def load(self, saved: Done) -> Done:
        with np.load(saved.path, allow_pickle=False) as archive:
            return Done(saved.path, leaves={name: archive[name] for name in archive.files})


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    if state.tensors is None:
        raise RuntimeError("the state was built without torch; peers that need it report themselves missing")
    return dict(state.tensors)


def missing_modules(*names: str) -> str | None:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(absent)}" if absent else None


def missing_holdfast() -> str | None:
    """Why Holdfast itself cannot run: a checkout whose native engine was never built."""
    try:
        from holdfast import Checkpointer, Keep, load, save  # noqa: F401
    except ImportError as error:
        return f"the engine is not built ({error})"
    return None


def sync_tree(path: Path) -> None:
    """Make `path` durable: every file below it, every directory, and the entry that names it."""
    if path.is_dir():
        for parent, _, files in os.walk(path, topdown=False):
            for name in files:
                _fsync(Path(parent, name))
            _fsync(Path(parent))
    else:
        _fsync(path)
    _fsync(path.parent)


def files_below(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return [Path(parent, name) for parent, _, files in os.walk(path) for name in files]
    return [path] if path.exists() else []


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def difference(state: State, leaves: Mapping[str, object]) -> str | None:
    """What distinguishes loaded leaves from the state, bit for bit, or None when they are equal."""
    if leaves.keys() != state.arrays.keys():
        odd = sorted(leaves.keys() ^ state.arrays.keys())
        return f"leaves missing or made up: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}"
    for name, array in state.arrays.items():
        loaded = np.asarray(leaves[name])
        if loaded.dtype != array.dtype or loaded.shape != array.shape:
            return f"{name}: saved {array.dtype}{array.shape}, loaded {loaded.dtype}{loaded.shape}"
        ours = array.reshape(-1).view(np.uint32)
        theirs = np.ascontiguousarray(loaded).reshape(-1).view(np.uint32)
        if not np.array_equal(ours, theirs):
            return f"{name}: {np.count_nonzero(ours != theirs)} of {ours.size} elements differ"
    return None


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _touch(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.numpy().reshape(-1).view(np.uint8)[::_PAGE].max()
