"""Union and split: exact for all rules, shapes and degrees, with real arrays in real files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep import CorruptCheckpoint
from everystep.errors import SpecError
from everystep.format.geometry import Box
from everystep.universal import (
    Rule,
    flat,
    fused,
    pad,
    part,
    partial,
    replicated,
    rule,
    shard,
    unique,
)
from everystep.universal.cuts import chunked, even
from everystep.universal.rules import Layout, Pad
from everystep.universal.source import SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.split import TargetLayout, split, stage_layers
from everystep.universal.union import union
from support.worlds.rank_tensors import Array, carry_out, lying_at, read_fragments, read_leaf, store


def numbers(*shape: int) -> Array:
    """Whole numbers that float32 has exactly, also when up to 16 of them are added."""
    return np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.float32).reshape(shape)


def spread(folder: Path, whole: Array, found: Rule, target: TargetLayout) -> list[list[SourceLeaf]]:
    """The files of all ranks."""
    ranks: list[list[SourceLeaf]] = []
    for rank, plan in enumerate(split("p", whole.shape, found, target)):
        held = (
            [] if plan is None else [store(folder / f"{target.tp}-{rank}", carry_out(plan, whole), rank * 3)]
        )
        ranks.append(held)
    return ranks


def joined(folder: Path, found: Rule, *locals_: Array, shape: tuple[int, ...] | None = None) -> SourceLeaf:
    ranks = [[store(folder / str(rank), local)] for rank, local in enumerate(locals_)]
    return union("p", found, ranks, shape=shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Rule, int, int]:
    """A shape, a rule that fits it, and two degrees of tensor parallelism."""
    first, second = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.sampled_from([1, 2, 4, 5, 8]))
    kind = draw(
        st.sampled_from(["unique", "replicated", "mean", "sum", "shard", "fused", "count", "shares", "flat"])
    )
    shape = list(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    fewer = st.sampled_from([None, None, 1])
    layout: Layout
    if kind == "fused":
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        shape[dim] = sum(sizes)
        layout = fused(dim, [part(size, draw(fewer)) for size in sizes])
    elif kind == "count":
        count = draw(st.integers(1, 4))
        shape[dim] = count * draw(st.integers(1, 7))
        layout = fused(dim, count)
    elif kind == "shares":
        shares = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        shape[dim] = sum(shares) * draw(st.integers(1, 5))
        layout = fused(dim, shares=[part(share, draw(fewer)) for share in shares])
    else:
        first = first if kind != "mean" else draw(st.sampled_from([1, 2, 4, 8]))
        layout = {
            "unique": unique(),
            "replicated": replicated(),
            "mean": partial("mean"),
            "sum": partial("sum"),
            "shard": shard(dim, draw(fewer)),
            "flat": flat(),
        }[kind]
    pads: list[Pad] = []
    if kind != "flat":
        free = [
            axis
            for axis in range(len(shape))
            if kind in ("shard", "replicated", "unique", "sum") or axis != dim
        ]
        pads = [pad(axis, shape[axis]) for axis in draw(st.sets(st.sampled_from(free)))] if free else []
    return tuple(shape), rule("*", layout, *pads), first, second


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 5))
def test_split_union_split_is_exact(case: tuple[tuple[int, ...], Rule, int, int], divisible_by: int) -> None:
    shape, found, first, second = case
    whole = numbers(*shape)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = shape if str(found.layout) == "flat" else None
        leaf = union(
            "p", found, spread(folder, whole, found, TargetLayout(first, 1, divisible_by)), shape=known
        )
        np.testing.assert_array_equal(read_leaf(leaf), whole)
        kept = {file.name: file.read_bytes() for file in folder.iterdir()}
        other = folder / "other"
        other.mkdir()
        again = union("p", found, spread(other, read_leaf(leaf), found, TargetLayout(second)), shape=known)
        if again.reduce != "mean" or second & (second - 1) == 0:
            np.testing.assert_array_equal(read_leaf(again), whole)
        third = folder / "third"
        third.mkdir()
        spread(third, read_leaf(leaf), found, TargetLayout(first, 1, divisible_by))
        for file in third.iterdir():
            assert file.read_bytes() == kept[file.name]


@pytest.mark.parametrize("cut", [even, chunked])
@pytest.mark.parametrize(("size", "pieces"), [(10, 4), (3, 5), (8, 4), (0, 2), (9, 4)])
def test_cuts_add_up(cut: object, size: int, pieces: int) -> None:
    lengths = cut(size, pieces)  # type: ignore[operator]
    assert (len(lengths), sum(lengths)) == (pieces, size)


def test_qkv_of_grouped_query_attention_joins_part_by_part(tmp_path: Path) -> None:
    """8 query heads and 2 key and value heads of width 4, on 2 tensor-parallel ranks."""
    query, key, value = numbers(32, 5), numbers(8, 5) + 1000, numbers(8, 5) + 2000
    locals_ = [
        np.concatenate([np.split(array, 2)[rank] for array in (query, key, value)]) for rank in range(2)
    ]
    whole = np.concatenate([query, key, value])
    for layout in (fused(0, [32, 8, 8]), fused(0, shares=[4, 1, 1]), fused(0, shares=[8, 2, 2])):
        leaf = joined(tmp_path, rule("*", layout), *locals_)
        np.testing.assert_array_equal(read_leaf(leaf), whole)
        assert len(leaf.fragments) == 6


def test_key_heads_that_several_ranks_share_are_taken_once_and_compared(tmp_path: Path) -> None:
    """1 key head on 4 ranks: every rank has it."""
    query, key = numbers(8, 3), numbers(2, 3) + 100
    locals_ = [np.concatenate([query[rank * 2 : rank * 2 + 2], key]) for rank in range(4)]
    leaf = joined(tmp_path, rule("*", fused(0, [8, part(2, pieces=1)])), *locals_)
    np.testing.assert_array_equal(read_leaf(leaf), np.concatenate([query, key]))
    assert len(leaf.copies) == 3
    locals_[2][-1, -1] += 1
    differs = joined(tmp_path, rule("*", fused(0, [8, part(2, pieces=1)])), *locals_)
    with pytest.raises(AssertionError):
        read_leaf(differs)


def test_gate_and_up_with_uneven_widths(tmp_path: Path) -> None:
    gate, up = numbers(7, 2), numbers(7, 2) + 50
    cut = [slice(0, 3), slice(3, 5), slice(5, 7)]
    locals_ = [np.concatenate([gate[where], up[where]]) for where in cut]
    np.testing.assert_array_equal(
        read_leaf(joined(tmp_path, rule("*", fused(0, 2)), *locals_)), np.concatenate([gate, up])
    )


def test_parts_that_torch_chunk_has_cut(tmp_path: Path) -> None:
    first, second = numbers(9), numbers(5) + 50  # 3, 3, 3 and 2, 2, 1; of 7: 3, 3, 1
    third = numbers(7) + 90
    bounds = [[0, 3, 6, 9], [0, 2, 4, 5], [0, 3, 6, 7]]
    locals_ = [
        np.concatenate([a[b[r] : b[r + 1]] for a, b in zip((first, second, third), bounds, strict=True)])
        for r in range(3)
    ]
    np.testing.assert_array_equal(
        read_leaf(joined(tmp_path, rule("*", fused(0, [9, 5, 7])), *locals_)),
        np.concatenate([first, second, third]),
    )


def test_experts_that_are_fused_in_one_tensor(tmp_path: Path) -> None:
    """Three experts with gate and up, stacked along rows; each rank has its rows of each."""
    experts = numbers(3 * 2 * 4, 5)
    blocks = np.split(experts, 6)
    locals_ = [np.concatenate([np.split(block, 2)[rank] for block in blocks]) for rank in range(2)]
    np.testing.assert_array_equal(read_leaf(joined(tmp_path, rule("*", fused(0, 6)), *locals_)), experts)
    stacked = numbers(3, 8, 5)
    halves = [
        np.concatenate([stacked[:, r * 2 : r * 2 + 2], stacked[:, 4 + r * 2 : 6 + r * 2]], axis=1)
        for r in (0, 1)
    ]
    np.testing.assert_array_equal(read_leaf(joined(tmp_path, rule("*", fused(1, 2)), *halves)), stacked)


def test_ranks_with_different_numbers_of_heads(tmp_path: Path) -> None:
    """6 head groups on 2 ranks as 4 and 2, so that each rank has its parts in the proportion of the whole."""
    query, key = numbers(12, 2), numbers(6, 2) + 100
    locals_ = [np.concatenate([query[:8], key[:4]]), np.concatenate([query[8:], key[4:]])]
    np.testing.assert_array_equal(
        read_leaf(joined(tmp_path, rule("*", fused(0, [12, 6])), *locals_)), np.concatenate([query, key])
    )


def test_padding_is_stripped_and_added_for_the_target(tmp_path: Path) -> None:
    words = numbers(50, 4)
    found = rule("*", shard(0), pad(0, 50))
    plans = split("p", (50, 4), found, TargetLayout(tp=4, divisible_by=8))
    assert [plan.shape for plan in plans if plan is not None] == [(16, 4)] * 4
    assert plans[3] is not None
    assert [box.shape for box in plans[3].zeros] == [(14, 4)]
    assert (carry_out(plans[3], words)[2:] == 0).all()
    leaf = union("p", found, spread(tmp_path, words, found, TargetLayout(tp=4, divisible_by=8)))
    assert leaf.shape == (50, 4)
    np.testing.assert_array_equal(read_leaf(leaf), words)


def test_padding_inside_rows_cuts_a_fragment_into_several(tmp_path: Path) -> None:
    padded = np.zeros((3, 8), dtype=np.float32)
    padded[:, :5] = numbers(3, 5)
    leaf = joined(tmp_path, rule("*", pad(1, 5)), padded)
    assert (leaf.shape, len(leaf.fragments)) == ((3, 5), 3)
    np.testing.assert_array_equal(read_leaf(leaf), numbers(3, 5))


def test_copies_of_other_ranks_are_copies_of_the_leaf(tmp_path: Path) -> None:
    whole = numbers(6, 2)
    halves = np.split(whole, 2)
    ranks = [[store(tmp_path / f"{rank}{copy}", halves[rank]) for copy in range(3)] for rank in range(2)]
    leaf = union("p", rule("*", shard(0)), ranks)
    assert len(leaf.copies) == 2
    np.testing.assert_array_equal(read_leaf(leaf), whole)
    replicas = union("p", rule("*", replicated()), [ranks[0], ranks[0]])
    assert (replicas.shape, len(replicas.copies)) == ((3, 2), 5)


def test_partial_is_a_mean_or_a_sum_of_all(tmp_path: Path) -> None:
    one, other = numbers(2, 2), numbers(2, 2) * 3
    leaf = joined(tmp_path, rule("*", partial("mean")), one, other)
    assert (leaf.reduce, len(leaf.terms), leaf.copies) == ("mean", 1, ())
    np.testing.assert_array_equal(read_leaf(leaf), numbers(2, 2) * 2)
    np.testing.assert_array_equal(
        read_leaf(joined(tmp_path, rule("*", partial("sum")), one, other)), numbers(2, 2) * 4
    )
    alone = joined(tmp_path, rule("*", partial("mean")), one)
    assert alone.reduce == ""


def test_a_tensor_of_a_rank_may_lie_in_several_files(tmp_path: Path) -> None:
    """Tensor parallel and ZeRO: each rank's slice is cut again, across rows."""
    whole = numbers(6, 5)
    ranks: list[list[SourceLeaf]] = []
    for rank, half in enumerate(np.split(whole, 2)):
        fragments: list[SourceFragment] = []
        for number, (start, stop) in enumerate([(0, 4), (4, 4), (4, 13), (13, 15)]):
            path = tmp_path / f"{rank}{number}"
            path.write_bytes(b"pad." * number + half.reshape(-1)[start:stop].tobytes())
            fragments += flat_fragments(str(path), 4 * number, start, stop, half.shape, 4)
        ranks.append([SourceLeaf("held", "F32", half.shape, tuple(fragments))])
    for found, expected in ((shard(0), whole), (shard(1), np.concatenate(np.split(whole, 2), axis=1))):
        np.testing.assert_array_equal(read_leaf(union("p", rule("*", found), ranks)), expected)
    interleaved = union("p", rule("*", fused(1, [4, 6])), ranks)
    left, right = np.split(whole, 2)
    expected = np.concatenate([left[:, :2], right[:, :2], left[:, 2:], right[:, 2:]], axis=1)
    np.testing.assert_array_equal(read_leaf(interleaved), expected)


