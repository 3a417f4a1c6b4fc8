from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everystep.format.dtypes import SAFETENSORS_ITEMSIZE, Carrier, carrier, is_known, itemsize
from support.states.handmade_checkpoints import NAMES


@pytest.mark.parametrize("numpy_name", NAMES)
def test_named_types_have_numpys_size(numpy_name: str) -> None:
    assert itemsize(NAMES[numpy_name]) == np.dtype(numpy_name).itemsize


@pytest.mark.parametrize(
    ("name", "size", "how"),
    [
        ("F32", 4, Carrier("F32", ())),
        ("C64", 8, Carrier("C64", ())),
        ("C128", 16, Carrier("F64", (2,))),
        ("C32", 4, Carrier("F16", (2,))),
        ("F4_E2M1_X2", 1, Carrier("U8", ())),
        ("NP:<M8[ns]", 8, Carrier("U8", (8,))),
        ("NP:<m8[25us]", 8, Carrier("U8", (8,))),
        ("NP:>f4", 4, Carrier("U8", (4,))),
        ("NP:<U5", 20, Carrier("U8", (20,))),
        ("NP:|S0", 0, Carrier("U8", (0,))),
        ("NP:|V3", 3, Carrier("U8", (3,))),
        ("NP:<f16", 16, Carrier("U8", (16,))),
        ("NP:<c32", 32, Carrier("U8", (32,))),
    ],
)
def test_each_kind_of_name_is_carried_as_the_format_says(name: str, size: int, how: Carrier) -> None:
    assert is_known(name)
    assert itemsize(name) == size
    assert carrier(name) == how


_plain = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64, 128)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128, 256)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(endianness="?"),
    st.integers(0, 300).map(lambda n: np.dtype(f"V{n}")),
)


@given(_plain)
def test_every_plain_numpy_type_has_exactly_one_name_of_its_size(dtype: np.dtype) -> None:  # type: ignore[type-arg]
    own = NAMES.get(dtype.name) if dtype.isnative else None
    spelled = f"NP:{dtype.str}"
    assert is_known(spelled) != (own is not None)
    name = own or spelled
    assert itemsize(name) == dtype.itemsize
    how = carrier(name)
    assert SAFETENSORS_ITEMSIZE[how.name] * int(np.prod(how.tail, dtype=int)) == dtype.itemsize


@pytest.mark.parametrize(
    "name",
    [
        "",
        "f32",
        "F128",
        "F4",
        "NP:",
        "NP:|O",
        "NP:O",
        "NP:<f4",
        "NP:f4,f4",
        "NP:(9,)>f4",
        "NP:>f4\n",
        "NP:|T16",
        "NP:<V2",
        "NP:|S01",
        "NP:|S99999999999999999999",
        "NP:|S2147483648",
        "NP:<U2000000000",
        "NP:|S٣",
        "NP:<M8[ns",
        "NP:<M8[parsec]",
        "NP:" + "9" * 100_000,
    ],
)
def test_names_that_no_writer_makes_are_unknown(name: str) -> None:
    assert not is_known(name)
    with pytest.raises(ValueError, match="unknown element type"):
        itemsize(name)
    with pytest.raises(ValueError, match="unknown element type"):
        carrier(name)


@given(st.text())
def test_any_text_is_either_a_type_or_a_value_error(name: str) -> None:
    for spelled in (name, f"NP:{name}"):
        if is_known(spelled):
            assert 0 <= itemsize(spelled) < 2**31
        else:
            with pytest.raises(ValueError, match="unknown element type"):
                carrier(spelled)
