"""A state has the size that was asked for, the shapes its name promises, and always the same bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep_study.mechanisms import states

MIB = 1 << 20


def total(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * math.prod(dims) for dims in shapes.values())


@given(nbytes=st.integers(2 * MIB, 64 << 30))
def test_gpt2_has_the_size_asked_for_to_within_an_embedding_row(nbytes: int) -> None:
    fitted = states.fit_gpt2(nbytes)
    row = 12 * fitted.width
    steps = 4 * len(list(fitted.shapes()))
    assert -row - steps <= nbytes - total(states.shapes_of("gpt2", nbytes)) <= row + 12


@given(nbytes=st.integers(64, 64 << 30))
def test_few_large_has_the_size_asked_for_in_eight_tensors(nbytes: int) -> None:
    shapes = states.shapes_of("few-large", nbytes)
    assert len(shapes) == 8
    assert 0 <= nbytes - total(shapes) < 4


@given(nbytes=st.integers(4096, 1 << 27))
def test_many_small_has_the_size_asked_for_in_tensors_of_4_kib(nbytes: int) -> None:
    shapes = states.shapes_of("many-small", nbytes)
    assert 0 <= nbytes - total(shapes) < 4096
    assert set(shapes.values()) == {(1024,)}


def test_default_sizes_are_one_gib_and_twenty_thousand_small_tensors() -> None:
    assert total(states.shapes_of("gpt2")) == pytest.approx(1 << 30, rel=1e-3)
    assert total(states.shapes_of("few-large")) == 1 << 30
    assert len(states.shapes_of("many-small")) == 20_000


def test_gpt2_at_the_size_of_gpt2_small_is_gpt2_small() -> None:
    published_parameters = 124_439_808
    assert states.fit_gpt2(published_parameters * 12) == states.Gpt2(width=768, layers=12, vocabulary=50_257)
    assert states.Gpt2(768, 12, 50_257).parameters == published_parameters


def test_every_gpt2_weight_has_both_adam_moments_and_a_step() -> None:
    shapes = states.shapes_of("gpt2", 4 * MIB)
    weights = {
        name.removeprefix("model."): dims for name, dims in shapes.items() if name.startswith("model.")
    }
    assert len(shapes) == 4 * len(weights)
    for name, dims in weights.items():
        assert shapes[f"optimizer.{name}.exp_avg"] == dims
        assert shapes[f"optimizer.{name}.exp_avg_sq"] == dims
        assert shapes[f"optimizer.{name}.step"] == ()


def test_a_gpt2_that_cannot_be_that_small_says_what_to_ask_for() -> None:
    with pytest.raises(ValueError, match="2 MiB or more"):
        states.fit_gpt2(MIB)


def test_same_seed_same_bytes_other_seed_other_bytes() -> None:
    first, again, other = (states.build("few-large", 64 * 1024, seed=seed) for seed in (1, 1, 2))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])
        assert not np.array_equal(array, other.arrays[name])


def test_tensors_and_arrays_are_the_same_memory(tiny: states.State) -> None:
    assert tiny.tensors is not None
    assert tiny.tree() == dict(tiny.tensors)
    assert tiny.tensors.keys() == tiny.arrays.keys()
    for name, tensor in tiny.tensors.items():
        assert tensor.data_ptr() == tiny.arrays[name].ctypes.data


def test_second_moments_are_not_negative(tiny: states.State) -> None:
    moments = [array for name, array in tiny.arrays.items() if name.endswith(".exp_avg_sq")]
    assert moments
    assert all((moment >= 0).all() for moment in moments)
