"""Torch's side of leaves: which element type a tensor has, where its bytes lie, and fresh tensors to fill.

Owns the mapping between logical type names and torch dtypes, and everything that knows about tensor storage.
Modules and optimizers belong to `torch_objects`. Importing this module does not import torch; calls do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from everystep.engine.buffers import ByteSource, Consumed, Destination, Memory, Produced, Strided
from everystep.errors import UnsupportedState
from everystep.format import dtypes
from everystep.format.geometry import boxes_of_range
from everystep.state import numpy_arrays
from everystep.state.node import corrupt
from everystep.state.refusals import type_name, unfillable, unsupported

if TYPE_CHECKING:
    import torch

TORCH_NAMES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C32": "complex32",
    "C64": "complex64",
    "C128": "complex128",
    "F4_E2M1_X2": "float4_e2m1fn_x2",
}
"""Logical name -> name in torch. Older torch lacks the last few."""


def load_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedState(
            "this leaf was saved from torch, which is not installed here: pip install torch, "
            "or read it with framework='numpy'"
        ) from error
    return torch


@cache
def _dtype_of_name() -> dict[str, Any]:
    torch = load_torch()
    found = {name: getattr(torch, torch_name, None) for name, torch_name in TORCH_NAMES.items()}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


@cache
def _name_of_dtype() -> dict[Any, str]:
    return {dtype: name for name, dtype in _dtype_of_name().items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a logical name; `UnsupportedState` where this torch has none."""
    found: torch.dtype | None = _dtype_of_name().get(name)
    if found is None:
        numpy_arrays.refuse_opaque(name)
        raise UnsupportedState(
            f"this torch has no element type for {name[:60]!r}; read it with framework='numpy'"
        )
    return found


# --- where bytes lie ----------------------------------------------------------------------------------------

Described = tuple[str, tuple[int, ...], ByteSource]
"""Logical name, shape, and where the bytes come from."""


@cache
def describer() -> Callable[[Any, str], Described]:
    """The function that describes a tensor for saving. Built once: it runs for every tensor of every save."""
    torch = load_torch()
    names = _name_of_dtype()
    strided = torch.strided

    def describe(tensor: Any, place: str) -> Described:
        name = names.get(tensor.dtype)
        if name is None or tensor.layout is not strided or tensor.is_nested:
            raise unsupported(place, _why_not(tensor))
        shape = tuple(tensor.shape)
        if not tensor.is_cpu:
            return name, shape, _device_source(tensor, place)
        address = tensor.data_ptr()
        nbytes = tensor.nbytes
        if not address and nbytes:
            raise unsupported(place, "a tensor that has a shape but no memory")
        if tensor.is_neg() or (name[0] == "C" and tensor.is_conj()):
            # The sign of these is in a flag, not in memory: it is applied to one window at a time.
            return name, shape, Produced(nbytes, window_reader(tensor), tensor)
        if tensor.is_contiguous():
            return name, shape, Memory(address, nbytes, tensor)
        return name, shape, _strided(tensor, address, shape)

    return describe


def logical_name(dtype: Any, place: str) -> str:
    """The logical name of a torch dtype; `UnsupportedState` when it has none."""
    name = _name_of_dtype().get(dtype)
    if name is None:
        raise unsupported(place, f"a tensor of dtype {dtype} has no plain bytes to store")
    return name


def tensor_type(tensor: Any, place: str) -> tuple[str, tuple[int, ...]]:
    """Logical name and shape of a tensor that is to be filled; `UnsupportedState` when it cannot be."""
    torch = load_torch()
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise unfillable(place, _wrapper(tensor))
    name = _name_of_dtype().get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested:
        raise unfillable(place, _why_not(tensor))
    if tensor.is_meta:
        raise unfillable(place, "a meta tensor has no memory; materialise the model first")
    return name, tuple(tensor.shape)


def _strided(tensor: Any, address: int, shape: tuple[int, ...]) -> Strided:
    itemsize = tensor.element_size()
    return Strided(address, itemsize, shape, tuple(step * itemsize for step in tensor.stride()), tensor)


def _why_not(tensor: Any) -> str:
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif str(tensor.layout) != "torch.strided":
        kind = f"a tensor of layout {tensor.layout}"
    else:
        kind = f"a tensor of dtype {tensor.dtype}"
    return f"{kind} has no plain bytes to store. Save its dense parts instead"


