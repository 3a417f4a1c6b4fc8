"""Values of stored elements, and how far apart they are."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.inspect.element_values import Tally, values
from everystep.state.numpy_arrays import ML_DTYPES

ALL_BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("name", [name for name in ML_DTYPES if name != "BF16"])
def test_every_code_of_the_small_floats_has_its_value(name: str) -> None:
    expected = ALL_BYTES.view(getattr(ml_dtypes, ML_DTYPES[name])).astype(np.float64)
    found = values(name, ALL_BYTES)
    assert found is not None
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


def test_every_bfloat16_has_its_value() -> None:
    codes = np.arange(1 << 16, dtype="<u2")
    found = values("BF16", codes.view(np.uint8))
    assert found is not None
    with np.errstate(invalid="ignore"):
        assert np.array_equal(found, codes.view(ml_dtypes.bfloat16).astype(np.float32), equal_nan=True)


def test_two_numbers_of_four_bits_share_a_byte() -> None:
    found = values("F4_E2M1_X2", np.array([0x00, 0x21, 0xF7], np.uint8))
    assert found is not None
    assert found.tolist() == [0, 0.5 + 1j, 6 - 6j]


def test_complex_halves() -> None:
    found = values("C32", np.array([1.5, -2.0], "<f2").view(np.uint8))
    assert found is not None
    assert found.tolist() == [1.5 - 2j]


@pytest.mark.parametrize("name", ["NP:<M8[ns]", "NP:<U1", "NP:|S4", "NP:|V8"])
def test_what_is_no_number_has_no_value(name: str) -> None:
    assert values(name, np.zeros(8, np.uint8)) is None


def tally(dtype: str, a: object, b: object, code: str) -> Tally:
    made = Tally(dtype)
    made.add(np.array(a, code).view(np.uint8).reshape(-1), np.array(b, code).view(np.uint8).reshape(-1))
    return made


def test_equal_bits_do_not_differ_even_as_nan() -> None:
    found = tally("F32", [1, math.nan], [1, math.nan], "<f4")
    assert (found.elements, found.differing, found.first, found.max_abs) == (2, 0, None, None)


def test_nan_payloads_differ_and_are_not_finite() -> None:
    found = tally("F64", [1, 0x7FF8000000000001], [1, 0x7FF8000000000002], "<u8")
    assert (found.differing, found.first, found.not_finite, found.max_abs) == (1, 1, 1, None)


def test_zeros_of_different_sign_differ_by_nothing() -> None:
    found = tally("F32", [0.0], [-0.0], "<f4")
    assert (found.differing, found.max_abs, found.max_rel) == (1, 0.0, 0.0)


def test_distances_of_floats() -> None:
    found = tally("F32", [1, 2, 4, math.inf], [1, 3, -4, 1], "<f4")
    assert (found.elements, found.differing, found.first, found.not_finite) == (4, 3, 1, 1)
    assert (found.max_abs, found.max_rel) == (8.0, 2.0)


def test_distances_do_not_overflow_single_precision() -> None:
    wide = 2 * float(np.float32(3e38))
    assert tally("F32", [3e38], [-3e38], "<f4").max_abs == wide
    assert tally("C64", [3e38], [-3e38], "<c8").max_abs == wide


def test_distances_do_not_overflow_half_precision() -> None:
    assert (
        tally("F16", [60000], [-60000], "<f2").max_abs == 120000 - 120000 % 64
    )  # 60000 rounds in half precision


def test_huge_doubles_have_a_relative_distance_all_the_same() -> None:
    found = tally("F64", [1e308], [-1e308], "<f8")
    assert (found.max_abs, found.max_rel) == (math.inf, 2.0)


@pytest.mark.parametrize(
    ("name", "code", "a", "b", "apart"),
    [
        ("I64", "<i8", -(2**63), 2**63 - 1, 2**64 - 1),
        ("U64", "<u8", 0, 2**64 - 1, 2**64 - 1),
        ("I8", "|i1", -128, 127, 255),
        ("U8", "|u1", 3, 250, 247),
        ("BOOL", "|b1", False, True, 1),
        ("NP:>i4", ">i4", -5, 7, 12),
        ("C64", "<c8", 3 + 4j, 0, 5.0),
        ("C128", "<c16", 0, 3 - 4j, 5.0),
    ],
)
def test_distances_are_exact_at_the_ends_of_each_type(
    name: str, code: str, a: object, b: object, apart: float
) -> None:
    assert tally(name, [a], [b], code).max_abs == apart


def test_text_differs_without_a_distance() -> None:
    found = tally("NP:<U3", ["abc", "x"], ["abd", "x"], "<U3")
    assert (found.elements, found.differing, found.first, found.max_abs) == (2, 1, 0, None)


def test_elements_without_bytes_never_differ() -> None:
    made = Tally("NP:|S0")
    made.add(np.empty(0, np.uint8), np.empty(0, np.uint8))
    assert made.differing == 0


@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40), st.integers(1, 40)
)
def test_windows_add_up_to_the_whole(pairs: list[tuple[float, float]], cut: int) -> None:
    a, b = np.array(pairs, "<f4").T.copy()
    whole = tally("F32", a, b, "<f4")
    parts = Tally("F32")
    for start in range(0, len(a), cut):
        parts.add(a[start : start + cut].view(np.uint8), b[start : start + cut].view(np.uint8))
    assert parts == whole
    assert whole.differing == int(np.count_nonzero(a.view("<u4") != b.view("<u4")))
