"""State of several ranks as one: trees that differ, ties, and what belongs to one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.format.geometry import Box, whole
from everystep.plan.description import encode_plan
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.state import LeafMeta, Restore, Sharding
from everystep.store.read.checkpoint import open_newest
from everystep.store.read.requests import box_requests
from everystep.store.read.restoring import compare_target
from everystep.store.read.selection import select_state
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import Array, local_array, random_state

LEAVES = [
    LeafLayout("m.first", "F32", (6, 5), (MeshPlacement(Mesh.grid(2), (Split(0, 0),)),), "numpy"),
    LeafLayout("m.last", "F32", (7, 4), (MeshPlacement(Mesh.grid(2, first=2), (Split(1, 0),)),), "numpy"),
    LeafLayout("shared", "I64", (3,), (MeshPlacement(Mesh.grid(4)),), "numpy"),
]
PLAN = WritePlan(LEAVES, Topology.regular(4), block_nbytes=8)
STATE = random_state(LEAVES, 1)

FIRST = {
    "m": {"first": {"$leaf": "m.first"}, "tied": {"$leaf": "m.tied"}},
    "shared": {"$leaf": "shared"},
    "step": 5,
    "mine": {"$per_rank": "mine"},
}
LAST = {
    "m": {"last": {"$leaf": "m.last"}},
    "shared": {"$leaf": "shared"},
    "step": 5,
    "mine": {"$per_rank": "mine"},
    "note": "stage 1",
}


def own(rank: int) -> Own:
    name = f"@{rank}.mine.draws"
    return Own(
        tree=LAST if rank == 2 else None,
        local={"mine": {"draws": {"$leaf": name}, "rank": rank, "again": {"$leaf": f"@{rank}.again"}}},
        arrays={name: np.arange(rank + 1)},
        aliases={f"@{rank}.again": name, **({} if rank > 1 else {"m.tied": "m.first"})},
    )


@pytest.fixture(params=["layout", "no layout"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    layout = None if request.param == "layout" else b""
    everyone = {rank: own(rank) for rank in range(4)}
    write_several(tmp_path / "c", PLAN, STATE, tree=FIRST, own=everyone, layout=layout)
    return tmp_path / "c"


def test_the_whole_state_is_that_of_all_ranks(path: Path) -> None:
    state = everystep.load(path)
    assert list(state) == ["m", "shared", "step", "mine", "note"]
    assert np.array_equal(state["m"]["first"], STATE["m.first"], equal_nan=True)
    assert state["m"]["last"].tobytes() == STATE["m.last"].tobytes()
    assert state["m"]["tied"] is state["m"]["first"]
    assert state["mine"]["draws"].tolist() == [0]
    assert state["mine"]["again"] is state["mine"]["draws"]
    assert (state["step"], state["mine"]["rank"], state["note"]) == (5, 0, "stage 1")


def test_what_an_open_checkpoint_tells(path: Path) -> None:
    with open_newest(path) as opened:
        assert set(opened._parts.metas) == {"m.first", "m.last", "shared"}
        assert opened.values == {"step": 5, "note": "stage 1", "mine.rank": 0}
        assert dict(opened.aliases) == {"m.tied": "m.first"}
        assert opened.leaves["m.tied"].alias_of == "m.first"
        assert opened.leaves["@3.mine.draws"].shape == (4,)
        assert opened.leaves["@3.again"].alias_of == "@3.mine.draws"
        assert "@2.again" in opened
        assert "@9.again" not in opened
        assert len(opened) == 3 + 1 + 8
        assert opened["@2.again"][1:].tolist() == [1, 2]
        assert opened.read("@*.mine.draws")["@1.mine.draws"].tolist() == [0, 1]
        assert opened._parts.local(3)["mine"]["rank"] == 3  # type: ignore[index,call-overload]
        assert opened._parts.local(4) == {}
        assert opened._parts[2].rank == 2
        assert set(opened._parts.metas_for(1)) == {*opened._parts.metas, "@1.mine.draws"}
        with pytest.raises(KeyError, match="no leaf"):
            opened["m.nothing"]
    assert everystep.verify(path).problems == ()


def test_only_the_parts_that_are_needed_are_opened(tmp_path: Path) -> None:
    write_several(tmp_path / "c", PLAN, STATE)
    for rank in (1, 2, 3):
        (tmp_path / "c" / f"r{rank:05d}.json").rename(tmp_path / f"{rank}.json")
    (tmp_path / "1.json").rename(tmp_path / "c" / "r00001.json")
    with open_newest(tmp_path / "c") as opened:
        assert set(opened._parts.metas) == {leaf.name for leaf in LEAVES}
        assert opened.nbytes == sum(array.nbytes for array in STATE.values())
        assert opened.select("*st") == ["m.first", "m.last"]
        assert opened["m.first"][...].tobytes() == STATE["m.first"].tobytes()
        with pytest.raises(everystep.errors.IncompleteCheckpoint, match="part of rank 2") as caught:
            opened["m.last"][0]
        assert caught.value.path == str(tmp_path / "c" / "r00002.json")


def test_selected_leaves_of_several_ranks(path: Path) -> None:
    state = everystep.load(path, select="m.*")
    assert set(state["m"]) == {"first", "tied", "last"}
    into = {"m": {"last": np.zeros((7, 4), np.float32)}, "step": 0}
    everystep.load(path, into, select="m.last")
    assert into["m"]["last"].tobytes() == STATE["m.last"].tobytes()  # type: ignore[index]
    assert into["step"] == 0
    assert everystep.load(path, select="mine.*")["mine"]["draws"].tolist() == [0]
    with pytest.raises(everystep.StateMismatch, match=r"no leaf of .* matches 'mind"):
        everystep.load(path, select="mind.*")


def _selected(opened: everystep.Checkpoint, patterns: str | list[str], rank: int) -> set[str]:
    return set(select_state(opened._parts, patterns, rank=rank).leaves)


def test_one_pattern_selects_what_is_every_ranks_own(path: Path) -> None:
    with open_newest(path) as opened:
        for rank in range(4):
            assert _selected(opened, "mine.*", rank) == {f"@{rank}.mine.draws"}
            into = {"mine": everystep.per_rank({"draws": np.full(rank + 1, -1), "rank": -1, "again": None})}
            restore = compare_target(opened._reader, into, "mine.*", rank=rank, strict=False)
            assert restore.fills
        # A rank that is new has nothing of its own; that is no mistake in the pattern.
        assert _selected(opened, ["mine.*", "shared"], 7) == {"shared"}


def test_selecting_ones_own_opens_the_parts_of_no_others(tmp_path: Path) -> None:
    write_several(tmp_path / "c", PLAN, STATE, tree=FIRST, own={rank: own(rank) for rank in (0, 2)})
    (tmp_path / "c" / "r00003.json").unlink()
    with open_newest(tmp_path / "c") as opened:
        assert _selected(opened, "mine.draws", 2) == {"@2.mine.draws"}


def target() -> dict[str, Any]:
    return {
        "m": {"first": np.zeros((6, 5), np.float32), "last": np.zeros((7, 4), np.float32), "tied": None},
        "shared": np.zeros(3, np.int64),
        "step": 0,
        "mine": everystep.per_rank({"draws": np.zeros(1, np.int64), "rank": 9, "again": None}),
        "note": "",
    }


def test_one_process_takes_rank_zeros_own(path: Path) -> None:
    into = target()
    into["m"]["tied"] = into["m"]["first"]
    into["mine"].value["again"] = into["mine"].value["draws"]
    everystep.load(path, into)
    assert into["m"]["last"].tobytes() == STATE["m.last"].tobytes()
    assert into["mine"].value["rank"] == 0
    assert into["note"] == "stage 1"


def test_what_rank_zero_has_none_of_stays_and_a_warning_says_so(tmp_path: Path) -> None:
    tree = {"shared": {"$leaf": "shared"}, "mine": {"$per_rank": "mine"}}
    write_several(tmp_path / "c", PLAN, STATE, tree=tree, own={1: Own(local={"mine": 3})})
    into = {"shared": np.zeros(3, np.int64), "mine": everystep.per_rank(4)}
    with pytest.warns(RuntimeWarning, match=r"mine of rank 0 stays as it is"):
        everystep.load(tmp_path / "c", into)
    assert into["mine"].value == 4  # type: ignore[union-attr]


def restore_of(leaf: LeafLayout, out: Array, sharding: Sharding | None) -> Restore:
    metas = {leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)}
    restore = Restore({"x": np.zeros(leaf.shape, out.dtype)}, {"x": {"$leaf": leaf.name}}, metas, {})
    from everystep.engine import Memory

    restore.destinations[leaf.name] = Memory(out.ctypes.data, out.nbytes, out)
    if sharding is not None:
        restore.parts[leaf.name] = (sharding, out.shape)
    return restore


def test_a_restore_wants_the_boxes_of_its_rank(tmp_path: Path) -> None:
    write_several(tmp_path / "c", PLAN, STATE)
    leaf = LEAVES[1]
    spread = MeshPlacement(Mesh.grid(3), (Split(0, 0, 2),))
    sharding = Sharding(leaf.shape, (3,), (0, 1, 2), ((0, 2),))
    with open_newest(tmp_path / "c") as opened:
        for rank in range(4):
            expected = (
                local_array(STATE[leaf.name], spread, (rank,)) if rank < 3 else np.zeros((0, 4), np.float32)
            )
            out = np.zeros_like(expected)
            wanted = box_requests(restore_of(leaf, out, sharding), opened._parts.metas, rank)
            opened._reader.fetch(wanted)
            assert out.tobytes() == expected.tobytes()
        box = Box((1, 2), (3, 2))
        out = np.zeros((3, 2), np.float32)
        opened._reader.fetch(
            box_requests(restore_of(leaf, out, Sharding(leaf.shape, box=box)), opened._parts.metas, 0)
        )
        assert out.tobytes() == STATE[leaf.name][1:4, 2:4].tobytes()
        (whole_one,) = box_requests(
            restore_of(leaf, np.zeros((7, 4), np.float32), None), opened._parts.metas, 0
        )
        assert whole_one.box == whole((7, 4))
        with pytest.raises(everystep.UnsupportedState, match=r"torch\.chunk"):
            box_requests(restore_of(leaf, np.zeros((5, 4), np.float32), sharding), opened._parts.metas, 0)


def test_a_layout_of_another_world_is_refused(tmp_path: Path) -> None:
    other = encode_plan(WritePlan(LEAVES, Topology.regular(5)))
    write_several(tmp_path / "c", PLAN, STATE, layout=other)
    with pytest.raises(everystep.CorruptCheckpoint, match="layout of 5 ranks"):
        everystep.load(tmp_path / "c")
