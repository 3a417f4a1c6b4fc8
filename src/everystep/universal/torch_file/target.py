"""Files as ``torch.save`` writes them, which ``torch.load(weights_only=True)`` reads.

The weights of a model alone become a state dict, which ``load_state_dict`` takes. Anything else is a dict
with the keys of the state, and what another library wrote keeps its form. Tensors stream into the archive: no
more than a window of them is in memory.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from pickle import UnpicklingError, encode_long
from typing import Any

from everystep.engine.atomic_file import synced_file
from everystep.errors import SaveFailed, UnsupportedState
from everystep.state import unflatten
from everystep.state.node import blob_names, localized
from everystep.state.torch_arrays import load_torch, torch_dtype
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf
from everystep.universal.atomic_output import output_file, refuse_file
from everystep.universal.items import Item, Job, OutputFile, progress_of
from everystep.universal.opening import ForeignCheckpoint
from everystep.universal.readback import compare_arrays
from everystep.universal.torch_file.archive_writer import StorageBytes, pickled, storage_key, write_archive

_PLAIN = (type(None), bool, int, float, str, bytes, complex)
_INT_NBYTES = 255
"""Of larger integers, and of empty bytes, pickles say what ``weights_only`` does not know."""


def plan(job: Job) -> list[OutputFile]:
    refuse_file(job.path, overwrite=job.overwrite)
    return [OutputFile("", job.nbytes + len(_pickled(job, _tensors(job))))]


def write(job: Job) -> None:
    data = _pickled(job, _tensors(job))
    leaves = [StreamedLeaf(item.stored, item.dtype) for item in job.items]
    with output_file(job.path, overwrite=job.overwrite) as path:
        with synced_file(path) as file, LeafStream(job.checkpoint, leaves) as stream:
            storages = [
                StorageBytes(item.nbytes, functools.partial(stream.fill, number))
                for number, item in enumerate(job.items)
            ]
            write_archive(file, data, storages, progress_of(job))
        if job.verify:
            check(job, path)


def check(job: Job, path: str) -> None:
    """With torch's own reader."""
    torch = load_torch()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, ValueError, TypeError) as error:
        raise SaveFailed(f"torch cannot read what was written for {job.path}: {error}") from error
    root = {"model": loaded} if _is_state_dict(job) else loaded
    found = iter(_tensors_in(root, set()))
    arrays = {item.name: tensor for item, tensor in zip(_in_order(job), found, strict=False)}
    if len(arrays) != len(job.items) or next(found, None) is not None:
        raise SaveFailed(f"{job.path} does not hold {len(job.items)} tensors as it should")
    compare_arrays(job, arrays)


def _is_state_dict(job: Job) -> bool:
    checkpoint, tree = job.checkpoint, job.tree
    if isinstance(checkpoint, ForeignCheckpoint) and not checkpoint.source.arranged:
        return False  # what another library wrote keeps its form
    return bool(job.prefix) and isinstance(tree, dict) and list(tree) == ["model"]


def _tensors(job: Job) -> dict[str, Any]:
    """For every name a tensor without memory, which stands for the bytes to come."""
    torch = load_torch()
    found = {
        item.name: torch.empty(item.shape, dtype=torch_dtype(item.dtype), device="meta") for item in job.items
    }
    return {**found, **{name: found[of] for name, of in job.tied.items()}}


def _state(job: Job, tensors: dict[str, Any]) -> Any:
    tree = localized(job.tree, job.local)
    held = list(blob_names(tree))
    arrays = {**tensors, **(job.checkpoint.read(held) if held else {})}
    state = unflatten(tree, arrays, where=job.checkpoint.path)
    return state["model"] if _is_state_dict(job) and isinstance(state, dict) else state


def _in_order(job: Job) -> list[Item]:
    """The items in the order in which a walk over the state meets them."""
    tensors = _tensors(job)
    by_storage = {storage_key(tensors[item.name]): item for item in job.items}
    state = _state(job, tensors)
    root = {"model": state} if _is_state_dict(job) else state
    return [by_storage[storage_key(tensor)] for tensor in _tensors_in(root, set())]


def _tensors_in(value: Any, seen: set[int]) -> list[Any]:
    """Every tensor once, in order."""
    torch = load_torch()
    if isinstance(value, torch.Tensor):
        key = storage_key(value)
        if key in seen:
            return []
        seen.add(key)
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item, seen)]
    return []


def _pickled(job: Job, tensors: dict[str, Any]) -> bytes:
    state = _state(job, tensors)
    _refuse_strange(state, "", job.path)
    numbers = {storage_key(tensors[item.name]): number for number, item in enumerate(job.items)}
    return pickled(state, numbers)


def _refuse_strange(value: Any, place: str, path: str) -> None:
    """``weights_only`` loads plain values, containers and tensors, and refuses all else."""
    torch = load_torch()
    if type(value) is bytes and not value:
        raise _refused(place, "empty bytes", path)
    if type(value) is int and len(encode_long(value)) > _INT_NBYTES:
        raise _refused(place, f"an integer of more than {_INT_NBYTES} bytes", path)
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | torch.dtype | torch.Size | torch.device):
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_strange(key, place, path)
            _refuse_strange(item, f"{place}.{key}" if place else str(key), path)
    elif type(value) in (list, tuple, set):
        for number, item in enumerate(value):
            _refuse_strange(item, f"{place}.{number}", path)
    else:
        raise _refused(place, type(value).__name__, path)


def _refused(place: str, what: str, path: str) -> UnsupportedState:
    return UnsupportedState(
        f"{place or 'the state'}: torch.load(weights_only=True) refuses {what}, so {path} cannot hold it: "
        "select leaves, or convert to everystep"
    )
