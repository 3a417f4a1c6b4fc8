"""Files as ``torch.save`` writes them, which ``torch.load(weights_only=True)`` reads.

The weights of a model alone become a state dict, which ``load_state_dict`` takes. Anything else is a dict
with the keys of the state. Tensors stream into the archive: no more than a window of them is in memory.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

from holdfast.errors import SaveFailed, UnsupportedState
from holdfast.inspect.leaf_stream import LeafStream, StreamedLeaf
from holdfast.state import unflatten
from holdfast.state.node import blob_names, localized
from holdfast.state.torch_arrays import load_torch, torch_dtype
from holdfast.universal.atomic_output import output_file, refuse_file
from holdfast.universal.items import Item, Job, OutputFile
from holdfast.universal.readback import compare_arrays

KIND = "torch"
ONLY_MODEL = False
INLINES_BYTES = True
_ALIGNMENT = 64
_BLOCK_NBYTES = 4 << 20
_LOCAL_HEADER, _ZIP64_EXTRA, _EXTRA_HEADER = 30, 20, 4
_PADDING = b"FB"  # the tag of torch's own padding
_PLAIN = (type(None), bool, int, float, str, bytes, complex)


def plan(job: Job) -> list[OutputFile]:
    refuse_file(job.path, overwrite=job.overwrite)
    return [OutputFile("", job.nbytes + len(_pickled(job, _tensors(job))))]


def write(job: Job) -> None:
    data = _pickled(job, _tensors(job))
    with output_file(job.path, overwrite=job.overwrite) as path:
        with open(path, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                archive.writestr("archive/data.pkl", data)
                archive.writestr("archive/byteorder", b"little")
                _write_storages(job, archive)
                archive.writestr("archive/version", b"3\n")
            file.flush()
            os.fsync(file.fileno())
        if job.verify:
            check(job, path)


def check(job: Job, path: str) -> None:
    """With torch's own reader."""
    torch = load_torch()
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    root = {"model": loaded} if _is_state_dict(job) else loaded
    found = iter(_tensors_in(root, set()))
    arrays = {item.name: tensor for item, tensor in zip(_in_order(job), found, strict=False)}
    if len(arrays) != len(job.items) or next(found, None) is not None:
        raise SaveFailed(f"{job.path} does not hold {len(job.items)} tensors as it should")
    compare_arrays(job, arrays)


def _write_storages(job: Job, archive: zipfile.ZipFile) -> None:
    block = memoryview(bytearray(_BLOCK_NBYTES))
    done = 0
    with LeafStream(job.checkpoint, [StreamedLeaf(item.stored, item.dtype) for item in job.items]) as stream:
        for number, item in enumerate(job.items):
            member = zipfile.ZipInfo(f"archive/data/{number}")
            large = item.nbytes >= zipfile.ZIP64_LIMIT
            member.extra = _padding(archive, member, large=large)
            with archive.open(member, "w", force_zip64=large) as out:
                for start in range(0, item.nbytes, _BLOCK_NBYTES):
                    part = block[: min(_BLOCK_NBYTES, item.nbytes - start)]
                    stream.fill(number, part, start)
                    out.write(part)
                    done += len(part)
                    job.progress(done, job.nbytes)


def _padding(archive: zipfile.ZipFile, member: zipfile.ZipInfo, *, large: bool) -> bytes:
    """So much that the bytes of the member are aligned, as those of torch are: they can be mapped."""
    assert archive.fp is not None
    at = (
        archive.fp.tell()
        + _LOCAL_HEADER
        + len(member.filename)
        + (_ZIP64_EXTRA if large else 0)
        + _EXTRA_HEADER
    )
    nbytes = -at % _ALIGNMENT
    return _PADDING + nbytes.to_bytes(2, "little") + b"Z" * nbytes


def _is_state_dict(job: Job) -> bool:
    tree = job.tree
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
    by_storage = {_key(tensors[item.name]): item for item in job.items}
    state = _state(job, tensors)
    root = {"model": state} if _is_state_dict(job) else state
    return [by_storage[_key(tensor)] for tensor in _tensors_in(root, set())]


def _tensors_in(value: Any, seen: set[int]) -> list[Any]:
    """Every tensor once, in order."""
    torch = load_torch()
    if isinstance(value, torch.Tensor):
        key = _key(value)
        if key in seen:
            return []
        seen.add(key)
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item, seen)]
    return []


def _key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _pickled(job: Job, tensors: dict[str, Any]) -> bytes:
    state = _state(job, tensors)
    _refuse_strange(state, "", job.path)
    numbers = {_key(tensors[item.name]): number for number, item in enumerate(job.items)}
    out = io.BytesIO()
    _pickler(out, numbers).dump(state)
    return out.getvalue()


def _refuse_strange(value: Any, place: str, path: str) -> None:
    """``weights_only`` loads plain values, containers and tensors, and refuses all else."""
    torch = load_torch()
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
        raise UnsupportedState(
            f"{place}: torch.load(weights_only=True) refuses {type(value).__name__}, so {path} cannot hold "
            "it: select leaves, or convert to holdfast"
        )


class _Storage:
    """Stands for the bytes of a tensor in the archive."""

    __slots__ = ("dtype", "elements", "number")

    def __init__(self, number: int, dtype: Any, elements: int) -> None:
        self.number = number
        self.dtype = dtype
        self.elements = elements


def _pickler(out: io.BytesIO, numbers: dict[int, int]) -> pickle.Pickler:
    torch = load_torch()
    typed = {
        torch.float64: torch.DoubleStorage,
        torch.float32: torch.FloatStorage,
        torch.float16: torch.HalfStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.int64: torch.LongStorage,
        torch.int32: torch.IntStorage,
        torch.int16: torch.ShortStorage,
        torch.int8: torch.CharStorage,
        torch.uint8: torch.ByteStorage,
        torch.bool: torch.BoolStorage,
        torch.complex64: torch.ComplexFloatStorage,
        torch.complex128: torch.ComplexDoubleStorage,
    }

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, _Storage):
                return None
            kind = typed.get(value.dtype, torch.storage.UntypedStorage)
            count = value.elements * (1 if value.dtype in typed else value.dtype.itemsize)
            return "storage", kind, str(value.number), "cpu", count

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.nn.Parameter):
                return torch._utils._rebuild_parameter, (value.data, value.requires_grad, OrderedDict())
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            storage = _Storage(numbers[_key(value)], value.dtype, value.numel())
            shape, stride = tuple(value.shape), tuple(value.stride())
            common: tuple[Any, ...] = storage, 0, shape, stride, value.requires_grad, OrderedDict()
            if value.dtype in typed:
                return torch._utils._rebuild_tensor_v2, common
            return torch._utils._rebuild_tensor_v3, (*common, value.dtype)

    return Pickler(out, protocol=2)
