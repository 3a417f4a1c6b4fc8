"""Whatever goes in comes out bit for bit, through every path of the engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import everystep
from everystep.store import verify
from support.states.array_samples import (
    NUMPY_TYPES,
    TORCH_TYPES,
    bits,
    numpy_layouts,
    random_array,
    random_tensor,
    torch_layouts,
)


def small_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for dtype in NUMPY_TYPES:
        state[f"numpy {dtype.str}"] = dict(numpy_layouts(dtype))
    for kind in TORCH_TYPES:
        state[str(kind)] = dict(torch_layouts(kind))
    return state


def assert_same(found: Any, saved: Any, place: str = "") -> None:
    assert type(found) is type(saved), place
    if isinstance(saved, dict):
        assert list(found) == list(saved), place
        for key in saved:
            assert_same(found[key], saved[key], f"{place}.{key}")
    elif isinstance(saved, (list, tuple)):
        assert len(found) == len(saved), place
        for number, item in enumerate(saved):
            assert_same(found[number], item, f"{place}.{number}")
    elif isinstance(saved, (np.ndarray, torch.Tensor)):
        assert bits(found) == bits(saved), place
    else:
        assert found == saved, place


def test_every_element_type_in_every_layout(tmp_path: Path, options: everystep.Options) -> None:
    state = small_state()
    everystep.save(tmp_path / "c", state, options=options)
    assert_same(everystep.load(tmp_path / "c"), state)
    assert verify(tmp_path / "c").intact


def test_every_layout_in_sizes_that_cross_windows_and_chunks(
    tmp_path: Path, options: everystep.Options
) -> None:
    """1.5 MiB each: several windows, more than one checksum, and large enough for a congruent place."""
    rows, columns = 768, 512
    numpy_base = random_array(np.dtype("<f4"), (rows, columns), 1)
    torch_base = random_tensor(torch.bfloat16, (2 * rows, columns), 2)
    state = {
        "contiguous": numpy_base,
        "fortran": np.asfortranarray(random_array(np.dtype("<f4"), (rows, columns), 3)),
        "reversed": random_array(np.dtype("<i8"), (rows // 2, columns), 4)[::-1],
        "columns": random_array(np.dtype("<f8"), (rows, columns), 5)[:, ::2],
        "odd": random_array(np.dtype("u1"), (rows * columns * 4 + 1,), 6)[1:],
        "bf16": torch_base,
        "transposed": random_tensor(torch.float32, (rows, columns), 7).T,
        "channels_last": random_tensor(torch.float32, (8, 48, 32, 32), 8).contiguous(
            memory_format=torch.channels_last
        ),
        "expanded": random_tensor(torch.float32, (1, columns), 9).expand(rows, columns),
        "small": np.float32([1.5]),
    }
    everystep.save(tmp_path / "c", state, options=options)
    assert_same(everystep.load(tmp_path / "c"), state)
    assert verify(tmp_path / "c").intact


def test_nan_payloads_signs_and_zeros_survive(tmp_path: Path) -> None:
    patterns = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0xFF800000], np.uint32)
    state = {"numpy": patterns.view(np.float32), "torch": torch.from_numpy(patterns.view(np.float32).copy())}
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c")
    assert np.array_equal(found["numpy"].view(np.uint32), patterns)
    assert np.array_equal(found["torch"].numpy().view(np.uint32), patterns)


def test_values_of_every_kind_lie_beside_arrays(tmp_path: Path) -> None:
    state = {
        "epoch": 7, "big": 10**40, "rate": 0.1, "nothing": None, "yes": True, "name": "é\x00",
        "raw": b"\xff\x00",
        "tuple": (1, [2.5, (3,)]), "set": {1, 2}, 5: "int key", (1, "k"): "tuple key", "inf": math.inf,
        "complex": 1 - 2j, "scalar": np.float32(0.1), "dtype": torch.bfloat16, "array": np.arange(3),
    }  # fmt: skip
    everystep.save(tmp_path / "c", state)
    assert_same(everystep.load(tmp_path / "c"), state)


@pytest.mark.parametrize(
    "state", [{}, [], (), None, 3, "text", np.float64(2), np.arange(4), torch.arange(4), [np.zeros(2)]]
)
def test_a_state_need_not_be_a_dict(tmp_path: Path, state: Any) -> None:
    everystep.save(tmp_path / "c", state)
    assert_same(everystep.load(tmp_path / "c"), state)


def test_views_that_share_memory_come_back_with_their_own_bytes(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    state = {
        "all": base,
        "front": base[:50],
        "back": base[50:],
        "matrix": base.view(10, 10),
        "column": base.view(10, 10)[:, 3],
    }
    everystep.save(tmp_path / "c", state)
    assert_same(everystep.load(tmp_path / "c"), state)


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(300, 400)
    shared = np.arange(50_000.0)
    state = {"embed": weight, "head": weight, "deep": [{"again": weight}], "a": shared, "b": shared}
    info = everystep.save(tmp_path / "c", state)
    assert info.leaves == 2
    assert info.stored_nbytes < weight.nbytes + shared.nbytes + 40_000
    found = everystep.load(tmp_path / "c")
    assert found["embed"] is found["head"] is found["deep"][0]["again"]
    assert found["a"] is found["b"]
    with everystep.open(tmp_path / "c") as opened:
        assert opened.leaves["head"].alias_of == "embed"
        assert opened.nbytes == weight.nbytes + shared.nbytes
        assert np.array_equal(opened["b"][7:9], shared[7:9])
        assert list(opened.read("head")) == ["head"]


def test_conjugate_and_negative_views_are_saved_as_what_they_mean(tmp_path: Path) -> None:
    base = torch.randn(40, 30, dtype=torch.complex64)
    state = {"conj": base.conj(), "imag": base.conj().imag, "grad": torch.randn(3, requires_grad=True)}
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c")
    assert torch.equal(found["conj"], base.conj())
    assert torch.equal(found["imag"], base.conj().imag)
    assert torch.equal(found["grad"], state["grad"].detach())
    assert not found["conj"].is_conj()


def test_loaded_arrays_are_writable_and_their_own(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"n": np.arange(200_000), "t": torch.arange(200_000), "s": np.arange(3)})
    first, second = everystep.load(tmp_path / "c"), everystep.load(tmp_path / "c")
    for name in first:
        first[name][0] = -5
        assert second[name][0] == 0


def test_framework_turns_everything_into_torch(tmp_path: Path) -> None:
    state = {"n": np.arange(6, dtype=np.int32).reshape(2, 3), "t": torch.ones(2), "big": np.arange(200_000.0)}
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c", framework="torch")
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    for name, value in state.items():
        assert bits(found[name])[2:] == bits(value)[2:]


def test_framework_turns_everything_into_numpy(tmp_path: Path) -> None:
    state = {
        str(kind): random_tensor(kind, (5, 4))
        for kind in TORCH_TYPES
        if kind not in (torch.complex32, torch.float4_e2m1fn_x2)
    }
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c", framework="numpy")
    assert all(isinstance(value, np.ndarray) for value in found.values())
    assert found["torch.bfloat16"].dtype == ml_dtypes.bfloat16
    for name, value in state.items():
        assert bits(found[name])[2:] == bits(value)[2:]


def test_what_numpy_has_no_type_for_is_refused_by_name(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"x": random_tensor(torch.complex32, (2,))})
    with pytest.raises(everystep.UnsupportedState, match="numpy"):
        everystep.load(tmp_path / "c", framework="numpy")


def test_a_framework_that_is_none_is_refused(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"n": np.zeros(3), "t": torch.zeros(3)})
    with pytest.raises(ValueError, match="'torch', 'numpy', not 'pytorch'"):
        everystep.load(tmp_path / "c", framework="pytorch")  # type: ignore[arg-type]


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(everystep.UnsupportedState, match=r"deep\.1"):
        everystep.save(tmp_path / "c", {"w": np.zeros(9), "deep": [1, object()]})
    assert list(tmp_path.iterdir()) == []
