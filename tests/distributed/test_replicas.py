"""Copies that are not equal are found and named, whichever way ranks hold them; equal ones pass."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.engine import Memory, Produced, Strided
from everystep.errors import RankFailed, RanksDisagree
from everystep.plan.fragments import seen
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, holding
from everystep.plan.world import merge_views
from everystep.state import LeafSource, flatten
from everystep.state.marks import per_rank
from everystep.store.ranks.checks import replicas
from everystep.store.ranks.checks.replicas import array_digest, check_replicas
from everystep.store.ranks.checks.values import differing, structure_digest, values_digest
from everystep.store.ranks.checks.views import exchange_views
from everystep.store.ranks.meeting import Meeting
from support.worlds.launcher import launch, values
from support.worlds.meetings import meet
from support.worlds.patience import PATIENCE_SECONDS, expecting


def _source(array: np.ndarray[Any, Any], kind: str) -> Any:
    """The same bytes as memory in one row, with strides, or on a device."""
    if kind == "row":
        return Memory(array.ctypes.data, array.nbytes, array)
    if kind == "strided":
        apart = np.empty((*array.shape, 2), array.dtype)[..., 0]
        apart[...] = array
        return Strided(apart.ctypes.data, array.itemsize, array.shape, apart.strides, apart)
    flat = array.reshape(-1).view(np.uint8)

    def fill(window: memoryview, offset: int) -> None:
        np.frombuffer(window, np.uint8)[:] = flat[offset : offset + len(window)]

    return Produced(array.nbytes, fill, array)


_KINDS = ("row", "strided", "device")


def _leaf(name: str, array: np.ndarray[Any, Any], kind: str) -> LeafSource:
    return LeafSource(name, "F32", array.shape, "numpy", _source(array, kind))


def test_a_digest_depends_on_the_bytes_only_and_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WINDOW_NBYTES", 64)
    buffer = np.empty(64, np.uint8)
    rng = np.random.default_rng(5)
    for shape in [(), (0,), (3,), (16,), (5, 7), (4, 3, 11), (1, 16)]:
        array = rng.random(shape).astype(np.float32)
        digests = {array_digest(_leaf("x", array, kind), buffer) for kind in _KINDS}
        assert len(digests) == 1, shape
        for index in np.ndindex(shape) if array.size else ():
            changed = array.copy()
            changed[index] = np.nextafter(changed[index], np.float32(2))
            assert {array_digest(_leaf("x", changed, kind), buffer) for kind in _KINDS}.isdisjoint(digests)


# --- ranks --------------------------------------------------------------------------------------------------

_GRID = Mesh.grid(2, 2)
_LAYOUTS = [
    LeafLayout("everywhere", "F32", (40, 3), (MeshPlacement(Mesh.grid(4)),)),
    LeafLayout("hybrid", "F32", (9, 5), (MeshPlacement(_GRID, (Split(0, 1),)),)),
    LeafLayout("sharded", "F32", (16,), (MeshPlacement(Mesh.grid(4), (Split(0, 0),)),)),
    LeafLayout("pair", "F32", (7, 7), (MeshPlacement(Mesh.of([1, 3])),)),
    LeafLayout("bias", "F32", (3,), (MeshPlacement(Mesh.grid(4)),)),
    LeafLayout("alone", "F32", (5,), (MeshPlacement(Mesh.of([2])),)),
]


def _arrays(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """What a rank holds: equal copies, parts of its own, a NaN with a payload among them."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for number, layout in enumerate(_LAYOUTS):
        (spread,) = layout.placements
        coordinate = spread.mesh.coordinate(rank)
        if coordinate is not None:
            whole = np.arange(np.prod(layout.shape), dtype=np.float32).reshape(layout.shape) + number
            whole.reshape(-1).view(np.uint32)[0] = 0x7FC00123
            held = holding(layout, spread, coordinate)
            array = np.empty(held.shape, np.float32)
            for piece in held.pieces():
                array[_index(piece.local)] = whole[_index(piece.box)]
            found[layout.name] = array
    return found


