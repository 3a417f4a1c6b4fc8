"""Arrays of which only a part is here: torch's DTensor, and ShardedTensor where there is no mesh.

Owns what is known about these two classes: the plain tensor with this rank's part, and how it lies in the
whole (`Sharding`). A part is described, saved and filled like any tensor; nothing here communicates.
Importing this module does not import torch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from everystep.errors import UnsupportedState
from everystep.format.geometry import Box
from everystep.state.leaves import Sharding
from everystep.state.refusals import type_name, unsupported
from everystep.state.torch_arrays import torch_dtype, wrapper_refusal


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank has of an array (a tensor, or None for nothing), and how it is distributed."""

    tensor: Any
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class _Layout:
    """What DTensors of one shape, mesh and placements have in common."""

    sharding: Sharding
    here: bool
    """Whether this rank is in the mesh."""
    mesh: Any
    """Held, because it is known by its identity."""
    plain: type
    """The class of tensors without more to them."""


Shardings = dict[tuple[Any, ...], _Layout]
"""By mesh, placements and shape. Thousands of tensors share a few of them."""


_Look = Callable[[Any, str, Shardings], Held]
_looks: dict[type, _Look | None] = {}
"""By class; None for those of arrays that are all here. Asked for every tensor of every save."""


def sharded_types() -> dict[type, _Look]:
    """The imported classes of distributed arrays, each with the function that finds the part here."""
    meshed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    boxed = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    found = {meshed: _held_of_dtensor, boxed: _held_of_sharded_tensor}
    return {kind: look for kind, look in found.items() if kind is not None}


def _look_of(kind: type) -> _Look | None:
    if kind not in _looks:
        _looks[kind] = sharded_types().get(kind)
    return _looks[kind]


def held(value: Any, place: str, known: Shardings) -> Held | None:
    """This rank's part of a DTensor or ShardedTensor; None for an array that is all here."""
    look = _look_of(type(value))
    return None if look is None else look(value, place, known)


def is_dtensor(value: object) -> bool:
    return _look_of(type(value)) is _held_of_dtensor


def is_sharded(value: object) -> bool:
    return _look_of(type(value)) is not None


def whole_shape(value: Any, place: str, known: Shardings) -> tuple[int, ...]:
    """The shape of an array, also of one that is distributed over ranks."""
    found = held(value, place, known)
    return tuple(value.shape) if found is None else found.sharding.shape


def element_type(value: Any) -> Any:
    """The torch dtype of a tensor that is distributed over ranks, wherever its elements are."""
    # ShardedTensor warns that it is old whenever it is asked for something.
    return value.dtype if is_dtensor(value) else value.metadata().tensor_properties.dtype


def local_tensor(value: Any) -> Any:
    """The memory that an array has here: the part of one that is distributed, else the array itself.

    None where nothing of it is here, or where its part is unknown. Quick: the distribution is not looked up.
    """
    look = _look_of(type(value))
    if look is None:
        return value
    try:
        return _plain(value._local_tensor, "") if look is _held_of_dtensor else look(value, "", {}).tensor
    except UnsupportedState:
        return None


def local_arrays(values: Iterable[Any]) -> list[Any]:
    """`local_tensor` of each, without those of which nothing is here."""
    found = []
    for value in values:
        # Most arrays are all here: no calls for each.
        local = value if _looks.get(type(value), value) is None else local_tensor(value)
        if local is not None:
            found.append(local)
    return found


def memory_identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for empty parts that are tied on ranks where they are not empty.

    An empty tensor has no address, but views of one parameter still share its storage. All ranks must agree
    on which leaves are tied.
    """
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape)


# --- DTensor ------------------------------------------------------------------------------------------------


def _held_of_dtensor(value: Any, place: str, known: Shardings) -> Held:
    spec = value._spec
    mesh, placements, shape = spec.mesh, spec.placements, spec.shape
    key = id(mesh), placements, shape
    found = known.get(key)
    if found is None:
        sharding = Sharding(
            tuple(shape),
            tuple(mesh.mesh.shape),
            tuple(mesh.mesh.flatten().tolist()),
            tuple(_placement(placement, value, place) for placement in placements),
        )
        here = mesh.get_coordinate() is not None
        found = known[key] = _Layout(sharding, here, mesh, sys.modules["torch"].Tensor)
    if not found.here:
        return Held(None, found.sharding)
    local = value._local_tensor
    return Held(local if type(local) is found.plain else _plain(local, place), found.sharding)


def _placement(placement: Any, value: Any, place: str) -> tuple[int, int] | None:
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise unsupported(
            place,
            "a DTensor with a Partial placement is a sum that has not been computed yet. Redistribute it to "
            "Replicate or Shard first",
        )
    ndim = value.ndim
    axis = getattr(placement, "dim", None)
    factor = getattr(placement, "split_factor", 1)  # that of _StridedShard
    if type(axis) is not int or type(factor) is not int or not -ndim <= axis < ndim:
        raise unsupported(
            place,
            f"a DTensor with the placement {placement} on shape {list(value.shape)}. Redistribute it to "
            "Replicate or Shard first",
        )
    return axis % ndim, factor


def _plain(tensor: Any, place: str) -> Any:
    import torch

    if type(tensor) is torch.Tensor:
        return tensor
    wait = getattr(tensor, "wait", None)
    if type(tensor).__name__ == "AsyncCollectiveTensor" and callable(wait):
        return wait()  # the result of a collective that the training has started
    raise wrapper_refusal(tensor, place)


def like(model: Any, dtype: str) -> Any:
    """A tensor of another element type that is distributed as `model` is, in fresh memory."""
    return _dtensor_like(model, dtype) if is_dtensor(model) else _sharded_tensor_like(model, dtype)


def _dtensor_like(model: Any, dtype: str) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(model._local_tensor, dtype=torch_dtype(dtype), requires_grad=False)
    return DTensor.from_local(
        local,
        model.device_mesh,
        model.placements,
        run_check=False,  # it would communicate
        shape=model.shape,
        stride=model.stride(),
    )


# --- ShardedTensor ------------------------------------------------------------------------------------------


def _held_of_sharded_tensor(value: Any, place: str, known: Shardings) -> Held:
    shape = tuple(value.metadata().size)
    shards = value.local_shards()
    if len(shards) > 1:
        raise unsupported(
            place, f"a {type_name(value)} with {len(shards)} shards on this rank: one at most can be stored"
        )
    if not shards:
        return Held(None, Sharding(shape))
    (shard,) = shards
    box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
    return Held(_plain(shard.tensor.detach(), place), Sharding(shape, box=box))


def _sharded_tensor_like(model: Any, dtype: str) -> Any:
    import torch
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    kind = torch_dtype(dtype)
    metadata = copy.deepcopy(model.metadata())
    metadata.tensor_properties.dtype = kind
    shards = [
        Shard(torch.empty_like(shard.tensor, dtype=kind, requires_grad=False), shard.metadata)
        for shard in model.local_shards()
    ]
    # The only way that does not ask the other ranks; FSDP1 takes it, too.
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=model._process_group
    )