def wrapper_refusal(tensor: object, place: str) -> UnsupportedState:
    """The error for a tensor subclass: its bytes are not all there is to it."""
    return unsupported(place, _wrapper(tensor))


def _wrapper(tensor: object) -> str:
    return (
        f"its type is {type_name(tensor)}, a tensor subclass that would not come back as itself. "
        "Store the plain tensors it is made of"
    )


def _device_source(tensor: Any, place: str) -> Produced:
    """Bytes of a tensor in device memory, fetched window by window into the engine's staging.

    There is no device on the machines this is developed on: `window_reader` is tested with host tensors only,
    `_cuda_reader` not at all.
    """
    if tensor.is_meta:
        raise unsupported(place, "a meta tensor has no bytes; materialise the model first")
    fill = _cuda_reader(tensor) if tensor.is_cuda else window_reader(tensor)
    return Produced(tensor.nbytes, fill, tensor)


def _cuda_reader(tensor: Any) -> Callable[[memoryview, int], None]:
    """``fill(window, offset)`` beside the training: through pinned memory, on a stream of its own.

    What the training has queued by now must have happened before the first byte is fetched, and nothing it
    queues later must be waited for: hence the event, recorded here.
    """
    torch = load_torch()
    queued = torch.cuda.current_stream(tensor.device).record_event()
    tensor = tensor.detach()

    def fill(window: memoryview, offset: int) -> None:
        stream, pinned = _cuda_lane(tensor.device)
        target = np.frombuffer(window, np.uint8)
        with torch.cuda.stream(stream):
            stream.wait_event(queued)
            for start in range(0, len(window), len(pinned)):
                lane = pinned[: min(len(pinned), len(window) - start)]
                for at, part in _stretches(tensor, offset + start, len(lane)):
                    lane[at : at + len(part)].copy_(part, non_blocking=True)
                stream.synchronize()
                target[start : start + len(lane)] = lane.numpy()

    return fill


_CUDA_LANE_NBYTES = 8 << 20
_BOX_NBYTES = 4 << 20
"""Elements that do not lie in one row, or whose sign is in a flag, are gathered so many bytes at a time."""


@cache
def _cuda_lane(device: Any) -> tuple[Any, Any]:
    """A stream of its own and pinned memory, one of each per device: one save is under way at a time."""
    torch = load_torch()
    return torch.cuda.Stream(device), torch.empty(_CUDA_LANE_NBYTES, dtype=torch.uint8, pin_memory=True)


def window_reader(tensor: Any) -> Callable[[memoryview, int], None]:
    """``fill(window, offset)`` for any tensor, however it lies. Makes no copy of all of it."""
    torch = load_torch()
    tensor = tensor.detach()

    def fill(window: memoryview, offset: int) -> None:
        view = torch.frombuffer(window, dtype=torch.uint8)
        for at, part in _stretches(tensor, offset, len(window)):
            view[at : at + len(part)].copy_(part)

    return fill


