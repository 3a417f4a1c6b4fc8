"""The reader printed in docs/format.md reads real checkpoints, and finds damage: the page is enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.format.checksums import digest
from everystep.format.dtypes import SAFETENSORS_ITEMSIZE
from everystep.format.manifest import (
    MANIFEST_NAME,
    Alias,
    Fragment,
    Leaf,
    Part,
    ShardFile,
    encode_part,
    encode_root,
    part_ref,
    shard_name,
)
from everystep.format.shard import HeaderEntry, build_header, parse_header
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.state.node import localized
from everystep.store.read.checkpoint import open_newest
from support.states import handmade_checkpoints as making
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import random_state

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def reader() -> SimpleNamespace:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "model.w": np.random.default_rng(0).standard_normal((700, 900)),  # several chunks
    "model.b": np.arange(7, dtype="<f2"),
    "flags": np.array([True, False, True]),
    "count": np.array(2**40),
    "nothing": np.zeros((4, 0, 2), "<f4"),
    "nan": np.array([0x7FF8DEADBEEF0001, 0xFFF0000000000000], "<u8").view("<f8"),
    "complex": np.array([[1 + 2j, 3 - 4j]]),
    "when": np.array(["2024-02-29", "NaT"], "<M8[D]"),
    "words": np.array(["hold", "fäst"]),
    "big": np.arange(5, dtype=">i4"),
    "__metadata__": np.arange(3, dtype="u1"),
}
TREE = {
    "model": {"w": {"$leaf": "model.w"}, "b": {"$leaf": "model.b"}, "head": {"$leaf": "model.head"}},
    "rest": {"$tuple": [{"$leaf": name} for name in list(ARRAYS)[2:]]},
    "epoch": 3,
    "lr": 1e-4,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "any name at all"
    making.write_checkpoint(directory, ARRAYS, TREE, aliases={"model.head": "model.w"})
    return directory


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_the_reader_in_the_doc_reads_every_array_bit_for_bit(
    reader: SimpleNamespace, checkpoint: Path
) -> None:
    root, arrays = reader.read_checkpoint(checkpoint)
    assert root["step"] == 120
    assert root["metrics"] == {"loss": 0.25}
    assert set(arrays) == {*ARRAYS, "model.head"}
    for name, array in ARRAYS.items():
        assert same(arrays[name], array), name
    state = reader.rebuild(root["tree"], arrays)
    assert state["model"]["head"] is state["model"]["w"]
    assert state["epoch"] == 3
    assert all(same(a, b) for a, b in zip(state["rest"], list(ARRAYS.values())[2:], strict=True))


def test_the_reader_in_the_doc_reads_a_checkpoint_of_one_file(
    reader: SimpleNamespace, tmp_path: Path
) -> None:
    state = {name: ARRAYS[name] for name in ("model.b", "flags", "nan", "complex", "words", "__metadata__")}
    everystep.save(tmp_path / "c", {**state, "note": 'say "yes"'}, step=7)
    (file,) = (tmp_path / "c").iterdir()
    root, arrays = reader.read_checkpoint(tmp_path / "c")
    assert root["step"] == 7
    assert all(same(arrays[name], array) for name, array in state.items())
    assert reader.rebuild(root["tree"], arrays)["note"] == 'say "yes"'
    good = file.read_bytes()
    for offset in [*range(200), 3000, root["part"]["leaves"][0]["fragments"][0]["offset"]]:
        file.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            reader.read_checkpoint(tmp_path / "c")


def test_the_reader_in_the_doc_reads_large_bytes(reader: SimpleNamespace, tmp_path: Path) -> None:
    state = {"a": bytes(range(256)) * 300, "b": [bytearray(70_000)], "few": b"x"}
    everystep.save(tmp_path / "c", state)
    root, arrays = reader.read_checkpoint(tmp_path / "c")
    found = reader.rebuild(root["tree"], arrays)
    assert found == {**state, "few": {"$bytes": "eA=="}}
    assert [type(found["a"]), type(found["b"][0])] == [bytes, bytearray]


def test_the_reader_in_the_doc_knows_every_type_the_page_names(reader: SimpleNamespace) -> None:
    page = PAGE.read_text("utf-8")
    for name, size in SAFETENSORS_ITEMSIZE.items():
        assert f"`{name}`" in page
        assert np.dtype(reader.NUMPY[name]).itemsize == size


def test_the_reader_in_the_doc_finds_damage_in_data_and_manifest(
    reader: SimpleNamespace, checkpoint: Path
) -> None:
    for name in (MANIFEST_NAME, shard_name(0, 0)):
        path = checkpoint / name
        good = path.read_bytes()
        for bad in (good[:200] + bytes([good[200] ^ 1]) + good[201:], good[:-4096]):
            if name != MANIFEST_NAME and len(bad) == len(good):
                at = parse_header(good, len(good), name).data_start + 5000  # well inside model.w
                bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=r"damaged|wrong size"):
                reader.read_checkpoint(checkpoint)
        path.write_bytes(good)
    reader.read_checkpoint(checkpoint)


def test_the_reader_in_the_doc_joins_the_fragments_of_several_ranks(
    reader: SimpleNamespace, tmp_path: Path
) -> None:
    whole = np.arange(6 * 5, dtype="<f4").reshape(6, 5)
    boxes = [((0, 0), (6, 2)), ((0, 2), (6, 3))]
    parts = []
    for rank, (start, shape) in enumerate(boxes):
        piece = whole[:, start[1] : start[1] + shape[1]].tobytes()
        header = build_header([HeaderEntry("w", "F32", shape, 0, len(piece))], {})
        (tmp_path / shard_name(rank, 0)).write_bytes(header + piece)
        place = Fragment(start, shape, 0, len(header), len(piece), making.checksums(piece))
        file = ShardFile(shard_name(rank, 0), len(header) + len(piece), len(header), digest(header))
        leaf = Leaf("w", "F32", (6, 5), "numpy", (place,))
        parts.append(Part(rank, making.CHUNK, (file,), (leaf,), (Alias("tied", "w"),)))
    other = encode_part(parts[1])
    ref = part_ref(parts[1], other)
    (tmp_path / ref.file).write_bytes(other)
    (tmp_path / MANIFEST_NAME).write_bytes(encode_root(making.root(parts[0], world=2, parts=(ref,))))
    _, arrays = reader.read_checkpoint(tmp_path)
    assert same(arrays["w"], whole)
    assert arrays["tied"] is arrays["w"]
    (tmp_path / ref.file).write_bytes(encode_part(parts[0]))
    with pytest.raises(ValueError, match="not the part"):
        reader.read_checkpoint(tmp_path)


LATER_GROUP = {"late": 1, "lr": 0.1, "params": ["b", "w"], "beta": 2}


def test_the_reader_in_the_doc_reads_what_several_ranks_saved(
    reader: SimpleNamespace, tmp_path: Path
) -> None:
    """Against the real reader: arrays in pieces on two volumes, trees that differ, state of one rank."""
    leaves = [
        LeafLayout("m.w", "F32", (30, 7), (MeshPlacement(Mesh.grid(3), (Split(1, 0),)),), "numpy"),
        LeafLayout("m.b", "I64", (20,), (MeshPlacement(Mesh.grid(2, first=1)),), "numpy"),
        LeafLayout("m.none", "F16", (0, 4), (MeshPlacement(Mesh.grid(3)),), "numpy"),
    ]
    state = random_state(leaves, 5)
    first = {
        "m": {"$odict": [["w", {"$leaf": "m.w"}], ["none", {"$leaf": "m.none"}]]},
        "opt": {"state": {"w": 1}, "param_groups": [{"lr": 0.5, "params": ["w"], "decay": 0}]},
        "own": {"$per_rank": "own"},
    }
    second = {
        "m": {"$odict": [["b", {"$leaf": "m.b"}], ["tied", {"$leaf": "m.tied"}]]},
        "opt": {"state": {"b": 2}, "param_groups": [LATER_GROUP, {"params": []}]},
        "own": {"$per_rank": "own"},
        "late": [1],
    }
    own = {
        0: Own(
            local={"own": {"x": {"$leaf": "@0.own.x"}}},
            arrays={"@0.own.x": np.arange(3)},
            aliases={"m.tied": "m.w", "m.b": "m.w"},  # where it is a leaf, that counts
        ),
        1: Own(tree=second, aliases={"m.tied": "m.none"}),  # the first one counts (no save writes either)
        2: Own(local={"own": 7}),
    }
    far = tmp_path / "far"
    far.mkdir()
    plan = WritePlan(leaves, Topology.regular(3), block_nbytes=16)
    write_several(tmp_path / "c", plan, state, tree=first, own=own, volumes=[far])
    root, arrays = reader.read_checkpoint(tmp_path / "c")
    assert all(same(arrays[name], array) for name, array in state.items())
    assert arrays["@0.own.x"].tolist() == [0, 1, 2]
    assert arrays["m.tied"] is arrays["m.w"]
    with open_newest(tmp_path / "c") as opened:
        tree = localized(opened._parts.tree, opened._parts.local(0))
        assert json.dumps(root["tree"]) == json.dumps(tree), "keys in this order"
        assert opened.aliases == {"m.tied": "m.w"}
        assert reader.read_checkpoint(tmp_path / "c", 2)[0]["tree"] == localized(
            opened._parts.tree, opened._parts.local(2)
        )
    assert reader.read_checkpoint(tmp_path / "c", 5)[0]["tree"]["own"] is None
