"""Promise: every array has one stable, readable name, and shared memory is stored once."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.state import flatten, leaf_names, unflatten
from support.states.memory_store import load, round_trip, save


def names(state: object) -> list[str]:
    return [leaf.name for leaf in flatten(state).leaves]


def zeros(count: int = 2) -> np.ndarray:
    return np.zeros(count)


def test_names_are_paths() -> None:
    state = {"a": [zeros(), {"b": zeros()}], 3: (zeros(), deque([zeros()])), "o": OrderedDict(x=zeros())}
    assert names(state) == ["a.0", "a.1.b", "3.0", "3.1.0", "o.x"]


def test_an_array_alone_is_a_state() -> None:
    assert names(zeros()) == ["_"]
    assert round_trip(np.arange(3)).tolist() == [0, 1, 2]


def test_names_that_would_collide_are_distinguished_and_come_back_right() -> None:
    state = {
        "a": {"b": np.array([1])},
        "a.b": np.array([2]),
        "a.b~1": np.array([3]),
        1: np.array([4]),
        "1": np.array([5]),
    }
    assert names(state) == ["a.b", "a.b~1", "a.b~1~1", "1", "1~1"]
    back = round_trip(state)
    assert [int(back[key][0]) for key in ("a.b", "a.b~1", 1, "1")] == [2, 3, 4, 5]
    assert back["a"]["b"].tolist() == [1]


def test_names_are_always_valid_text() -> None:
    state = {"\ud800": np.array([1]), "é": np.array([2]), "": np.array([3]), ("a", 1): np.array([4])}
    for name in names(state):
        name.encode()
    assert names(state) == ["\\ud800", "é", "_", "('a', 1)"]
    back = round_trip(state)
    assert [int(back[key][0]) for key in state] == [1, 2, 3, 4]


def test_order_is_that_of_the_state() -> None:
    state = {"z": zeros(), "a": zeros(), "m": [zeros(), zeros()]}
    assert names(state) == list(leaf_names(flatten(state).tree)) == ["z", "a", "m.0", "m.1"]


def test_nothing_is_copied() -> None:
    array, tensor = np.zeros(5), torch.zeros(5)
    first, second = flatten([array, tensor]).leaves
    assert first.source.address == array.ctypes.data
    assert second.source.address == tensor.data_ptr()
    assert (first.framework, second.framework) == ("numpy", "torch")
    assert (first.nbytes, second.nbytes) == (40, 20)


def test_a_source_keeps_its_memory_alive() -> None:
    leaves = flatten([np.full(1000, 7.0), torch.full((1000,), 7.0).conj()]).leaves
    assert all(leaf.source.owner is not None for leaf in leaves)


class TestAliases:
    @pytest.mark.parametrize("make", [np.arange, torch.arange], ids=["numpy", "torch"])
    def test_the_same_array_twice_is_stored_once_and_comes_back_tied(self, make: Any) -> None:
        shared = make(6)
        saved = save({"a": shared, "b": [shared], "c": make(6)})
        assert list(saved.data) == ["a", "c"]
        assert saved.aliases == {"b.0": "a"}
        back = load(saved)
        assert back["b"][0] is back["a"]
        assert back["c"] is not back["a"]

    @pytest.mark.parametrize("make", [np.arange, torch.arange], ids=["numpy", "torch"])
    def test_two_views_of_the_same_memory_are_the_same(self, make: Any) -> None:
        base = make(6).reshape(2, 3)
        assert save([base, base[:], base.T, base.T[:]]).aliases == {"1": "0", "3": "2"}

    @pytest.mark.parametrize("make", [np.arange, torch.arange], ids=["numpy", "torch"])
    def test_overlapping_but_different_views_are_stored_each_on_its_own(self, make: Any) -> None:
        base = make(12)
        views = [base, base[:6], base[6:], base.reshape(3, 4), base.reshape(4, 3), base[::2]]
        saved = save(views)
        assert saved.aliases == {}
        for back, view in zip(load(saved), views, strict=True):
            assert back.tolist() == view.tolist()

    def test_the_same_bytes_as_another_type_are_another_leaf(self) -> None:
        tensor = torch.zeros(4)
        assert save([tensor, tensor.view(torch.int32), tensor.numpy()]).aliases == {}

    def test_many_views_at_one_address_take_no_quadratic_time(self) -> None:
        base = torch.zeros(20_000)
        flat = flatten([base[: i + 1] for i in range(5_000)] * 2)
        assert len(flat.leaves) == len(flat.aliases) == 5_000

    def test_empty_arrays_are_tied_only_when_they_are_one_object(self) -> None:
        empty, other = torch.empty(0), torch.empty(0)
        saved = save([empty, other, empty, np.empty(0), torch.empty(0, dtype=torch.int8)])
        assert saved.aliases == {"2": "0"}

    def test_conjugate_views_are_tied_to_each_other_but_not_to_their_base(self) -> None:
        base = torch.randn(3, dtype=torch.complex64)
        state = [base, base.conj(), base.conj(), torch.zeros(2), base.real, torch._neg_view(base.real)]
        saved = save(state)
        assert saved.aliases == {"2": "1"}
        for back, tensor in zip(load(saved), state, strict=True):
            assert torch.equal(back, tensor)

    def test_conjugate_views_are_tied_without_their_base_in_the_state(self) -> None:
        base = torch.randn(3, dtype=torch.complex64)
        assert save([base.conj(), base.conj(), torch.zeros(3), base.conj()]).aliases == {"1": "0", "3": "0"}

    def test_temporary_tensors_do_not_alias_by_reused_addresses(self) -> None:
        class Source:
            def state_dict(self) -> dict[str, torch.Tensor]:
                return {f"t{i}": torch.full((64,), float(i)).conj() for i in range(50)}

            def load_state_dict(self, state: Any) -> None: ...

        back = round_trip({"a": Source(), "b": Source()})
        assert [float(back["b"][f"t{i}"][0]) for i in range(50)] == [float(i) for i in range(50)]

    def test_temporary_conjugates_do_not_alias_by_reused_addresses(self) -> None:
        class Source:
            def state_dict(self) -> dict[str, torch.Tensor]:
                return {"t": torch.full((64,), 1j * id(self)).conj()}

            def load_state_dict(self, state: Any) -> None: ...

        sources = [Source() for _ in range(20)]
        for back, source in zip(round_trip(sources), sources, strict=True):
            assert torch.equal(back["t"], source.state_dict()["t"])

    def test_torch_and_numpy_sharing_memory_keep_their_kinds(self) -> None:
        tensor = torch.arange(3)
        back = round_trip({"t": tensor, "n": tensor.numpy()})
        assert isinstance(back["t"], torch.Tensor)
        assert isinstance(back["n"], np.ndarray)


def test_objects_with_a_state_dict_are_flattened_in_place() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"seed": np.arange(2), "at": 5, "inner": Inner()}

        def load_state_dict(self, state: Any) -> None: ...

    class Inner(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"x": torch.ones(1)}

    state = {"data": Loader()}
    assert names(state) == ["data.seed", "data.inner.x"]
    assert round_trip(state)["data"]["at"] == 5


def test_a_state_dict_method_that_returns_its_own_kind_forever_is_refused() -> None:
    class Endless:
        def state_dict(self) -> Any:
            return Endless()

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(TypeError, match="levels"):
        flatten({"e": Endless()})


def test_unflatten_names_the_leaf_it_was_not_given() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"'a\.w'"):
        unflatten(flatten({"a": {"w": zeros()}}).tree, {})


def test_flattening_numpy_does_not_import_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "import everystep.state, everystep.state.torch_objects, everystep.state.sharded\n"
        "import everystep.state.restore_modules, everystep.state.restore_optimizers\n"
        "flat = everystep.state.flatten({'a': np.zeros(3), 'b': [1, 'x', (2,)]})\n"
        "everystep.state.unflatten(flat.tree, {'a': np.zeros(3)})\n"
        "assert not {'torch', 'jax', 'ml_dtypes'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_imported_after_everystep_is_noticed() -> None:
    code = (
        "import sys, numpy as np, everystep.state as s\n"
        "s.flatten({'a': np.zeros(3), 'd': 1})\n"
        "import torch\n"
        "flat = s.flatten({'a': torch.zeros(3), 'd': torch.float16, 's': torch.Size([1])})\n"
        "assert flat.leaves[0].framework == 'torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_restored_last_is_asked_last() -> None:
    """An object's ``state_dict`` may draw random numbers; the generator's state must be the one after."""
    drawn: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            drawn.append(self.name)
            return {"drawn": list(drawn), "w": np.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class Last(Part):
        restore_last = True

    flat = flatten({"rng": Last("rng"), "data": [Part("data")]})
    assert drawn == ["data", "rng"]
    assert list(flat.tree) == ["rng", "data"]
    assert flat.tree["rng"]["drawn"] == ["data", "rng"]
    assert [leaf.name for leaf in flat.leaves] == ["data.0.w", "rng.w"]


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


def test_keys_that_cannot_be_printed_are_refused_by_their_place() -> None:
    with pytest.raises(UnsupportedState, match=r"'a\.Unspeakable'.*key.*Unspeakable"):
        flatten({"a": {Unspeakable(): 1}})
    key: tuple[Any, ...] = ()
    for _ in range(5000):
        key = (key,)
    with pytest.raises(UnsupportedState, match=r"'a\.tuple'.*nested deeper"):
        flatten({"a": {key: 1}})


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_arrays_are_free_when_the_flat_state_is_without_a_garbage_collection() -> None:
    array = np.zeros(8)
    lives = weakref.ref(array)
    state = {"weights": array, "rng": everystep.rng(), "own": everystep.per_rank({"drawn": np.ones(2)})}
    flat = flatten(state)
    assert lives() is not None
    del flat, state, array
    assert lives() is None