def test_flat_ranges_end_in_padding(tmp_path: Path) -> None:
    whole = numbers(3, 3)
    padded = np.concatenate([whole.reshape(-1), np.full(3, 99, dtype=np.float32)])
    leaf = joined(tmp_path, rule("*", flat()), *np.split(padded, 4), shape=(3, 3))
    np.testing.assert_array_equal(read_leaf(leaf), whole)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    scalar = joined(
        tmp_path, rule("*", replicated()), np.array(7, dtype=np.float32), np.array(7, dtype=np.float32)
    )
    assert scalar.shape == ()
    assert read_leaf(scalar) == 7
    empty = joined(tmp_path, rule("*", shard(0)), numbers(0, 3), numbers(0, 3))
    assert (empty.shape, empty.fragments) == ((0, 3), ())


@pytest.mark.parametrize(
    ("found", "shapes", "reason"),
    [
        (rule("*", unique()), [(2,), (2,)], "2 ranks hold it"),
        (rule("*", unique()), [None, None], "no rank holds it"),
        (rule("*", replicated()), [(2,), (3,)], "shapes differ"),
        (rule("*", shard(1)), [(2,), (2,)], "no dimension 1"),
        (rule("*", shard(0)), [(2, 3), (2, 4)], "differ beyond dimension 0"),
        (rule("*", shard(0)), [(2,), None], "some ranks do not hold it"),
        (rule("*", shard(0, pieces=3)), [(2,), (2,)], "3 pieces cannot be shared evenly by 2 ranks"),
        (rule("*", shard(0, pieces=1)), [(2,), (3,)], "hold different lengths"),
        (rule("*", fused(0, [4, 2])), [(4,), (4,)], "hold 8 in all, but by the parts they would hold 6"),
        (rule("*", fused(0, 3)), [(4,), (4,)], "hold 8 in all, which is not a multiple of 3"),
        (rule("*", fused(0, [4, 2])), [(5,), (1,)], "cannot be cut in the proportion"),
        (rule("*", shard(0), pad(0, 9)), [(4,), (4,)], "length 8, less than 9"),
        (rule("*", shard(0), pad(1, 9)), [(4,), (4,)], "no dimension 1 to take padding from"),
        (rule("*", flat()), [(4,), (4,)], "shape of a flat parameter must be known"),
    ],
)
def test_a_rule_that_does_not_fit_names_parameter_rule_and_shapes(
    found: Rule, shapes: list[tuple[int, ...] | None], reason: str
) -> None:
    ranks = [[] if shape is None else [lying_at("f", 0, shape)] for shape in shapes]
    with pytest.raises(SpecError, match=reason) as caught:
        union("h.0.w", found, ranks)
    message = str(caught.value)
    assert "parameter 'h.0.w'" in message
    assert str(found) in message
    assert all(("nothing" if shape is None else str(list(shape))) in message for shape in shapes)
    assert caught.value.names == ("h.0.w",)


