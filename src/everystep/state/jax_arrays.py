"""JAX's side of leaves: one ``jax.Array`` as boxes in host memory, and back, without gathering.

`boxed` gives what this process writes: each shard that it has and no other process, and its share of those
that several have, so that all elements are written once. On the CPU these are views of the array's own
buffers. `empty` gives memory for what the devices of this process need, and `placed` makes an array of it.

`stored_alone` and `empty_alone` are for states that hold an array which needs no other process and no notes
beside it. All others are for `integrations.jax`, which owns both. Importing this module does not import JAX;
calls do.

A private name of JAX that this relies on: ``jax._src.lax.lax._convert_element_type``, for weak types.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np

from everystep.errors import UnsupportedState
from everystep.format.geometry import Box, whole
from everystep.state import numpy_arrays
from everystep.state.boxed import BoxedArray
from everystep.state.numpy_arrays import logical_name
from everystep.state.refusals import unfillable, unsupported

_WORTH_SHARING: Final = 1 << 14
"""Elements of a shard that several processes have; the first of them writes a smaller one alone."""


def is_array(value: object) -> bool:
    """Whether this is an array of JAX, or stands for one in a function that JAX traces."""
    kind = getattr(sys.modules.get("jax"), "Array", None)  # None also while another thread imports JAX
    return kind is not None and isinstance(value, kind)


def require_values(array: Any, place: str) -> None:
    """`UnsupportedState` for an array of JAX that has no values to store."""
    if _is_tracer(array):
        raise unsupported(place, _TRACED)
    if array.is_deleted():
        raise unsupported(place, "this array is deleted, as donated to a step. Save what that step returned")


def stored_alone(array: Any, place: str) -> BoxedArray:
    """The array, if its elements are all here and numpy can hold them; `UnsupportedState` for any other."""
    require_values(array, place)
    if reason := _needs_more(array):
        raise unsupported(place, reason)
    return boxed(array)


def empty_alone(like: Any, place: str) -> BoxedArray:
    """Memory for such an array; `UnsupportedState` for any other."""
    if reason := _TRACED if _is_tracer(like) else _needs_more(like):
        raise unfillable(place, reason)
    return empty(like)


_TRACED: Final = "a tracer has no values. Save and load outside of functions that JAX transforms"


def _is_tracer(array: Any) -> bool:
    import jax

    return isinstance(array, jax.core.Tracer)


def _needs_more(array: Any) -> str | None:
    """Why an array is for `everystep.integrations.jax` only, if it is."""
    if is_key(array):
        return (
            "typed random keys. Use everystep.integrations.jax.pytree, or jax.random.key_data(keys) instead"
        )
    if not array.is_fully_addressable:
        return "other processes have parts of this jax.Array. Use everystep.integrations.jax in all of them"
    if foreign_dtype(array) is not None:
        return f"a jax.Array of dtype {array.dtype}. Use everystep.integrations.jax.pytree, or a wider type"
    return None


def is_key(array: Any) -> bool:
    """Whether these are typed random keys (``jax.random.key``)."""
    import jax

    return bool(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key))


def foreign_dtype(array: Any) -> str | None:
    """The name of an element type that is stored as bytes, because a checkpoint has no name for it (int4)."""
    dtype = np.dtype(array.dtype)
    return None if logical_name(dtype) is not None or dtype.itemsize != 1 else dtype.name


def boxed(array: Any) -> BoxedArray:
    """What this process stores of an array. Waits until it is computed."""
    import jax

    if jax.process_count() > 1 and array.is_fully_addressable:
        # Each process has such an array for itself, and all must have the same: it is stored once.
        parts = [(whole(array.shape), np.asarray(array))]
    else:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        shares = _shares(array.sharding, array.shape)
        parts = [(box, np.asarray(data[device])[rows]) for device, box, rows in shares]
    dtype = np.dtype(array.dtype)
    if foreign_dtype(array) is not None:
        dtype = np.dtype(np.uint8)
        parts = [(box, part.view(np.uint8)) for box, part in parts]
    return BoxedArray(array.shape, dtype, tuple(parts))


def empty(like: Any) -> BoxedArray:
    """Memory for what the devices of this process hold of an array like this one, each box once."""
    dtype = np.dtype(np.uint8 if foreign_dtype(like) is not None else like.dtype)
    name = logical_name(dtype)
    assert name is not None, "all types of JAX's arrays but those of one byte have a name"
    boxes = dict.fromkeys(_box(index, like.shape) for index in _indices(like).values())
    return BoxedArray(
        like.shape, dtype, tuple((box, numpy_arrays.empty(name, box.shape, 0)[0]) for box in boxes)
    )


def placed(like: Any, filled: BoxedArray, *, weak: bool) -> Any:
    """The filled boxes as an array on the devices of `like`."""
    import jax

    parts = {box: part.view(np.dtype(like.dtype)) for box, part in filled.boxes}
    if like.sharding is None or not getattr(like, "committed", True):
        (part,) = parts.values()
        return typed(jax.device_put(part), weak=weak)
    pieces = [
        jax.device_put(parts[_box(index, like.shape)], device) for device, index in _indices(like).items()
    ]
    array = jax.make_array_from_single_device_arrays(
        like.shape, like.sharding, pieces, dtype=np.dtype(like.dtype)
    )
    return typed(array, weak=weak)


def typed(array: Any, *, weak: bool) -> Any:
    """The array, with a weak type if it shall have one."""
    if not weak:
        return array
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(array, weak_type=True)


def key_data_like(keys: Any) -> Any:
    """What ``jax.random.key_data`` gives for such keys: an array, or its description."""
    import jax
    from jax.sharding import NamedSharding, SingleDeviceSharding

    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    data = jax.eval_shape(jax.random.key_data, keys)
    if keys.sharding is not None and not isinstance(keys.sharding, (NamedSharding, SingleDeviceSharding)):
        raise UnsupportedState(f"random keys with a {type(keys.sharding).__name__}: use a NamedSharding")
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)


def key_name(keys: Any) -> str:
    """The name of the generator that keys are for, such as ``threefry2x32``."""
    import jax

    if not isinstance(keys, jax.Array):
        zeros = np.zeros(jax.eval_shape(jax.random.key_data, keys).shape, np.uint32)
        keys = jax.random.wrap_key_data(zeros, dtype=keys.dtype)
    return str(jax.random.key_impl(keys))


@lru_cache(maxsize=4096)
def _shares(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, Box, Any], ...]:
    """What this process writes: on which device it is, which box of the array, and which rows of the shard.

    All processes divide the shards that they have in common in the same way, without asking each other.
    """
    import jax

    holders: dict[Box, dict[int, Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), {}).setdefault(device.process_index, device)
    me = jax.process_index()
    found: list[tuple[Any, Box, Any]] = []
    for box, devices in holders.items():
        processes = sorted(devices)
        if me not in devices:
            continue
        rows = box.shape[0] if box.shape else 0
        if len(processes) == 1 or rows < len(processes) or box.volume < _WORTH_SHARING:
            if processes[0] == me:
                found.append((devices[me], box, ...))
            continue
        begin, end = (rows * at // len(processes) for at in (processes.index(me), processes.index(me) + 1))
        part = Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.shape[1:]))
        found.append((devices[me], part, slice(begin, end)))
    return tuple(found)


def _indices(like: Any) -> dict[Any, tuple[slice, ...]]:
    """What each device of this process holds; of an array without a sharding, one device all of it."""
    if like.sharding is None:
        return {None: (slice(None),) * len(like.shape)}
    found: dict[Any, tuple[slice, ...]] = like.sharding.addressable_devices_indices_map(like.shape)
    return found


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [span.indices(size) for span, size in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in spans), tuple(stop - start for start, stop, _ in spans))
