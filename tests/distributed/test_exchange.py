"""Memory handed around among the ranks of a node: every rank ends up with every byte, however it holds it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

import everystep
from everystep.engine import Consumed, Memory, Strided
from everystep.errors import RankFailed
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, holding
from everystep.plan.read_sharing import SharePlan
from everystep.plan.topology import Topology
from everystep.store.ranks import channel as channel_module
from everystep.store.ranks import exchange
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.exchange import LocalArray, hand_out
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS

Kind = Literal["row", "strided", "device"]
Words = npt.NDArray[np.uint32]


def _layouts(world: int) -> list[LeafLayout]:
    """Copies on all ranks, on some, and of shards; many small ones, and some of several messages."""
    everybody = Mesh.grid(world)
    leaves = [LeafLayout(f"small{n}", "U32", (n % 7, 5), (MeshPlacement(everybody),)) for n in range(40)]
    leaves += [LeafLayout("large", "U32", (300, 40), (MeshPlacement(everybody),))]
    leaves += [LeafLayout("first", "U32", (64, 16, 16), (MeshPlacement(Mesh.of(list(range(world - 1)))),))]
    leaves += [LeafLayout("one", "U32", (100, 10), (MeshPlacement(Mesh.of([world - 1])),))]
    if world == 4:
        grid = Mesh.grid(2, 2)
        leaves += [
            LeafLayout("hybrid", "U32", (301, 33), (MeshPlacement(grid, (Split(0, 1),)),)),
            LeafLayout("columns", "U32", (30, 901), (MeshPlacement(grid, (Split(1, 0),)),)),
            # Every rank has several intervals of rows: pieces that do not follow each other in its array.
            LeafLayout("strided", "U32", (120, 48), (MeshPlacement(grid, (Split(1, 0, 3),)),)),
            LeafLayout("pair", "U32", (200, 50), (MeshPlacement(Mesh.of([0, 3])),)),
            LeafLayout("other pair", "U32", (200, 50), (MeshPlacement(Mesh.of([2, 1])),)),
        ]
    return leaves


def _truth(number: int, leaf: LeafLayout) -> Words:
    count = int(np.prod(leaf.shape))
    return (np.arange(count, dtype=np.uint32) * 7 + number * 1_000_003).reshape(leaf.shape)


class _Local:
    """An array of this rank, in one of the ways memory can be."""

    def __init__(self, shape: tuple[int, ...], kind: Kind) -> None:
        if kind == "strided":
            self.array: Words = np.zeros((*shape, 2), np.uint32)[..., 1]
            self.where: Any = Strided(self.array.ctypes.data, 4, shape, self.array.strides, self.array)
        else:
            self.array = np.zeros(shape, np.uint32)
            self.where = Memory(self.array.ctypes.data, self.array.nbytes, self.array)
        if kind == "device":
            flat = self.array.reshape(-1).view(np.uint8)

            def drain(window: memoryview, offset: int) -> None:
                flat[offset : offset + len(window)] = np.frombuffer(window, np.uint8)

            def fetch(window: memoryview, offset: int) -> None:
                np.frombuffer(window, np.uint8)[:] = flat[offset : offset + len(window)]

            self.where = Consumed(self.array.nbytes, drain, fetch)
        self.place = LocalArray(self.where, shape, 4)


def _exchange(topology: Topology, kinds: tuple[Kind, ...], block_nbytes: int) -> dict[str, int]:
    """Read this rank's stretches (from the truth), hand them out, compare; what was sent where."""
    import torch.distributed as dist

    rank = dist.get_rank()
    exchange.SMALL_NBYTES, exchange.MESSAGE_NBYTES, exchange.PACKED_NBYTES = 1024, 16 << 10, 4096
    channel_module.MAX_POSTED, channel_module.MAX_STAGED_NBYTES = 3, 40 << 10
    leaves = _layouts(dist.get_world_size())
    local: dict[int, _Local] = {}
    expected: dict[int, Words] = {}
    for number, leaf in enumerate(leaves):
        (spread,) = leaf.placements
        coordinate = spread.mesh.coordinate(rank)
        if coordinate is None:
            continue
        held = holding(leaf, spread, coordinate)
        local[number] = _Local(held.shape, kinds[(number + rank) % len(kinds)])
        expected[number] = np.zeros(held.shape, np.uint32)
        for piece in held.pieces():
            expected[number][_index(piece.local)] = _truth(number, leaf)[_index(piece.box)]
    link = Channel.open()
    peers: set[int] = set()
    for _ in range(2):  # a link is used again and again
        for number in local:
            local[number].array[...] = 0
        plan = SharePlan(leaves, topology, block_nbytes=block_nbytes)
        for item in plan.reads(rank):
            local[item.leaf].array[_index(item.piece.local)] = _truth(item.leaf, leaves[item.leaf])[
                _index(item.piece.box)
            ]
        groups = plan.groups(rank)
        peers |= {message.peer for message in exchange._messages(rank, groups, lambda n: local[n].place)}
        received = hand_out(link, rank, groups, lambda number: local[number].place, timeout=PATIENCE_SECONDS)
        for number, truth in expected.items():
            assert np.array_equal(local[number].array, truth), leaves[number].name
        read = sum(item.nbytes for item in plan.reads(rank))
        assert read + received == sum(truth.nbytes for truth in expected.values())
    assert peers <= set(topology.peers(rank))
    return {"read": read, "received": received}


