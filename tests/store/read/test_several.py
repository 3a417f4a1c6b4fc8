"""Checkpoints that several ranks wrote, read by one process: bit for bit, whatever the layout."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from everystep import engine
from everystep.engine import Consumed, Memory, Strided, Unkept
from everystep.format.geometry import Box, whole
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, pieces_of
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store.read.checkpoint import open_newest
from everystep.store.read.requests import BoxRequest
from everystep.store.read.verify import visible_damage
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import (
    DTYPES,
    Array,
    inside,
    layouts,
    leaf_kinds,
    local_array,
    memory_of,
    random_state,
    topologies,
)


def leaf(
    name: str, shape: tuple[int, ...], mesh: Mesh, *splits: Split, dtype: str = "F32", box: Box | None = None
) -> LeafLayout:
    return LeafLayout(name, dtype, shape, (MeshPlacement(mesh, splits, box),), "numpy")


GRID4, GRID22 = Mesh.grid(4), Mesh.grid(2, 2)

LAYOUTS: dict[str, tuple[int, list[LeafLayout]]] = {
    "ddp": (4, [leaf("a", (300, 7), GRID4), leaf("b", (), GRID4, dtype="I64"), leaf("none", (0, 3), GRID4)]),
    "fsdp": (4, [leaf("a", (13, 5), GRID4, Split(0, 0)), leaf("short", (2, 3), GRID4, Split(0, 0))]),
    "tensor parallel": (
        4,
        [leaf("a", (9, 32), GRID4, Split(1, 0)), leaf("b", (8, 3, 5), GRID4, Split(2, 0))],
    ),
    "fsdp on tensor parallel": (4, [leaf("a", (16, 6), GRID22, Split(0, 1), Split(0, 0))]),
    "strided": (4, [leaf("a", (17, 3), GRID22, Split(0, 0, 2), Split(0, 1))]),
    "hsdp": (4, [leaf("a", (64, 33), GRID22, Split(0, 1)), leaf("b", (5,), GRID22, Split(0, 1))]),
    "pipeline": (
        4,
        [leaf("first.w", (8, 8), Mesh.grid(2), Split(0, 0)), leaf("last.w", (8, 8), Mesh.grid(2, first=2))],
    ),
    "large": (2, [leaf("a", (3000, 700), Mesh.grid(2), Split(1, 0)), leaf("b", (1 << 20,), Mesh.grid(2))]),
}


def plan_of(name: str) -> WritePlan:
    world, leaves = LAYOUTS[name]
    return WritePlan(leaves, Topology.regular(world), block_nbytes=64)


@pytest.fixture(params=sorted(LAYOUTS))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, WritePlan, dict[str, Array]]:
    plan = plan_of(request.param)
    state = random_state(plan.leaves, 3)
    write_several(tmp_path / "c", plan, state)
    return tmp_path / "c", plan, state


def same(a: Any, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_one_process_loads_what_several_saved(saved: tuple[Path, WritePlan, dict[str, Array]]) -> None:
    path, plan, state = saved
    loaded = everystep.load(path)
    assert list(loaded) == list(state)
    assert all(same(loaded[name], state[name]) for name in state)
    into = {name: np.zeros_like(array) for name, array in state.items()}
    everystep.load(path, into)
    assert all(same(into[name], state[name]) for name in state)
    with open_newest(path) as opened:
        assert opened.world == plan.topology.world
        assert opened.nbytes == sum(array.nbytes for array in state.values())
        assert visible_damage(opened) is None
        assert {name: info.shape for name, info in opened.leaves.items()} == {
            name: array.shape for name, array in state.items()
        }
        some = opened.read(f"{next(iter(state))[:1]}*")
        assert some
        assert all(same(array, state[name]) for name, array in some.items())
    assert everystep.verify(path).intact


def test_slices_of_leaves_in_pieces(saved: tuple[Path, WritePlan, dict[str, Array]]) -> None:
    path, _, state = saved
    with everystep.open(path) as opened:
        for name, array in state.items():
            for index in [
                np.s_[...],
                np.s_[1:],
                np.s_[-2:],
                np.s_[::-1],
                np.s_[..., 1:3],
                np.s_[::2, ..., -1],
            ]:
                if array.ndim > 1 or (index in (..., np.s_[1:]) and array.ndim):
                    assert same(opened[name][index], np.ascontiguousarray(array[index])), (name, index)


def test_every_rank_of_any_layout_gets_its_part(saved: tuple[Path, WritePlan, dict[str, Array]]) -> None:
    path, _, state = saved
    with open_newest(path) as opened:
        for world in (1, 3):
            mesh = Mesh.grid(world)
            for name, array in state.items():
                for axis in range(array.ndim):
                    target = LeafLayout(
                        name,
                        opened._parts.metas[name].dtype,
                        array.shape,
                        (MeshPlacement(mesh, (Split(axis, 0),)),),
                    )
                    for rank in range(world):
                        got, wanted = wants(target, rank)
                        opened._reader.fetch(wanted)
                        assert same(got, local_array(array, target.placements[0], (rank,)))


def wants(leaf: LeafLayout, rank: int) -> tuple[Array, list[BoxRequest]]:
    """An array for what a rank holds, and what to fetch for it, into strided memory."""
    (spread,) = leaf.placements
    coordinate = spread.mesh.coordinate(rank)
    assert coordinate is not None
    shape = local_array(np.empty(leaf.shape, np.uint8), spread, coordinate).shape
    out = np.zeros(shape, DTYPES[leaf.dtype])
    found = []
    for _, piece in pieces_of(leaf, rank):
        part = out[inside(piece.local)]
        found.append(
            BoxRequest(
                leaf.name, piece.box, Strided(part.ctypes.data, out.itemsize, part.shape, part.strides, out)
            )
        )
    return out, found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6))
    kinds = data.draw(leaf_kinds())
    leaves = data.draw(layouts(kinds, world))
    plan = WritePlan(
        leaves, data.draw(topologies(world)), block_nbytes=data.draw(st.sampled_from([1, 16, 1000]))
    )
    state = random_state(leaves, data.draw(st.integers(0, 5)))
    other = data.draw(st.integers(1, 6))
    wanted_leaves = data.draw(layouts(kinds, other))
    with tempfile.TemporaryDirectory() as folder:
        volumes = [Path(folder) / "second"] if data.draw(st.booleans()) else []
        for volume in volumes:
            volume.mkdir()
        write_several(Path(folder) / "c", plan, state, volumes=volumes)
        assert everystep.verify(Path(folder) / "c").problems == ()
        with open_newest(Path(folder) / "c") as opened:
            read = opened.read(framework="numpy")
            assert all(same(read[name], state[name]) for name in state)
            for rank in range(other):
                memory = memory_of(wanted_leaves, state, rank)
                got = {key: np.zeros_like(array) for key, array in memory.items()}
                opened._reader.fetch(list(everything(wanted_leaves, rank, got, data.draw(st.booleans()))))
                assert all(same(got[key], memory[key]) for key in memory)


def everything(
    leaves: Sequence[LeafLayout], rank: int, into: dict[tuple[str, int], Array], consumed: bool
) -> Any:
    for layout in leaves:
        for number, piece in pieces_of(layout, rank):
            part = into[layout.name, number][(*inside(piece.local), ...)]
            if consumed:
                yield BoxRequest(layout.name, piece.box, Consumed(part.nbytes, drain(part)))
            else:
                where = Strided(part.ctypes.data, part.itemsize, part.shape, part.strides, part)
                yield BoxRequest(layout.name, piece.box, where)


def drain(part: Array) -> Any:
    """Collects the C-order bytes of an array, in whatever order, and puts them in once all are there."""
    flat = np.zeros(part.nbytes, np.uint8)
    left = part.nbytes

    def take(window: memoryview, offset: int) -> None:
        nonlocal left
        flat[offset : offset + len(window)] = np.frombuffer(window, np.uint8)
        left -= len(window)
        assert left >= 0
        if not left:
            part[...] = flat.view(part.dtype).reshape(part.shape)

    return take


@pytest.mark.parametrize("verify", [True, False])
def test_the_same_elements_may_go_to_several_places(tmp_path: Path, verify: bool) -> None:
    plan = plan_of("large")
    state = random_state(plan.leaves, 6)
    write_several(tmp_path / "c", plan, state, own={0: Own(aliases={"tied": "a"})})
    boxes = [
        Box((0, 0), (3000, 700)),
        Box((0, 0), (3000, 700)),
        Box((10, 340), (2000, 30)),  # across both fragments
        Box((2999, 699), (1, 1)),
        Box((5, 0), (1, 350)),  # one row of one fragment
        Box((7, 7), (0, 3)),
    ]
    outs = [np.zeros(box.shape, np.float32) for box in boxes]
    names = ["a", "a", "tied", "a", "a", "a"]
    wanted = [
        BoxRequest(name, box, Memory(out.ctypes.data, out.nbytes, out))
        for name, box, out in zip(names, boxes, outs, strict=True)
    ]
    with open_newest(tmp_path / "c") as opened:
        opened._reader.fetch([*wanted, BoxRequest("b", whole((1 << 20,)), Unkept(4 << 20))], verify=verify)
    for box, out in zip(boxes, outs, strict=True):
        assert same(out, np.ascontiguousarray(state["a"][inside(box)]))


def test_a_fragment_for_one_place_is_read_straight_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("fsdp")
    state = random_state(plan.leaves, 1)
    write_several(tmp_path / "c", plan, state)
    ends: list[type] = []
    real = engine.destinations

    def destinations(pieces: Any) -> Any:
        ends.extend(type(piece.destination) for piece in pieces)
        return real(pieces)

    monkeypatch.setattr(engine, "destinations", destinations)
    into = {name: np.zeros_like(array) for name, array in state.items()}
    everystep.load(tmp_path / "c", into)
    assert all(same(into[name], state[name]) for name in state)
    assert set(ends) == {Memory}


def test_one_process_with_several_volumes(tmp_path: Path) -> None:
    volumes = [tmp_path / "one", tmp_path / "two"]
    for volume in volumes:
        volume.mkdir()
    state = {
        "large": np.random.default_rng(0).standard_normal((1000, 900)),
        "none": np.zeros((0, 3)),
        "own": everystep.per_rank({"draws": np.arange(5)}),
        "epoch": 3,
    }
    state["tied"] = state["none"]
    everystep.save(tmp_path / "c", state, options=everystep.Options(volumes=volumes))
    loaded = everystep.load(tmp_path / "c")
    assert same(loaded["large"], state["large"])  # type: ignore[arg-type]
    assert loaded["tied"] is loaded["none"]
    assert loaded["none"].shape == (0, 3)
    assert loaded["own"]["draws"].tolist() == [0, 1, 2, 3, 4]
    assert everystep.verify(tmp_path / "c").intact
    with open_newest(tmp_path / "c") as opened:
        assert {file.volume is None for file in opened._parts[0].files} == {False}
        assert same(opened["large"][10:20, 5], np.ascontiguousarray(loaded["large"][10:20, 5]))
    Path(opened._parts[0].files[0].volume or "", opened._parts[0].files[0].name).unlink()
    with pytest.raises(
        everystep.errors.IncompleteCheckpoint, match="of this host, and has been removed from there"
    ):
        everystep.load(tmp_path / "c")