@pytest.mark.parametrize(
    ("found", "shape", "reason"),
    [
        (rule("*", shard(1)), (4,), "no dimension 1"),
        (rule("*", fused(0, [4, 2])), (7,), "add up to 6, but the length is 7"),
        (rule("*", fused(0, 2)), (7,), "length 7 is not a multiple"),
        (rule("*", fused(0, 2), pad(0, 8)), (8,), "its parts would move"),
        (rule("*", shard(0), pad(0, 6)), (7,), "length 7, not 6"),
        (rule("*", shard(0), pad(3, 6)), (7,), "no dimension 3 to pad"),
        (rule("*", shard(0, pieces=2)), (7,), "2 pieces cannot be shared evenly by 3 ranks"),
    ],
)
def test_a_split_that_does_not_fit_names_them_too(found: Rule, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        split("h.0.w", shape, found, TargetLayout(tp=3))
    assert "parameter 'h.0.w'" in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_elements_that_no_file_holds_are_damage() -> None:
    fragments = (SourceFragment("f", 0, Box((0,), (3,))), SourceFragment("g", 0, Box((4,), (2,))))
    for held in (fragments, fragments[:1], ()):
        with pytest.raises(CorruptCheckpoint, match="'p'"):
            union("p", rule("*"), [[SourceLeaf("held", "F32", (6,), held)]])


def test_ranks_whose_types_differ_are_damage() -> None:
    ranks = [[lying_at("f", 0, (2,))], [replace(lying_at("g", 0, (2,)), dtype="F16")]]
    with pytest.raises(CorruptCheckpoint, match="its type differs between ranks: F32 in f, F16 in g"):
        union("p", rule("*", shard(0)), ranks)


def test_the_true_shape_is_checked_where_it_is_known(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"union has shape \[4\], but the parameter has \[5\]"):
        joined(tmp_path, rule("*", shard(0)), numbers(2), numbers(2), shape=(5,))
    with pytest.raises(SpecError, match="hold 4 elements, but the parameter has 5"):
        joined(tmp_path, rule("*", flat()), numbers(2), numbers(2), shape=(5,))


def test_layers_go_to_stages_in_order() -> None:
    assert stage_layers(7, 3) == (range(0, 3), range(3, 5), range(5, 7))
    assert stage_layers(1, 2) == (range(0, 1), range(1, 1))
    with pytest.raises(SpecError, match="tp must be at least 1"):
        TargetLayout(tp=0)


def test_the_check_of_these_tests_sees_what_is_missing(tmp_path: Path) -> None:
    leaf = joined(tmp_path, rule("*", shard(0)), numbers(2), numbers(2))
    with pytest.raises(AssertionError, match="missing"):
        read_fragments(leaf, leaf.fragments[:1])
