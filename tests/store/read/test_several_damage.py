"""Damage in a checkpoint of several ranks: found, named, and never taken for data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import everystep
from everystep import engine
from everystep.engine import Memory
from everystep.format.geometry import Box
from everystep.format.manifest import decode_root, encode_part, encode_root, part_ref
from everystep.plan.description import encode_plan
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store.read.checkpoint import open_newest
from everystep.store.read.requests import BoxRequest
from everystep.store.read.verify import visible_damage
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import random_state

LEAVES = [
    LeafLayout("a", "F32", (12, 50), (MeshPlacement(Mesh.grid(3), (Split(0, 0),)),), "numpy"),
    LeafLayout("b", "I64", (40,), (MeshPlacement(Mesh.grid(3)),), "numpy"),
    LeafLayout("c", "F16", (9, 9), (MeshPlacement(Mesh.grid(3), (Split(1, 0),)),), "numpy"),
]
PLAN = WritePlan(LEAVES, Topology.regular(3), block_nbytes=16)
STATE = random_state(LEAVES, 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    own = {
        rank: Own(local={"x": {"$leaf": f"@{rank}.x"}}, arrays={f"@{rank}.x": np.arange(9)})
        for rank in range(3)
    }
    write_several(tmp_path / "c", PLAN, STATE, own=own)
    return tmp_path / "c"


def intact(loaded: Any) -> bool:
    return all(loaded[name].tobytes() == STATE[name].tobytes() for name in STATE)


def damage_met(path: Path) -> str | None:
    """The file in which a load found damage; None when it has brought back every bit."""
    try:
        loaded = everystep.load(path)
    except everystep.CorruptCheckpoint as error:
        return str(error.path)
    assert intact(loaded)
    return None


FILES = ["manifest.json"] + [f"r0000{rank}.{end}" for rank in (1, 2) for end in ("json", "v0.safetensors")]


@pytest.mark.parametrize("name", [*FILES, "r00000.v0.safetensors"])
def test_a_flipped_byte_anywhere_is_found_and_its_file_named(path: Path, name: str) -> None:
    file = path / name
    good = file.read_bytes()
    for at in [*range(0, len(good), max(1, len(good) // 40)), len(good) - 1]:
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        report = everystep.verify(path)
        assert not report.intact, at
        assert {problem.file for problem in report.problems} == {str(file)}, at
        where = damage_met(path)
        # The header of a shard, and its padding, belong to no leaf.
        assert where == str(file) or (where is None and name.endswith(".safetensors"))
    file.write_bytes(good)
    assert everystep.verify(path).intact


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_or_truncated_file_is_named(path: Path, name: str) -> None:
    file = path / name
    good = file.read_bytes()
    rank = int(name[1:6])
    for content in (None, b"", good[: len(good) // 2], good + b" " * 4096):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        kind = everystep.errors.IncompleteCheckpoint if content is None else everystep.CorruptCheckpoint
        with pytest.raises(kind, match=f"r{rank:05d}") as caught:
            everystep.load(path)
        assert caught.value.path == str(file)
        with open_newest(path) as opened:
            problem = visible_damage(opened)
        assert problem is not None
        assert problem.file == str(file)
        report = everystep.verify(path)
        assert {found.file for found in report.problems} == {str(file)}
        assert report.strangers == ()


def test_parts_of_two_ranks_swapped_are_refused(path: Path) -> None:
    one, two = path / "r00001.json", path / "r00002.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(everystep.CorruptCheckpoint, match=r"r00001\.json"):
        everystep.load(path)
    assert {problem.file for problem in everystep.verify(path).problems} == {str(one), str(two)}


def test_shards_of_two_ranks_swapped_are_refused(path: Path) -> None:
    one, two = path / "r00001.v0.safetensors", path / "r00002.v0.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(everystep.CorruptCheckpoint, match=r"r0000[12]\.v0"):
        everystep.load(path)
    assert {problem.file for problem in everystep.verify(path).problems} == {str(one), str(two)}


def test_a_shard_of_an_unreachable_volume_names_volume_and_host(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    write_several(tmp_path / "c", PLAN, STATE, volumes=[far])
    assert intact(everystep.load(tmp_path / "c"))
    assert everystep.verify(tmp_path / "c").intact
    far.rename(tmp_path / "gone")
    with pytest.raises(
        everystep.errors.IncompleteCheckpoint, match=f"volume {far} of host elsewhere.*mount it"
    ):
        everystep.load(tmp_path / "c")
    with open_newest(tmp_path / "c") as opened:
        problem = visible_damage(opened)
    assert problem is not None
    assert "host elsewhere" in problem.reason


def test_volumes_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    volumes = [tmp_path / "one", tmp_path / "two"]
    for volume in volumes:
        volume.mkdir()
    write_several(tmp_path / "c", PLAN, STATE, volumes=volumes)
    together = threading.Barrier(3)
    met: set[int] = set()
    real = engine.read

    def read(path: Any, *rest: Any, **more: Any) -> Any:
        thread = threading.get_ident()
        if thread not in met:
            met.add(thread)
            together.wait(120)  # broken unless all three volumes are under way
        return real(path, *rest, **more)

    monkeypatch.setattr(engine, "read", read)
    seen: list[int] = []
    with everystep.open(tmp_path / "c") as opened:
        arrays = opened.read(progress=seen.append)
    assert intact(arrays)
    assert len(met) == 3
    assert seen[-1] == sum(array.nbytes for array in STATE.values())


# ---- layouts that lie


def with_layout(path: Path, layout: bytes) -> None:
    manifest = path / "manifest.json"
    root = decode_root(manifest.read_bytes(), str(manifest))
    manifest.write_bytes(encode_root(replace(root, layout=layout)))


def lie(**changes: Any) -> bytes:
    """The layout of other leaves: `name=LeafLayout or None`."""
    leaves = {leaf.name: leaf for leaf in LEAVES} | changes
    return encode_plan(
        WritePlan(
            [leaf for leaf in leaves.values() if leaf is not None], Topology.regular(3), block_nbytes=16
        )
    )


LIES = {
    "shape": lie(a=LeafLayout("a", "F32", (50, 12), LEAVES[0].placements, "numpy")),
    "larger": lie(b=LeafLayout("b", "I64", (400,), LEAVES[1].placements, "numpy")),
    "beyond memory": lie(b=LeafLayout("b", "I64", (1 << 58,), LEAVES[1].placements, "numpy")),
    "smaller": lie(b=LeafLayout("b", "I64", (4,), LEAVES[1].placements, "numpy")),
    "dtype": lie(a=LeafLayout("a", "I32", (12, 50), LEAVES[0].placements, "numpy")),
    "other ranks": lie(
        a=LeafLayout("a", "F32", (12, 50), (MeshPlacement(Mesh.of([2, 0, 1]), (Split(0, 0),)),), "numpy")
    ),
    "one rank": lie(a=LeafLayout("a", "F32", (12, 50), (MeshPlacement(Mesh.grid(1, first=2)),), "numpy")),
    "leaf missing": lie(c=None),
    "leaf too many": lie(d=LeafLayout("d", "F32", (3,), LEAVES[1].placements, "numpy")),
    "not a layout": b'{"format":"everystep-layout/1"}',
    "not even JSON": b"[]",
}


@pytest.mark.parametrize("what", LIES)
def test_a_layout_that_lies_gives_no_wrong_bytes(path: Path, what: str) -> None:
    with_layout(path, LIES[what])
    where = damage_met(path)
    # Who opens all parts finds everything in them; and nothing refers to a leaf that is not there.
    assert where is not None or what in ("other ranks", "one rank", "leaf too many")
    assert not everystep.verify(path).intact
    if what in ("other ranks", "one rank"):
        with everystep.open(path) as opened, pytest.raises(everystep.CorruptCheckpoint, match="no rank has"):
            opened["a"][:4]


@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_a_layout_with_any_number_changed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any number"
    if not path.exists():
        write_several(path, PLAN, STATE)
    record = json.loads(encode_plan(PLAN))
    places = list(numbers(record))
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(
        st.sampled_from([0, 1, 2, 3, 4, 7, 49, 51, 1000, 2**40, 2**62]) | st.integers(0, 70)
    )
    with_layout(path, json.dumps(record, separators=(",", ":")).encode())
    damage_met(path)


def numbers(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        if type(item) is int:
            yield value, key
        elif isinstance(item, dict | list):
            yield from numbers(item)


def test_elements_that_no_rank_stored_are_missed(path: Path) -> None:
    """A part that lost a fragment, with a digest that fits."""
    manifest = path / "manifest.json"
    root = decode_root(manifest.read_bytes(), str(manifest))
    with open_newest(path) as opened:
        part = opened._parts[1]
    lost = replace(part, leaves=tuple(leaf for leaf in part.leaves if leaf.name != "a"))
    encoded = encode_part(lost)
    (path / "r00001.json").write_bytes(encoded)
    refs = tuple(part_ref(lost, encoded) if ref.rank == 1 else ref for ref in root.parts)
    manifest.write_bytes(encode_root(replace(root, parts=refs)))
    with open_newest(path) as opened:
        out = np.zeros((12, 50), np.float32)
        with pytest.raises(everystep.CorruptCheckpoint, match=r"elements \[4:8, 0:50\]") as caught:
            opened._reader.fetch(
                [BoxRequest("a", Box((0, 0), (12, 50)), Memory(out.ctypes.data, out.nbytes, out))]
            )
        assert caught.value.leaf == "a"
        assert opened["a"][:4].tobytes() == STATE["a"][:4].tobytes()
    with pytest.raises(everystep.CorruptCheckpoint, match="200 of its elements are nowhere"):
        everystep.load(path)
    assert not everystep.verify(path).intact


# ---- memory


def test_reading_in_another_layout_takes_no_more_than_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of what was stored by rows: nothing larger than a window is held beside the result."""
    import tracemalloc

    shape = (2048, 4096)  # 32 MiB, of which every rank stores half
    leaf = LeafLayout("w", "F32", shape, (MeshPlacement(Mesh.grid(2), (Split(0, 0),)),), "numpy")
    array = np.arange(2048 * 4096, dtype=np.float32).reshape(shape)
    write_several(tmp_path / "c", WritePlan([leaf], Topology.regular(2)), {"w": array})
    windows: list[int] = []
    real = engine.destinations

    def noted(piece: engine.ReadPiece) -> engine.ReadPiece:
        end = piece.destination

        def drain(window: memoryview, offset: int) -> None:
            windows.append(len(window))
            end.drain(window, offset)

        noting = dataclasses.replace(end, drain=drain) if isinstance(end, engine.Consumed) else end
        return engine.ReadPiece(piece.offset, noting, piece.checksums)

    monkeypatch.setattr(engine, "destinations", lambda pieces: real([noted(piece) for piece in pieces]))
    out = np.zeros((2048, 1000), np.float32)
    with open_newest(tmp_path / "c") as opened:
        tracemalloc.start()
        opened._reader.fetch(
            [BoxRequest("w", Box((0, 100), (2048, 1000)), Memory(out.ctypes.data, out.nbytes, out))]
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert np.array_equal(out, array[:, 100:1100])
    assert max(windows) <= engine.Tuning().window_nbytes
    assert sum(windows) >= out.nbytes
    assert peak < 4 << 20
