"""Large bytes are stored as leaves, and come back as what they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.errors import CorruptCheckpoint
from everystep.inspect.description import leaf_order
from everystep.state.flatten import BLOB_NBYTES
from everystep.store.read.checkpoint import open_checkpoint, open_newest
from support.states import handmade_checkpoints as making

BIG = os.urandom(3 * BLOB_NBYTES + 5)
OTHER = BIG[::-1]


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


STATE = {
    "bytes": BIG,
    "array": bytearray(OTHER),
    "again": BIG,
    "limit": BIG[:BLOB_NBYTES],
    "few": b"",
    "list": [BIG, 2, ("t", bytearray(BIG))],
    "clash": {"a.b": BIG, "a": {"b": OTHER}},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    everystep.save(tmp_path / "c", STATE)
    return tmp_path / "c"


def test_they_come_back_as_themselves(saved: Path) -> None:
    assert same(everystep.load(saved), STATE)
    assert same(everystep.load(saved, framework="torch"), STATE)
    assert everystep.verify(saved).intact


def test_only_they_are_leaves(saved: Path) -> None:
    with open_newest(saved) as opened:
        assert set(opened) == {"bytes", "array", "again", "list.0", "list.2.1", "clash.a.b", "clash.a.b~1"}
        assert {info.dtype for info in opened.leaves.values()} == {"U8"}
        assert set(opened.values) == {"limit", "few", "list.1", "list.2.0"}
        assert opened["bytes"][:].tobytes() == BIG
        assert len(opened._parts.root.part.files) == 1
    assert leaf_order(open_checkpoint(str(saved)))[:3] == [
        "bytes",
        "array",
        "again",
    ]  # as `everystep show` has them


def test_a_target_takes_them(saved: Path) -> None:
    """Also one that had less there, or none; a bytearray is filled where it is."""
    held = bytearray(3)
    target = {**STATE, "bytes": b"", "array": held, "again": None, "list": [], "clash": {"a": {"b": 3}}}
    found = everystep.load(saved, into=target)
    assert same({name: found[name] for name in STATE}, STATE)
    assert found["array"] is held
    with pytest.raises(everystep.StateMismatch, match="array: checkpoint holds bytes, target"):
        everystep.load(saved, into={**STATE, "array": np.zeros(3, np.uint8)})


def test_some_of_them_can_be_selected(saved: Path) -> None:
    assert same(everystep.load(saved, select="list.2*"), {"list": [None, None, (None, bytearray(BIG))]})
    target = dict(STATE, array=bytearray(), bytes=b"kept")
    assert everystep.load(saved, into=target, select="array")["array"] == OTHER
    assert target["bytes"] == b"kept"


def test_keys_and_members_of_sets_stay_values(tmp_path: Path) -> None:
    state = {"keys": {BIG: 1}, "set": {BIG}, "frozen": frozenset([(OTHER, 1)])}
    assert everystep.save(tmp_path / "c", state).leaves == 0
    assert same(everystep.load(tmp_path / "c"), state)


def test_a_checkpoint_that_has_them_in_its_tree_still_loads(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    from everystep.state.flatten import value_node

    making.write_checkpoint(
        tmp_path / "c", {"w": np.zeros(2)}, tree={"b": value_node([BIG, bytearray(OTHER)])}
    )
    assert same(everystep.load(tmp_path / "c")["b"], [BIG, bytearray(OTHER)])


@pytest.mark.parametrize(
    "array", [np.zeros(4, "<f4"), np.zeros((2, 2), np.uint8), np.zeros(4, np.int8)], ids=["F32", "2-d", "I8"]
)
@pytest.mark.parametrize("tag", ["$bytes", "$bytearray"])
def test_an_array_is_not_taken_for_bytes(tmp_path: Path, array: np.ndarray, tag: str) -> None:
    making.write_checkpoint(tmp_path / "c", {"w": array}, tree={"b": {tag: {"$leaf": "w"}}})
    with pytest.raises(CorruptCheckpoint, match="array"):
        everystep.load(tmp_path / "c")
    held = bytearray(b"kept")
    with pytest.raises(CorruptCheckpoint, match="array"):
        everystep.load(tmp_path / "c", into={"b": held})
    assert held == b"kept"
    assert not everystep.verify(tmp_path / "c").intact


@pytest.mark.parametrize("body", [{"$leaf": "gone"}, {"$leaf": 3}, {"x": "w"}, {"$tuple": []}, {}], ids=str)
def test_a_reference_to_nothing_is_damage(tmp_path: Path, body: Any) -> None:
    making.write_checkpoint(tmp_path / "c", {"w": np.zeros(4, np.uint8)}, tree={"b": {"$bytes": body}})
    with pytest.raises(CorruptCheckpoint):
        everystep.load(tmp_path / "c")


@pytest.mark.parametrize("mode", ["snapshot", "sync"])
def test_a_bytearray_may_grow_right_after_a_save(tmp_path: Path, mode: Any) -> None:
    held = bytearray(BIG)
    with everystep.Checkpointer(
        tmp_path, {"b": held}, mode=mode, options=everystep.Options(small_nbytes=0)
    ) as c:
        for step in range(1, 3):
            c.save(step)
            held += b"more"
    assert everystep.load(tmp_path)["b"] == BIG + b"more"


def test_a_bytearray_that_another_thread_resizes_fails_the_save(tmp_path: Path) -> None:
    """Its memory has moved: what is read there would be anything."""
    from everystep.state.numpy_arrays import bytes_source

    held = bytearray(BIG)
    source = bytes_source(held, "b")
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with pytest.raises(everystep.errors.MutatedDuringSave, match="'b'"):
        source.fill(memoryview(bytearray(16)), 0)  # type: ignore[union-attr]
