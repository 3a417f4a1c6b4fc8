"""The layouts people train with, for one small model on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split

MODEL: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("embed.weight", "F32", (50, 12)),
    ("layer.0.up.weight", "F16", (30, 12)),
    ("layer.0.up.bias", "F16", (30,)),
    ("layer.0.down.weight", "F16", (12, 30)),
    ("layer.1.up.weight", "F16", (30, 12)),
    ("layer.1.up.bias", "F16", (30,)),
    ("layer.1.down.weight", "F16", (12, 30)),
    ("layer.2.up.weight", "F16", (30, 12)),
    ("layer.2.down.weight", "F16", (12, 30)),
    ("norm.weight", "F32", (12,)),
    ("optimizer.step", "I64", ()),
)

PlacementOf = Callable[[str, tuple[int, ...]], MeshPlacement]


def _tensor_axis(name: str, shape: tuple[int, ...]) -> int | None:
    """Column parallel up, row parallel down, as people do; the rest replicated."""
    if "up" in name or "embed" in name:
        return 0
    return 1 if "down" in name else None


def _made(placement_of: PlacementOf) -> list[LeafLayout]:
    return [LeafLayout(name, dtype, shape, (placement_of(name, shape),)) for name, dtype, shape in MODEL]


def ddp(world: int) -> list[LeafLayout]:
    return _made(lambda name, shape: MeshPlacement(Mesh.grid(world)))


def fsdp(world: int) -> list[LeafLayout]:
    return _made(lambda name, shape: MeshPlacement(Mesh.grid(world), (Split(0, 0),) if shape else ()))


def tp(world: int) -> list[LeafLayout]:
    def placement_of(name: str, shape: tuple[int, ...]) -> MeshPlacement:
        axis = _tensor_axis(name, shape)
        return MeshPlacement(Mesh.grid(world), () if axis is None else (Split(axis, 0),))

    return _made(placement_of)


def fsdp_tp(world: int) -> list[LeafLayout]:
    """Tensor parallel first, then fully sharded."""
    inner = 2 if world % 2 == 0 else 1
    mesh = Mesh.grid(world // inner, inner)

    def placement_of(name: str, shape: tuple[int, ...]) -> MeshPlacement:
        axis = _tensor_axis(name, shape)
        if not shape:
            return MeshPlacement(mesh)
        if axis is None:
            return MeshPlacement(mesh, (Split(0, 0),))
        return MeshPlacement(mesh, (Split(axis, 1), Split(0, 0)))

    return _made(placement_of)


def hsdp(world: int) -> list[LeafLayout]:
    shards = 2 if world % 2 == 0 else 1
    mesh = Mesh.grid(world // shards, shards)
    return _made(lambda name, shape: MeshPlacement(mesh, (Split(0, 1),) if shape else ()))


def pipeline(world: int) -> list[LeafLayout]:
    """As many stages as ranks, at most three, data parallel inside of each; the counter is everywhere."""
    return staged(world, min(world, 3))


def staged(world: int, stages: int) -> list[LeafLayout]:
    bounds = [world * stage // stages for stage in range(stages + 1)]
    meshes = [Mesh.grid(b - a, first=a) for a, b in itertools.pairwise(bounds)]

    def placement_of(name: str, shape: tuple[int, ...]) -> MeshPlacement:
        if name.startswith("layer."):
            return MeshPlacement(meshes[int(name.split(".")[1]) * stages // 3])
        if name == "embed.weight":
            return MeshPlacement(meshes[0])
        return MeshPlacement(meshes[-1] if shape else Mesh.grid(world))

    return _made(placement_of)


NAMED: dict[str, Callable[[int], Sequence[LeafLayout]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tp": tp,
    "fsdp x tp": fsdp_tp,
    "hsdp": hsdp,
    "pipeline": pipeline,
}
