"""Samples of leaves: exact for small ones, bounded for large ones, sane for odd numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.view.budget import Budget
from everystep.view.contents import contents, samples_of
from everystep.view.leaf_changes import ChangedLeaf, leaf_changes
from everystep.view.leaf_samples import BINS, LEVELS, SAMPLE_NBYTES, LeafSample, look_at, sampled_ranges


def sampled(path: Path, name: str, **limits: float) -> LeafSample | None:
    budget = Budget(**{"seconds": 60.0, **limits})  # type: ignore[arg-type]
    found = contents(path, budget=budget).leaves
    return found.sample[found.name.index(name)]


def test_a_small_leaf_is_looked_at_as_a_whole(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.arange(-50, 51, dtype=np.float32), "text": np.array(["a", "b"])})
    found = sampled(tmp_path / "c", "w")
    assert found is not None
    assert (found.elements, found.whole, found.zeros, found.not_finite) == (101, True, 1, 0)
    assert (found.low, found.high, found.mean) == (-50.0, 50.0, 0.0)
    assert found.deviation == pytest.approx(np.arange(-50, 51).std(), rel=1e-5)
    assert len(found.bars) == BINS
    assert sampled(tmp_path / "c", "text") is None


def test_of_a_large_leaf_four_stretches_are_read(tmp_path: Path) -> None:
    large = np.zeros(3_000_000, np.float32)
    large[-1], large[0] = 7.0, -3.0
    everystep.save(tmp_path / "c", {"w": large})
    found = sampled(tmp_path / "c", "w")
    assert found is not None
    assert found.elements * 4 <= SAMPLE_NBYTES
    assert (found.whole, found.low, found.high) == (False, -3.0, 7.0)


@pytest.mark.parametrize(
    ("nbytes", "size"), [(SAMPLE_NBYTES + 4, 4), (10**9, 2), (10**9 + 8, 16), (3 << 20, 1 << 20)]
)
def test_stretches_are_whole_elements_inside_of_the_leaf(nbytes: int, size: int) -> None:
    spans = sampled_ranges(nbytes - nbytes % size, size, 3)
    for span in spans:
        assert span.index == 3
        assert span.start % size == span.stop % size == 0
        assert 0 <= span.start < span.stop <= nbytes
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    assert all(before.stop <= after.start for before, after in pairwise(spans))


def test_the_budget_ends_the_reading(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a": np.ones(100), "b": np.ones(100), "c": np.ones(100)})
    few = contents(tmp_path / "c", budget=Budget(nbytes=1700))
    assert (few.sampled, few.read_nbytes) == (2, 1600)
    assert contents(tmp_path / "c", budget=Budget(seconds=0)).sampled == 0
    assert samples_of(tmp_path / "c", [0, 2, 99, -1], budget=Budget()).keys() == {0, 2}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([np.nan, np.inf, -np.inf], (0, 3, None, None)),
        ([np.nan, 1.0, -np.inf, 2.0], (0, 2, 1.0, 2.0)),
        ([0.0, -0.0, 5.0], (2, 0, 0.0, 5.0)),
        ([4.0] * 300, (0, 0, 4.0, 4.0)),
        ([1.5e308, -1.5e308], (0, 0, -1.5e308, 1.5e308)),
        ([], (0, 0, None, None)),
    ],
)
def test_odd_numbers_are_counted_and_do_not_disturb(
    numbers: list[float], expected: tuple[int, int, float | None, float | None]
) -> None:
    found = look_at(np.array(numbers), True)
    assert (found.zeros, found.not_finite, found.low, found.high) == expected
    assert set(found.bars) <= set(LEVELS)


def test_a_few_outliers_do_not_flatten_the_histogram() -> None:
    numbers = np.random.default_rng(0).normal(size=10_000)
    numbers[:3] = 1e9
    found = look_at(numbers, True)
    assert found.last is not None
    assert found.last < 4
    assert found.high == 1e9
    assert sum(letter != "0" for letter in found.bars) == BINS


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64", ">f4"])
def test_elements_of_every_type_are_numbers(dtype: str) -> None:
    found = look_at(np.array([0, 1, 1]).astype(dtype), True)
    assert (found.low, found.high, found.zeros) == (0.0, 1.0, 1)


def test_changes_are_exact_by_checksum_and_measured_in_samples(tmp_path: Path) -> None:
    state = {"same": np.ones(4), "w": np.full(100, 2.0), "gone": np.ones(1), "kind": np.ones(2), "lr": 0.1}
    everystep.save(tmp_path / "a", state, step=1)
    state.update(w=np.full(100, 2.02), kind=np.ones(3), new=np.ones(2), lr=0.2)
    del state["gone"]
    everystep.save(tmp_path / "b", state, step=2)
    found = leaf_changes(tmp_path / "a", tmp_path / "b")
    by_name: dict[str, ChangedLeaf] = {leaf.name: leaf for leaf in found.leaves}
    changes = {name: leaf.change for name, leaf in by_name.items()}
    assert changes == {"same": "same", "w": "changed", "kind": "kind", "new": "only_b", "gone": "only_a"}
    w = by_name["w"]
    assert (w.elements, w.differing, w.whole, w.square) == (100, 100, True, 4.0)
    assert w.square_change == pytest.approx(0.0004)
    assert w.max_abs == pytest.approx(0.02)
    assert [(value.name, value.a, value.b) for value in found.values] == [("lr", "0.1", "0.2")]
    assert (found.a_step, found.b_step) == (1, 2)
    # Without time nothing is read, and what is known by checksums stays known.
    unread = leaf_changes(tmp_path / "a", tmp_path / "b", budget=Budget(seconds=0))
    assert {leaf.name: leaf.change for leaf in unread.leaves} == {**changes, "w": "unread"}


def test_a_change_outside_of_the_sample_is_not_called_unchanged(tmp_path: Path) -> None:
    large = np.ones(3_000_000, np.float32)
    everystep.save(tmp_path / "a", {"w": large})
    large[500_000] = 2.0
    everystep.save(tmp_path / "b", {"w": large})
    (leaf,) = leaf_changes(tmp_path / "a", tmp_path / "b").leaves
    assert leaf.change == "alike"