def _index(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def _flip(array: np.ndarray[Any, Any], place: int = -1) -> None:
    array.reshape(-1).view(np.uint32)[place] ^= 1


def _checked(
    meeting: Meeting, changes: dict[int, dict[str, int]]
) -> tuple[str, str | None, tuple[int, ...]] | None:
    """Check with these bits flipped on these ranks; what was said."""
    arrays = _arrays(meeting.rank)
    for name, place in changes.get(meeting.rank, {}).items():
        _flip(arrays[name], place)
    leaves = [
        _leaf(name, array, _KINDS[(number + meeting.rank) % 3])
        for number, (name, array) in enumerate(arrays.items())
    ]
    try:
        check_replicas(meeting, leaves, _LAYOUTS)
    except RanksDisagree as error:
        return str(error), error.leaf, error.ranks
    return None


def _all_checks() -> list[tuple[str, str | None, tuple[int, ...]] | None]:
    meeting = meet("replicas")
    return [
        _checked(meeting, {}),
        _checked(meeting, {2: {"everywhere": 77}}),
        _checked(meeting, {0: {"bias": 0}}),
        _checked(meeting, {1: {"hybrid": -1}, 3: {"pair": 0}}),
        _checked(meeting, {2: {"sharded": 0, "alone": 0}}),  # no other rank has a copy of these
        _checked(meeting, {2: {"bias": 1}, 3: {"bias": 1}}),
        _checked(meeting, {0: {"bias": 0}, 1: {"bias": 1}, 2: {"bias": 2}}),
    ]


def test_copies_that_differ_are_named_on_all_ranks_alike() -> None:
    equal, one, first, two, own, halves, many = zip(*values(launch(4, _all_checks)), strict=True)
    assert set(equal) == {None}
    assert set(own) == {None}

    assert len(set(one)) == 1
    text, leaf, ranks = one[0]
    assert (leaf, ranks) == ("everywhere", (2,))
    assert "everywhere: the copy of rank 2 differs from that of ranks 0, 1, 3" in text
    assert "everystep.per_rank" in text
    assert "broadcast" in text

    text, leaf, ranks = first[0]  # what most have is right, even if rank 0 does not
    assert (leaf, ranks) == ("bias", (0,))
    assert "the copy of rank 0 differs from that of ranks 1, 2, 3" in text

    assert len(set(two)) == 1
    text, _, ranks = two[0]
    assert ranks == (3,)
    assert "hybrid: the copy of rank 3 differs from that of rank 1" in text
    assert "pair: the copy of rank 3 differs from that of rank 1" in text

    text, _, ranks = halves[0]
    assert ranks == (2, 3)
    assert "the copy of ranks 2, 3 differs from that of ranks 0, 1" in text

    assert len(set(many)) == 1
    assert many[0][2] == (1, 2, 3)
    assert "the copy of rank 1 differs from that of rank 0 and from rank 2 and from rank 3" in many[0][0]


def _hybrid() -> list[str | None]:
    """Sharded and replicated by torch; then one bit of one rank's shard, and one of a buffer."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meeting = meet("replicas")
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    whole = torch.arange(70, dtype=torch.float32).reshape(7, 10)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    state = {"w": sharded, "b": torch.full((5,), float("nan")), "own": per_rank(torch.tensor(meeting.rank))}
    found: list[str | None] = []
    for damage in (None, sharded.to_local(), state["b"]):
        if damage is not None and meeting.rank == 3:
            damage.view(torch.int32)[0] ^= 1
        leaves = flatten(state, meeting.rank).leaves
        view = tuple(
            seen(leaf.name, leaf.dtype, leaf.shape, leaf.framework, leaf.sharding) for leaf in leaves
        )
        layouts = merge_views(exchange_views(meeting, view))
        try:
            check_replicas(meeting, leaves, layouts)
            found.append(None)
        except RanksDisagree as error:
            found.append(str(error))
    return found


def test_replicas_of_shards_are_compared_with_each_other() -> None:
    for equal, one, both in values(launch(4, _hybrid)):
        assert equal is None
        assert "w: the copy of rank 3 differs from that of rank 1" in one
        assert "b:" not in one
        assert "b: the copy of rank 3 differs from that of ranks 0, 1, 2" in both


def _absent() -> tuple[int, ...]:
    meeting = meet("replicas")
    if meeting.rank == 1:
        meeting.messages.read("told", PATIENCE_SECONDS)
        return (1,)
    if meeting.rank == 0:
        meeting.timeout = 0.3  # the coordinator tells the other
    with pytest.raises(RankFailed) as caught, expecting(2):
        check_replicas(meeting, [_leaf("bias", np.zeros(3, np.float32), "row")], _LAYOUTS[4:5])
    if meeting.rank == 0:
        meeting.messages.post("told", b"yes")
    return caught.value.ranks


def test_a_rank_that_does_not_compare_is_named() -> None:
    assert values(launch(3, _absent)) == [(1,)] * 3


# --- values -------------------------------------------------------------------------------------------------


def _state() -> dict[str, Any]:
    return {
        "model": {f"layer{n}": {"w": np.zeros(2, np.float32)} for n in range(100)},
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99), "names": {"a", "b", "c", "d", "e"}},
        "history": deque([1.0, 2.0], maxlen=4),
        "counts": Counter(a=1),
        "loss": 0.5,
        "order": OrderedDict(x=1, y=[2, 3]),
        7: {"seven": 7},
    }


def test_places_with_other_values_are_named() -> None:
    mine = values_digest(flatten(_state()).tree)
    assert len(mine) <= 64
    assert not differing(mine, values_digest(flatten(_state()).tree))
    other = _state()
    other["optimizer"]["lr"] = 0.2
    other["history"].append(3.0)
    other["loss"] = float("nan")
    other[7]["seven"] = 7.0
    other["new"] = None
    found = differing(mine, values_digest(flatten(other).tree))
    assert {"optimizer.lr", "loss", "7.seven", "new"} <= set(found)
    assert {place.split(".")[0] for place in found} == {"optimizer", "history", "loss", "7", "new"}
    # Too many for places of their own; but a change is seen.
    assert "model" in mine
    other = _state()
    other["model"]["layer5"]["v"] = 1
    assert differing(mine, values_digest(flatten(other).tree)) == ["model"]


def test_at_most_64_places_and_no_change_unseen() -> None:
    state = {f"k{n}": n for n in range(500)}
    mine = values_digest(flatten(state).tree)
    assert 1 <= len(mine) <= 64
    for name in ("k0", "k499"):
        assert differing(mine, values_digest(flatten({**state, name: -1}).tree))


def _digests() -> tuple[dict[str, str], str]:
    tree = flatten(
        {"names": {f"name{n}" for n in range(50)}, "nested": {(frozenset({"a", "b", "c"}), 1): 2}}
    ).tree
    return values_digest(tree), structure_digest(tree)


def test_sets_are_equal_in_processes_that_order_them_differently() -> None:
    import subprocess
    import sys

    script = "from distributed.test_replicas import _digests; print(_digests())"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_structure_is_everything_but_plain_values() -> None:
    mine = structure_digest(flatten(_state()).tree)
    other = _state()
    other["optimizer"]["lr"] = float("inf")
    other["history"][0] = 2**70
    other["counts"]["a"] = 5
    other["order"]["y"][1] = "three"
    other["loss"] = "none"
    assert structure_digest(flatten(other).tree) == mine

    def changed(change: Any) -> str:
        state = _state()
        change(state)
        return structure_digest(flatten(state).tree)

    assert changed(lambda state: state["optimizer"].update(eps=1)) != mine
    assert changed(lambda state: state["model"].pop("layer3")) != mine
    assert changed(lambda state: state.update(loss=np.zeros(1))) != mine
    assert changed(lambda state: state.update(loss=[0.5])) != mine
    assert changed(lambda state: state["optimizer"].update(betas=[0.9, 0.99])) != mine
    assert changed(lambda state: state["history"].append(1.0)) != mine


def _part_after_the_first_save(run: Path) -> list[Any]:
    """Copies that are equal when it is planned who writes what, and not later; nothing else tells."""
    import torch.distributed as dist

    state = {"weights": np.zeros(3000), "statistics": np.zeros(7), "table": np.zeros((6, 4)).T}
    found: list[Any] = []
    with everystep.Checkpointer(run, state, mode="sync", timeout=60.0) as checkpointer:
        checkpointer.save(1)
        for step, name in ((2, "statistics"), (3, "weights")):
            state[name] += dist.get_rank()
            with pytest.raises(
                everystep.errors.RanksDisagree,
                match="ranks 0 and 1 hold different values of replicated arrays",
            ) as caught:
                checkpointer.save(step)
            with pytest.raises(everystep.errors.RanksDisagree, match=f"{name}: the copy of rank 1 differs"):
                checkpointer.save(step)
            state[name][:] = 5.0 * step
            checkpointer.save(step)
            found.append(caught.value.ranks)
        return [*found, checkpointer.steps]


def test_copies_that_part_after_the_plan_was_made(tmp_path: Path) -> None:
    found = values(launch(2, _part_after_the_first_save, tmp_path))
    assert found == [[(0, 1), (0, 1), [1, 2, 3]]] * 2
