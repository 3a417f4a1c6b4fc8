"""XXH3-64: equal to the published algorithm, for every length it treats differently."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.engine import xxh3_64

# Of the bytes 0, 1, 2, ... 250, 0, 1, ...; computed with the reference library (`xxhsum -H3`).
KNOWN = {
    0: 0x2D06800538D394C2,
    1: 0xC44BDFF4074EECDB,
    3: 0x5F4299FC161C9CBB,
    4: 0x60DAB036A58211F2,
    8: 0x3A1C2D7C85AF88F8,
    9: 0xE9612598145BB9DC,
    16: 0x8355E3A6F61770DB,
    17: 0x9EF341A99DE37328,
    128: 0x85C6174C7FF4C46B,
    129: 0xEC7642B431BA3E5A,
    240: 0x375A384D957FE865,
    241: 0x02E8CD95421C6D02,
    1024: 0xE5D78BAFA45B2AA5,
    1025: 0xE95C42288F28186E,
    100000: 0x42C23AEEAD96750D,
}


@pytest.mark.parametrize(("nbytes", "expected"), KNOWN.items())
def test_known_values(nbytes: int, expected: int) -> None:
    data = bytes(n % 251 for n in range(nbytes))
    assert xxh3_64(data) == expected


def test_any_buffer_is_hashed_where_it_lies() -> None:
    data = bytes(range(100))
    expected = xxh3_64(data)
    assert xxh3_64(bytearray(data)) == expected
    assert xxh3_64(memoryview(b"x" + data)[1:]) == expected
    assert xxh3_64(np.frombuffer(data, np.uint8)) == expected


def test_what_is_not_one_run_of_bytes_is_refused() -> None:
    with pytest.raises(TypeError):
        xxh3_64("text")
    with pytest.raises((BufferError, ValueError)):
        xxh3_64(memoryview(bytes(10))[::2])
