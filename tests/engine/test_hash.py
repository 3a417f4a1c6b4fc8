"""XXH3-64: equal to the published algorithm, for every length it treats differently."""

from __future__ import annotations

import numpy as np
import pytest

from everystep.engine import xxh3_64, xxh3_64_each

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


def _blocks(*lengths: int) -> list[bytes]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.bytes(length) for length in lengths]


LENGTHS = [
    (),
    (5000,),
    (4096,) * 4,  # four in step, each ending with its last block
    (8191, 8192, 8193, 8256),  # around the ends of a block and of a stripe
    (4097, 70_000, 5121, 1 << 20),  # in step as far as the shortest goes
    (100_000, 0, 3, 240, 241, 4095, 50_000, 60_000, 70_000, 80_000),  # short ones between, one left over
]


@pytest.mark.parametrize("common_instructions", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_many_at_once_are_hashed_as_one_by_one(lengths: tuple[int, ...], common_instructions: bool) -> None:
    blocks = _blocks(*lengths)
    assert xxh3_64_each(blocks, common_instructions, []) == [xxh3_64(block) for block in blocks]


@pytest.mark.parametrize("common_instructions", [False, True])
def test_every_byte_of_every_lane_counts(common_instructions: bool) -> None:
    blocks = _blocks(*[6000] * 4)
    before = xxh3_64_each(blocks, common_instructions, [])
    for lane in range(4):
        for at in (0, 1023, 1024, 5119, 5120, 5999):
            changed = list(blocks)
            changed[lane] = bytes([*blocks[lane][:at], blocks[lane][at] ^ 1, *blocks[lane][at + 1 :]])
            after = xxh3_64_each(changed, common_instructions, [])
            assert [a == b for a, b in zip(after, before, strict=True)] == [n != lane for n in range(4)]


@pytest.mark.parametrize("common_instructions", [False, True])
@pytest.mark.parametrize("residue", [0, 8, 16], ids=["aligned", "odd", "for the shorter instructions only"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_copies_made_on_the_way_are_exact(
    lengths: tuple[int, ...], residue: int, common_instructions: bool
) -> None:
    """Every other block is copied, to places with and without alignment; nothing beside them is touched."""
    blocks = _blocks(*lengths)
    room = [np.full(len(block) + 256, 0xA5, np.uint8) for block in blocks]
    starts = [64 + (residue - array.ctypes.data) % 64 for array in room]
    wanted = [number % 3 != 1 for number in range(len(blocks))]
    addresses = [
        array.ctypes.data + start if want else 0
        for array, start, want in zip(room, starts, wanted, strict=True)
    ]
    assert xxh3_64_each(blocks, common_instructions, addresses) == [xxh3_64(block) for block in blocks]
    for block, array, start, want in zip(blocks, room, starts, wanted, strict=True):
        end = start + len(block)
        assert bytes(array[start:end]) == (block if want else b"\xa5" * len(block))
        assert set(array[:start]) | set(array[end:]) == {0xA5}
