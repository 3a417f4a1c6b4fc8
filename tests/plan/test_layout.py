"""Where leaves go in a shard: every byte has one place, and large leaves can go there without a copy."""

from __future__ import annotations

import gc
import math
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from everystep import engine
from everystep.engine import ALIGNMENT, Memory, Produced, Strided, Tuning
from everystep.format.dtypes import carrier, itemsize
from everystep.format.shard import HeaderEntry, is_pad, parse_header
from everystep.plan import ShardPlan, arrange, plan_shard
from everystep.plan.layout import LARGE_NBYTES
from everystep.state import LeafSource

DTYPES = [
    "BOOL",
    "U8",
    "I16",
    "F16",
    "BF16",
    "F32",
    "I64",
    "F64",
    "C64",
    "C128",
    "F8_E4M3",
    "NP:<U5",
    "NP:|S3",
]


@st.composite
def leaf_lists(draw: st.DrawFn) -> list[LeafSource]:
    """Leaves with made-up addresses: laying them out must not look at their bytes."""
    leaves = []
    for number in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(
            st.lists(st.integers(0, 40), max_size=3)
            | st.tuples(st.integers(LARGE_NBYTES // 32, LARGE_NBYTES))
            | st.tuples(st.integers(1, 1 << 33))
        )
        nbytes = itemsize(dtype) * math.prod(shape)
        address = draw(st.integers(1, 1 << 40))
        source = draw(
            st.sampled_from(
                [
                    Memory(address, nbytes, None),
                    Strided(address, itemsize(dtype), tuple(shape), (7,) * len(shape), None),
                    Produced(nbytes, lambda window, offset: None),
                ]
            )
        )
        framework = draw(st.sampled_from(["torch", "numpy"]))
        leaves.append(LeafSource(f"leaf.{number}", dtype, tuple(shape), framework, source))
    return leaves


def entries_of(plan: ShardPlan) -> tuple[HeaderEntry, ...]:
    return parse_header(plan.header, plan.nbytes, "the plan").entries


@given(leaves=leaf_lists())
def test_every_byte_of_a_shard_has_exactly_one_place(leaves: list[LeafSource]) -> None:
    plan = plan_shard([leaves])
    assert sorted(leaf.name for leaf in plan.leaves) == sorted(leaf.name for leaf in leaves)
    assert plan.nbytes % ALIGNMENT == 0
    assert len(plan.header) % ALIGNMENT == 0
    at = 0
    for entry in entries_of(plan):  # parsing has checked that sizes follow from shapes
        assert entry.begin == at
        at = entry.end
    assert len(plan.header) + at == plan.nbytes
    # What the engine is told is what the header says.
    pieces = plan.pieces()
    ends = [len(plan.header), *(piece.offset + piece.source.nbytes for piece in pieces)]
    assert all(end <= piece.offset for end, piece in zip(ends, pieces, strict=False))
    assert ends[-1] <= plan.nbytes


@given(leaves=leaf_lists())
def test_the_header_describes_every_leaf_where_it_is_written(leaves: list[LeafSource]) -> None:
    plan = plan_shard([leaves])
    found = {entry.name: entry for entry in entries_of(plan) if not is_pad(entry.name)}
    assert set(found) == {leaf.name for leaf in leaves}
    for leaf, offset in zip(plan.leaves, plan.offsets, strict=True):
        entry = found[leaf.name]
        assert entry.begin + len(plan.header) == offset
        assert entry.end - entry.begin == leaf.nbytes
        assert entry.dtype == carrier(leaf.dtype).name
        assert entry.shape == (*leaf.shape, *carrier(leaf.dtype).tail)


@given(leaves=leaf_lists())
def test_large_leaves_lie_where_they_can_be_written_without_a_copy(leaves: list[LeafSource]) -> None:
    plan = plan_shard([leaves])
    for leaf, offset in zip(plan.leaves, plan.offsets, strict=True):
        if leaf.nbytes < LARGE_NBYTES:
            continue
        if isinstance(leaf.source, Memory):
            assert (offset - leaf.source.address) % ALIGNMENT == 0
        else:
            assert offset % 64 == 0  # nothing to gain from an address; a reader's cache lines


@given(leaves=leaf_lists())
def test_small_leaves_lie_packed_and_aligned_to_their_elements(leaves: list[LeafSource]) -> None:
    plan = plan_shard([leaves])
    end = len(plan.header)
    for leaf, offset in zip(plan.leaves, plan.offsets, strict=True):
        if leaf.nbytes >= LARGE_NBYTES:
            break  # these come after all small ones
        assert offset == end
        size = itemsize(leaf.dtype)
        assert offset % (size & -size) == 0
        end = offset + leaf.nbytes


@given(leaves=leaf_lists())
def test_padding_is_less_than_a_block_per_large_leaf(leaves: list[LeafSource]) -> None:
    plan = plan_shard([leaves])
    pads = [entry for entry in entries_of(plan) if is_pad(entry.name)]
    assert all(0 < entry.end - entry.begin < ALIGNMENT for entry in pads)
    assert len(pads) <= sum(leaf.nbytes >= LARGE_NBYTES for leaf in leaves) + 1


def fake(name: str, nbytes: int, address: int) -> LeafSource:
    return LeafSource(name, "U8", (nbytes,), "numpy", Memory(address, nbytes, None))


def test_leaves_of_several_gigabytes_are_laid_out_without_touching_them() -> None:
    gigabyte = 1 << 30
    leaves = [
        fake("a", 5 * gigabyte + 3, 0x7000_0123),
        fake("b", 7 * gigabyte, 0x9_0000_0456),
        fake("c", 10, 64),
    ]
    plan = plan_shard([leaves])
    offsets = dict(zip((leaf.name for leaf in plan.leaves), plan.offsets, strict=True))
    assert offsets["a"] % ALIGNMENT == 0x123
    assert offsets["b"] % ALIGNMENT == 0x456
    assert offsets["b"] - (offsets["a"] + leaves[0].nbytes) < ALIGNMENT
    assert 12 * gigabyte < plan.nbytes < 12 * gigabyte + 5 * ALIGNMENT
    entries = {entry.name: entry for entry in entries_of(plan)}
    assert entries["b"].end - entries["b"].begin == 7 * gigabyte
    # A reader of the header alone sees it the same way.
    tail = max(entry.end for entry in entries.values())
    assert len(plan.header) + tail == plan.nbytes


def test_the_largest_leaf_a_machine_could_address() -> None:
    plan = plan_shard([[fake("huge", 1 << 46, 0x1000)]])
    assert plan.offsets[0] % ALIGNMENT == 0
    assert parse_header(plan.header, plan.nbytes, "the plan").entries[0].end == 1 << 46


@pytest.mark.parametrize("name", ["__metadata__", "__pad__.0", "leaf:x", "frag:1:x", "plain", "", "ünï☃"])
def test_names_that_mean_something_to_safetensors_do_not_collide(name: str) -> None:
    large = fake("other", LARGE_NBYTES, 5)
    plan = plan_shard([[LeafSource(name, "U8", (3,), "numpy", Memory(64, 3, None)), large]])
    entries = entries_of(plan)
    assert len({entry.name for entry in entries}) == len(entries) == 4  # two leaves, two pads


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 300) | st.integers(LARGE_NBYTES // 4, LARGE_NBYTES // 2), max_size=6),
    kind=st.sampled_from([np.uint8, np.float32, np.int64]),
)
def test_safetensors_opens_what_is_written(sizes: list[int], kind: type) -> None:
    arrays = [np.random.default_rng(n).integers(0, 100, size).astype(kind) for n, size in enumerate(sizes)]
    names = {np.uint8: "U8", np.float32: "F32", np.int64: "I64"}
    leaves = [
        LeafSource(f"x{n}", names[kind], array.shape, "numpy", Memory(array.ctypes.data, array.nbytes, array))
        for n, array in enumerate(arrays)
    ]
    plan = plan_shard([leaves])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.safetensors")
        engine.write(path, plan.nbytes, plan.pieces(), tuning=Tuning("buffered"), header=plan.header).wait()
        with safe_open(path, "np") as opened:
            assert opened.metadata() == {"format": "np"}
            for n, array in enumerate(arrays):
                assert np.array_equal(opened.get_tensor(f"x{n}"), array)


# --- what is arranged again and again -----------------------------------------------------------------------


def some_leaves(prefix: str = "") -> list[LeafSource]:
    arrays = {"b": np.zeros(7, np.uint8), "w": np.ones((3, 5)), "h": np.ones(9, np.float16)}
    return [
        LeafSource(prefix + name, dtype, array.shape, "numpy", Memory(array.ctypes.data, array.nbytes, array))
        for (name, array), dtype in zip(arrays.items(), ("U8", "F64", "F16"), strict=True)
    ]


def test_the_same_leaves_again_get_the_same_places_and_their_own_memory() -> None:
    first, second = some_leaves(), some_leaves()
    once, again = arrange([first]), arrange([second])
    assert (again.table, again.begins, again.nbytes) == (once.table, once.begins, once.nbytes)
    assert [leaf.name for leaf in again.leaves] == [leaf.name for leaf in once.leaves] == ["w", "h", "b"]
    assert all(any(leaf is own for own in second) for leaf in again.leaves)


def test_what_is_remembered_of_an_arrangement_keeps_no_array_alive() -> None:
    leaves = some_leaves("kept.")
    array = weakref.ref(leaves[1].source.owner)
    arrange([leaves])
    del leaves
    gc.collect()
    assert array() is None


def test_other_groups_names_types_or_shapes_are_other_arrangements() -> None:
    leaves = some_leaves()
    together, apart = arrange([leaves]), arrange([leaves[:1], leaves[1:]])
    assert [leaf.name for leaf in apart.leaves] == ["b", "w", "h"]
    assert together.begins != apart.begins
    assert set(arrange([some_leaves("x.")]).table) != set(together.table)
    (other,) = (leaf for leaf in leaves if leaf.name == "w")
    reshaped = LeafSource("w", "F64", (15,), "numpy", other.source)
    assert arrange([[reshaped]]).table["w"].shape == (15,)
    assert arrange([[other]]).table["w"].shape == (3, 5)


def test_more_kinds_of_states_than_are_remembered_are_all_right() -> None:
    for _ in range(2):
        for number in range(40):
            layout = arrange([some_leaves(f"{number}.")])
            assert [leaf.name for leaf in layout.leaves] == [f"{number}.{name}" for name in "whb"]
