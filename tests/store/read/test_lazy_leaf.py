"""Parts of a leaf: equal to numpy's own indexing, at the price of the bytes they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import everystep
from everystep import engine
from everystep.store.read.checkpoint import open_newest
from support.states.array_samples import NUMPY_TYPES, TORCH_TYPES, bits, random_array, random_tensor

MIB = 1 << 20

SHAPES = {
    "scalar": (),
    "vector": (50_000,),
    "none": (0, 5),
    "matrix": (37, 41),
    "tall": (300, 5_000),  # 6 MB in rows of 20 KB: several chunks, rows read whole
    "long": (3, 700_000),  # rows of 2.8 MB, larger than a chunk: read in parts
    "deep": (2, 3, 400, 300),
    "thin": (1, 9, 1, 4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[everystep.Checkpoint, dict[str, Any]]]:
    arrays = {name: random_array(np.dtype("<i4"), shape, 1) for name, shape in SHAPES.items()}
    arrays["fortran"] = np.asfortranarray(random_array(np.dtype("<i4"), (60, 70), 2))
    path = tmp_path_factory.mktemp("lazy") / "c"
    everystep.save(path, arrays)
    with everystep.open(path) as opened:
        yield opened, arrays


@settings(max_examples=80)
@given(data=st.data())
def test_any_index_gives_what_numpy_gives(
    saved: tuple[everystep.Checkpoint, dict[str, Any]], data: st.DataObject
) -> None:
    opened, arrays = saved
    name = data.draw(st.sampled_from(sorted(arrays)))
    index = data.draw(basic_indices(arrays[name].shape, allow_newaxis=False))
    assert bits(opened[name][index]) == bits(np.asarray(arrays[name][index]))


def test_an_index_need_not_be_a_plain_integer(saved: tuple[everystep.Checkpoint, dict[str, Any]]) -> None:
    opened, arrays = saved
    assert opened["matrix"][np.int64(3), torch.tensor(4)] == arrays["matrix"][3, 4]


@pytest.mark.parametrize(
    "index",
    [(0, 0, 0), 37, -38, (0, 41), 1.5, "a", None, [1, 2], np.array([1]), (..., ...), (slice(None), 99)],
)
def test_an_index_that_makes_no_sense_is_an_index_error(
    saved: tuple[everystep.Checkpoint, dict[str, Any]], index: Any
) -> None:
    with pytest.raises(IndexError):
        saved[0]["matrix"][index]


@pytest.mark.parametrize("index", [True, False, np.True_, np.array(True), torch.tensor(True), (0, True)])
def test_a_truth_value_is_no_index(saved: tuple[everystep.Checkpoint, dict[str, Any]], index: Any) -> None:
    """To numpy and torch it is a mask, to Python an integer: neither is what was meant."""
    with pytest.raises(IndexError, match="integers, slices"):
        saved[0]["matrix"][index]


def test_a_leaf_that_is_not_read_yet_knows_its_form(
    saved: tuple[everystep.Checkpoint, dict[str, Any]],
) -> None:
    leaf = saved[0]["tall"]
    assert (leaf.name, leaf.shape, leaf.dtype, leaf.framework) == ("tall", (300, 5000), "I32", "numpy")
    assert (leaf.ndim, len(leaf), leaf.nbytes) == (2, 300, 6_000_000)
    assert "I32[300, 5000]" in repr(leaf)
    with pytest.raises(TypeError):
        len(saved[0]["scalar"])


def test_parts_of_every_element_type_keep_their_framework(tmp_path: Path) -> None:
    state = {f"numpy {dtype.str}": random_array(dtype, (5, 7)) for dtype in NUMPY_TYPES}
    state |= {str(dtype): random_tensor(dtype, (5, 7)) for dtype in TORCH_TYPES}
    everystep.save(tmp_path / "c", state)
    with everystep.open(tmp_path / "c") as opened:
        for name, array in state.items():
            assert bits(opened[name][1:4, 2]) == bits(array[1:4, 2]), name
            assert bits(opened[name][...]) == bits(array), name


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each request to the engine asks for."""
    asked: list[int] = []
    real = engine.read

    def read(path: Any, pieces: Any, **rest: Any) -> Any:
        asked.append(pieces.nbytes)
        return real(path, pieces, **rest)

    monkeypatch.setattr(engine, "read", read)
    return asked


def test_a_part_costs_its_own_bytes_rounded_to_chunks(tmp_path: Path, counted: list[int]) -> None:
    rows, columns = 4096, 4096
    array = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)  # 64 MiB
    wide = array.reshape(8, -1)  # rows of 8 MiB
    everystep.save(tmp_path / "c", {"w": array, "wide": wide.copy(), "other": array + 1})
    with everystep.open(tmp_path / "c") as opened:
        assert opened["w"].shape == (rows, columns)
        assert opened.leaves
        assert opened.values == {}
        assert counted == []  # knowing what there is costs no data at all
        for index, needed in [
            (np.s_[10:20], 10 * columns * 4),
            (np.s_[100], columns * 4),
            (np.s_[5, 7], 4),
            (np.s_[-1, -10:], 40),
            (np.s_[1000:3000], 2000 * columns * 4),
        ]:
            counted.clear()
            assert np.array_equal(opened["w"][index], array[index])
            assert needed <= sum(counted) <= needed + 2 * MIB
        counted.clear()
        assert np.array_equal(opened["wide"][:, 1000:2000], wide[:, 1000:2000])
        assert sum(counted) <= 8 * 2 * MIB  # a chunk or two of each row, not the 64 MiB
        counted.clear()
        assert opened["w"][3:3].shape == (0, columns)
        assert counted == []


def test_one_expression_is_enough(tmp_path: Path) -> None:
    """The leaf keeps the checkpoint open for as long as it is needed."""
    everystep.save(tmp_path / "c", {"w": np.arange(10)})
    assert everystep.open(tmp_path / "c")["w"][2:4].tolist() == [2, 3]


def test_damage_is_noticed_in_the_part_that_is_read_and_only_there(tmp_path: Path) -> None:
    array = np.arange(4 * MIB // 8)
    everystep.save(tmp_path / "c", {"w": array})
    with open_newest(tmp_path / "c") as opened:
        offset = opened._parts.root.part.leaves[0].fragments[0].offset
        with (tmp_path / "c" / "r00000.v0.safetensors").open("r+b") as file:
            file.seek(offset + 2 * MIB + 5)
            file.write(b"\x55")
        per_chunk = MIB // 8
        assert np.array_equal(opened["w"][: 2 * per_chunk], array[: 2 * per_chunk])
        assert np.array_equal(opened["w"][3 * per_chunk :], array[3 * per_chunk :])
        with pytest.raises(everystep.CorruptCheckpoint, match="chunk 2") as caught:
            opened["w"][3 * per_chunk - 1]
        assert caught.value.leaf == "w"
        assert caught.value.path == str(tmp_path / "c" / "r00000.v0.safetensors")