def _index(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


@pytest.mark.parametrize(
    ("topology", "kinds", "block_nbytes"),
    [
        (Topology.regular(4), ("row",), 1 << 10),
        (Topology.regular(4), ("row", "strided", "device"), 1 << 10),
        (Topology.regular(4, 2), ("strided", "row", "row", "device"), 4 << 10),
        (Topology((0, 1, 0, 0), (0,) * 4), ("device", "row"), 1 << 20),
        (Topology.regular(2), ("row", "device", "strided"), 1 << 12),
    ],
)
def test_every_rank_ends_up_with_every_byte(
    topology: Topology, kinds: tuple[Kind, ...], block_nbytes: int
) -> None:
    found = values(launch(topology.world, _exchange, topology, kinds, block_nbytes))
    leaves = _layouts(topology.world)
    nodes = len(set(topology.nodes))
    total = sum(4 * int(np.prod(leaf.shape)) for leaf in leaves)
    # Once per node, at most; a leaf that only some ranks want may not be wanted on every node.
    assert sum(item["read"] for item in found) <= nodes * total
    if nodes == 1:
        assert sum(item["read"] for item in found) == total


def _stops(victim: int, how: str) -> tuple[int, ...]:
    """One rank does not take part; who the others are told it was."""
    import torch.distributed as dist

    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    link = Channel.open()
    leaves = [LeafLayout("x", "U32", (1 << 20,), (MeshPlacement(Mesh.grid(3)),))]
    array = np.zeros(1 << 20, np.uint32)
    place = LocalArray(Memory(array.ctypes.data, array.nbytes, array), array.shape, 4)
    groups = SharePlan(leaves, Topology.regular(3), block_nbytes=1024).groups(rank)
    hand_out(link, rank, groups, lambda _: place, timeout=PATIENCE_SECONDS)
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"told/{other}" for other in range(3) if other != victim])  # absent, but alive
        return ()
    # The dead are seen at once: there, only a rank that lives could need the time.
    timeout = PATIENCE_SECONDS if how == "killed" else 2.0
    with pytest.raises(RankFailed) as caught:
        hand_out(link, rank, groups, lambda _: place, timeout=timeout)
    store.set(f"told/{rank}", b"")
    return caught.value.ranks


@pytest.mark.parametrize("how", ["killed", "absent"])
def test_a_rank_that_is_gone_is_named(how: str) -> None:
    outcomes = launch(3, _stops, 1, how)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.describe()
        assert 1 in outcome.value
        # Alive ranks may wait for each other in vain, but the dead are seen at once.
        assert how == "absent" or outcome.value == (1,)


def test_host_memory_goes_by_gloo_in_every_way_torch_says_so() -> None:
    assert channel_module._by_gloo("gloo")
    assert channel_module._by_gloo("cuda:nccl,cpu:gloo")
    assert channel_module._by_gloo("cpu:gloo,cuda:gloo")
    assert not channel_module._by_gloo("nccl")
    assert not channel_module._by_gloo("cpu:mpi,cuda:nccl")
    assert not channel_module._by_gloo("cuda:gloo")


def _load_over_groups_of_their_own(folder: Path) -> tuple[int, list[int]]:
    """As where the process group moves no host memory: how many groups there are, before and after loads."""
    import torch.distributed.distributed_c10d as c10d

    channel_module._by_gloo = lambda backends: False
    state = {"weights": np.ones(1 << 20, np.float32)}
    groups = [len(c10d._world.pg_map)]
    with everystep.Checkpointer(folder / "run", state, mode="sync", timeout=60.0) as checkpointer:
        checkpointer.save(1)
        for _ in range(2):
            state["weights"][:] = 0
            checkpointer.restore()
    groups.append(len(c10d._world.pg_map))
    for _ in range(2):
        everystep.load(folder / "run", state, timeout=60.0)
    groups.append(len(c10d._world.pg_map))
    return int(state["weights"].sum()), groups


def test_groups_made_for_loads_are_given_up(tmp_path: Path) -> None:
    assert values(launch(2, _load_over_groups_of_their_own, tmp_path)) == [(1 << 20, [1, 1, 1])] * 2