def _stretches(tensor: Any, offset: int, nbytes: int) -> Iterator[tuple[int, Any]]:
    """So many of a tensor's C-order bytes from `offset` on: parts of them, and where each belongs.

    Of a tensor that lies in one row, a view. Of any other, boxes of elements, each resolved by itself.
    """
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        yield 0, _as_bytes(tensor)[offset : offset + nbytes]
        return
    size = tensor.element_size()
    shape = tuple(tensor.shape)
    end = offset + nbytes
    for first in range(offset // size, -(-end // size), _BOX_NBYTES // size):
        stop = min(first + _BOX_NBYTES // size, -(-end // size))
        at = first * size
        for box in boxes_of_range(shape, first, stop):
            index = tuple(slice(low, low + count) for low, count in zip(box.start, box.shape, strict=True))
            data = _as_bytes(tensor[index].resolve_conj().resolve_neg().contiguous())
            low, high = max(at, offset), min(at + len(data), end)  # a window may cut through an element
            yield low - offset, data[low - at : high - at]
            at += len(data)


def window_writer(tensor: Any) -> Callable[[memoryview, int], None]:
    """``drain(window, offset)`` for any contiguous tensor."""
    torch = load_torch()
    flat = _as_bytes(tensor.detach())

    def drain(window: memoryview, offset: int) -> None:
        # Torch takes no read-only memory, not even to read from.
        data = np.frombuffer(window, np.uint8)
        view = torch.from_numpy(data.copy() if window.readonly else data)
        flat[offset : offset + len(window)].copy_(view)

    return drain


def _as_bytes(tensor: Any) -> Any:
    """A contiguous tensor as bytes. With one element its last stride may differ from 1: no plain view."""
    torch = load_torch()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def destination(tensor: Any) -> Destination | None:
    """The memory to read a tensor's bytes into; None if only torch can copy into it."""
    if tensor.is_neg() or tensor.is_conj():
        return None
    if tensor.is_contiguous():
        if tensor.is_cpu:
            return Memory(tensor.data_ptr(), tensor.nbytes, tensor)
        if tensor.is_meta:
            return None
        # untested without a device, as `_device_source`
        return Consumed(tensor.nbytes, window_writer(tensor), window_reader(tensor))
    shape = tuple(tensor.shape)
    if not tensor.is_cpu or numpy_arrays.overlaps_itself(shape, tensor.stride()):
        return None
    return _strided(tensor, tensor.data_ptr(), shape)


# --- fresh tensors ------------------------------------------------------------------------------------------


def empty(dtype: str, shape: tuple[int, ...], address_residue: int) -> tuple[Any, Memory]:
    """`arrays.empty` for torch. Large tensors live in memory that numpy allocated, at the wanted address."""
    torch = load_torch()
    kind = torch_dtype(dtype)
    itemsize = dtypes.itemsize(dtype)
    nbytes = itemsize * math.prod(shape)
    if nbytes < numpy_arrays.ALIGNED_FROM_NBYTES:
        tensor = torch.empty(shape, dtype=kind)
    else:
        base = numpy_arrays.aligned_bytes(nbytes, address_residue, itemsize)
        tensor = torch.from_numpy(base).view(kind).reshape(shape)
    return tensor, Memory(tensor.data_ptr(), nbytes, tensor)


def small_maker(dtype: str) -> Callable[[tuple[int, ...]], Any]:
    """`numpy_arrays.small_maker` for torch."""
    return partial(load_torch().empty, dtype=torch_dtype(dtype))


def from_numpy(array: numpy_arrays.Array) -> Any:
    torch = load_torch()
    name = numpy_arrays.logical_name(array.dtype)
    if name is None or name not in TORCH_NAMES:
        raise UnsupportedState(f"torch has no element type for numpy's {array.dtype}; use framework='numpy'")
    kind = torch_dtype(name)
    # Torch cannot hold negative strides or read-only memory, and knows nothing of ml_dtypes.
    if any(step < 0 for step in array.strides) or not array.flags.writeable:
        array = array.copy()
    if name in numpy_arrays.ML_DTYPES:
        array = array.view(np.uint16 if array.itemsize == 2 else np.uint8)
    return torch.from_numpy(array).view(kind)


def to_numpy(tensor: Any) -> numpy_arrays.Array:
    torch = load_torch()
    name = _name_of_dtype().get(tensor.dtype)
    if name is None:
        raise UnsupportedState(f"numpy has no element type for {tensor.dtype}; use framework='torch'")
    kind = numpy_arrays.numpy_dtype(name)
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if name in numpy_arrays.ML_DTYPES:
        host = host.view(torch.uint16 if host.element_size() == 2 else torch.uint8)
    array: numpy_arrays.Array = host.numpy().view(kind)
    return array


def as_saved(array: Any, *, is_parameter: bool, requires_grad: bool) -> Any:
    """A tensor as the parameter, or with the `requires_grad`, that it was saved with; the same one each time.

    It shares the memory of the array. What has been read for numpy stays what it is.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return array
    if (isinstance(array, torch.nn.Parameter), array.requires_grad) == (is_parameter, requires_grad):
        return array
    known = _dressed().setdefault(array, {})
    found = known.get((is_parameter, requires_grad))
    if found is None:
        try:
            if is_parameter:
                found = torch.nn.Parameter(array.detach(), requires_grad)
            else:
                found = array.detach().requires_grad_(requires_grad)
        except RuntimeError as error:  # integers have no gradients
            corrupt(f"a tensor of {array.dtype} that requires gradients: {error}")
        known[is_parameter, requires_grad] = found
    return found


@cache
def _dressed() -> Any:
    """Tensor -> those that share its memory, by what they are. Kept as long as the tensor is."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()
