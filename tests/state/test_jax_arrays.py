"""Arrays of JAX as leaves, with a stand-in for JAX. `tests/peers/test_jax.py` has the real one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import everystep
from everystep.errors import StateMismatch, UnsupportedState
from everystep.state import flatten

WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)


class Device:
    process_index = 0


class Rows:
    """A sharding: the rows of an array, cut over devices of this process."""

    def __init__(self, devices: int) -> None:
        self.devices = [Device() for _ in range(devices)]

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
        return self.devices_indices_map(shape)

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
        each = shape[0] // len(self.devices)
        rest = (slice(None),) * (len(shape) - 1)
        return {
            device: (slice(number * each, (number + 1) * each), *rest)
            for number, device in enumerate(self.devices)
        }


class Array:
    """A ``jax.Array``, as far as it is used."""

    is_fully_addressable = True
    weak_type = False

    def __init__(self, data: np.ndarray[Any, Any], devices: int = 1, sharding: Rows | None = None) -> None:
        self.shape = data.shape
        self.dtype: Any = data.dtype
        self.sharding = sharding or Rows(devices)
        self.addressable_shards = [
            SimpleNamespace(device=device, data=data[index])
            for device, index in self.sharding.devices_indices_map(data.shape).items()
        ]

    def is_deleted(self) -> bool:
        return False

    def whole(self) -> np.ndarray[Any, Any]:
        return np.concatenate([shard.data for shard in self.addressable_shards])


class Tracer(Array):
    pass


@pytest.fixture(autouse=True)
def jax(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("jax")
    vars(found).update(
        Array=Array,
        core=SimpleNamespace(Tracer=Tracer),
        dtypes=SimpleNamespace(issubdtype=lambda dtype, kind: dtype == kind, prng_key="key<fry>"),
        device_put=lambda data, device: data,
        make_array_from_single_device_arrays=lambda shape, sharding, pieces, dtype: Array(
            np.concatenate(pieces).reshape(shape).astype(dtype), sharding=sharding
        ),
        process_count=lambda: 1,
        process_index=lambda: 0,
    )
    monkeypatch.setitem(sys.modules, "jax", found)
    return found


def changed(**attributes: Any) -> Array:
    array = Array(WHOLE)
    vars(array).update(attributes)
    return array


@pytest.mark.parametrize("devices", [1, 3])
def test_an_array_is_stored_where_it_lies_and_comes_back_as_numpy(tmp_path: Path, devices: int) -> None:
    state = {"model": {"w": Array(WHOLE, devices)}, "n": 3}
    flat = flatten(state)
    assert flat.tree == {"model": {"w": {"$leaf": "model.w"}}, "n": 3}
    assert [leaf.source.address for leaf in flat.leaves] == [
        shard.data.ctypes.data for shard in state["model"]["w"].addressable_shards
    ]
    everystep.save(tmp_path / "one", state)
    found = everystep.load(tmp_path / "one")["model"]["w"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.tolist()) == (np.float32, WHOLE.tolist())


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Tracer(WHOLE), "a tracer has no values. Save and load outside of functions that JAX transforms"),
        (changed(is_deleted=lambda: True), "this array is deleted, as donated to a step. Save what"),
        (
            changed(dtype="key<fry>"),
            "typed random keys. Use everystep.integrations.jax.pytree, or jax.random.key_data",
        ),
        (changed(is_fully_addressable=False), "other processes have parts of this jax.Array. Use everystep"),
        (
            Array(np.zeros(3, ml_dtypes.int4)),
            "a jax.Array of dtype int4. Use everystep.integrations.jax.pytree, or",
        ),
    ],
)
def test_what_needs_more_than_its_elements_is_refused_by_place(
    tmp_path: Path, array: Array, reason: str
) -> None:
    with pytest.raises(UnsupportedState) as caught:
        everystep.save(tmp_path / "one", {"model": [array]})
    assert f"at 'model.0': {reason}" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", [1, 3])
def test_a_new_array_takes_the_place_of_that_in_the_target(tmp_path: Path, devices: int) -> None:
    everystep.save(tmp_path / "one", {"model": {"w": WHOLE, "n": 3}, "pair": (WHOLE[0], 1)})
    old = Array(WHOLE * 0, devices)
    model = {"w": old, "n": 0}
    found = everystep.load(tmp_path / "one", {"model": model, "pair": (Array(WHOLE[0] * 0), 0)})
    assert found["model"] is model
    assert (model["w"].whole().tolist(), model["n"]) == (WHOLE.tolist(), 3)
    assert model["w"].sharding is old.sharding
    assert not old.whole().any()
    assert (found["pair"][0].whole().tolist(), found["pair"][1]) == (WHOLE[0].tolist(), 1)


@pytest.mark.parametrize("strict", [True, False])
def test_an_array_of_another_shape_or_a_value_does_not_fit(tmp_path: Path, strict: bool) -> None:
    everystep.save(tmp_path / "one", {"a": np.ones(3), "values": {"n": 1}, "w": WHOLE})
    own = np.zeros(3)
    narrow, number = Array(WHOLE[:, :4]), Array(WHOLE)
    target = {"a": own, "values": {"n": number}, "w": narrow}
    if strict:
        with pytest.raises(StateMismatch) as caught:
            everystep.load(tmp_path / "one", target)
        assert "w: checkpoint F32[6,8], target F32[6,4]" in str(caught.value)
        assert "values.n: checkpoint holds the value 1, target a jax.Array" in str(caught.value)
        assert own.tolist() == [0, 0, 0]
    else:
        with pytest.warns(RuntimeWarning, match=r"w: checkpoint F32\[6,8\], target F32\[6,4\]"):
            everystep.load(tmp_path / "one", target, strict=False)
        assert own.tolist() == [1, 1, 1]
    assert target["w"] is narrow
    assert target["values"]["n"] is number


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Tracer(WHOLE), "a tracer has no values"),
        (changed(dtype="key<fry>"), "typed random keys. Use everystep.integrations.jax"),
        (changed(is_fully_addressable=False), "other processes have parts of this jax.Array"),
    ],
)
def test_a_target_that_needs_more_is_refused_before_anything_changes(
    tmp_path: Path, array: Array, reason: str
) -> None:
    everystep.save(tmp_path / "one", {"a": np.ones(3), "w": WHOLE})
    own = np.zeros(3)
    with pytest.raises(UnsupportedState, match=f"'w': {reason}"):
        everystep.load(tmp_path / "one", {"a": own, "w": array})
    assert own.tolist() == [0, 0, 0]


def test_a_target_of_jax_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"w": WHOLE})
    for strict in (True, False):
        with pytest.raises(StateMismatch, match="v"):
            everystep.load(tmp_path / "one", {"v": Array(WHOLE)}, strict=strict)
    target = {"w": np.zeros_like(WHOLE), "v": (kept := Array(WHOLE))}
    everystep.load(tmp_path / "one", target, select="w")
    assert target["v"] is kept


def test_jax_that_another_thread_still_imports_changes_nothing(jax: ModuleType) -> None:
    del jax.Array
    with pytest.raises(UnsupportedState, match=r"'x': its type is object"):
        flatten({"x": object()})
    assert flatten({"x": WHOLE}).tree == {"x": {"$leaf": "x"}}
