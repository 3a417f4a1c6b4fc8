"""What a user of a shelf can rely on while nothing goes wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import Shelf
from everystep.format.geometry import Box
from everystep.state.boxed import BoxedArray, unchanging

MEDIA = ["page cache", "memory", "persistent memory"]


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_arrays_and_values_come_back_from_the_file(tmp_path: Path, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, "1MiB", _medium=medium) as shelf:
        shelf.centers = np.arange(6.0).reshape(2, 3)
        shelf["n_iter"] = 3
        assert (shelf.n_iter, len(shelf), list(shelf)) == (3, 2, ["centers", "n_iter"])
        assert "centers" in shelf
        assert "other" not in shelf
        assert shelf.medium == medium
    with Shelf(path, mode="r") as shelf:
        assert shelf["centers"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert shelf.n_iter == 3


VALUES: list[Any] = [
    0,
    -(2**70),
    2**5000,
    1.5,
    float("inf"),
    -0.0,
    1 + 2j,
    True,
    False,
    None,
    "text",
    "\ud800",
    "",
    b"",
    b"\x00\xff" * 3,
    b"x" * 100_000,
    "y" * 5000,
    [],
    (),
    {},
    [1, (2, {"a": [b"x", None]}), {3: (4,)}],
    {"a": np.arange(3), "b": [np.float32(2), (np.ones((2, 2)),)]},
]


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda value: repr(value)[:30] if not isinstance(value, int) else ""
)
def test_values_keep_type_and_bits(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path) as shelf:
        shelf["value"] = value
        _assert_same(shelf["value"], value)
        with shelf.transaction():
            shelf["again"] = value
            _assert_same(shelf["again"], value)
    with Shelf(path, mode="r") as shelf:
        _assert_same(shelf["value"], value)
        _assert_same(shelf["again"], value)


def _assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key, item in value.items():
            _assert_same(found[key], item)
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for a, b in zip(found, value, strict=True):
            _assert_same(a, b)
    else:
        assert repr(found) == repr(value) if isinstance(value, float) else found == value


ARRAYS: list[Any] = [
    np.zeros((0, 3)),
    np.array(3.0),
    np.arange(10, dtype=">i4"),
    np.array([True, False]),
    np.array(["a", "bcd"]),
    np.array([b"a", b""]),
    np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    np.arange(12.0).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(12.0)[::-1],
    np.frombuffer(b"\x01\x00\xf8\x7f" * 2, np.float32),
    np.arange(3, dtype=np.complex64) * 1j,
    np.arange(400_000, dtype=np.float64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays_of_any_plain_type_lie_on_the_mapping(tmp_path: Path, array: Any, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, _medium=medium) as shelf:
        shelf.a = array
        _assert_same(shelf.a, array)
    with Shelf(path, mode="r") as shelf:
        found = shelf.a
        _assert_same(found, array)
        assert not found.flags.writeable
        assert not array.nbytes or not found.flags.owndata


def test_structured_and_object_arrays_are_not_stored(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        for array in (np.array([object()]), np.zeros(2, [("a", int)])):
            with pytest.raises(everystep.UnsupportedState):
                shelf.a = array
        with pytest.raises(everystep.UnsupportedState):
            shelf.a = object()
        assert list(shelf) == []


def test_an_array_in_parts_is_not_stored(tmp_path: Path) -> None:
    halves = tuple((Box((start,), (2,)), np.zeros(2)) for start in (0, 2))
    with Shelf(tmp_path / "a.shelf") as shelf:
        with pytest.raises(everystep.UnsupportedState, match="w: a shelf stores whole arrays"):
            shelf.a = {"w": BoxedArray((4,), np.dtype(float), halves)}
        shelf.a = {"w": unchanging(np.arange(4.0))}
        assert shelf.a["w"].tolist() == [0, 1, 2, 3]


def test_tensors_come_back_as_tensors_and_what_is_done_to_them_stays_in_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "a.shelf"
    with Shelf(path) as shelf:
        for name, kind in {
            "f": torch.float32,
            "b": torch.bfloat16,
            "t": torch.bool,
            "c": torch.complex64,
        }.items():
            shelf[name] = torch.arange(6).reshape(2, 3).to(kind)
        shelf.nested = {"w": torch.ones(3), "n": np.ones(2)}
        shelf.f.add_(1)
        assert shelf.f.tolist() == [[0, 1, 2], [3, 4, 5]]
        with shelf.transaction():
            shelf.writable("f").add_(1)
    with Shelf(path, mode="r") as shelf:
        assert isinstance(shelf.f, torch.Tensor)
        assert shelf.f.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert shelf.b.dtype is torch.bfloat16
        assert torch.equal(shelf.nested["w"], torch.ones(3))


def test_a_parameter_that_is_changed_in_place_is_committed_and_stays_one(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with Shelf(tmp_path / "a.shelf") as shelf:
        shelf.w = torch.nn.Parameter(torch.zeros(2))
        shelf.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        with torch.no_grad(), shelf.transaction():
            shelf.writable("w")[0] = 1
            shelf.writable("frozen")[0] = 2
            shelf.new = torch.nn.Parameter(torch.zeros(2))
            shelf.new[0] = 3
        for name, first in {"w": 1, "frozen": 2, "new": 3}.items():
            assert isinstance(shelf[name], torch.nn.Parameter)
            assert shelf[name].requires_grad == (name != "frozen")
            assert shelf[name].tolist() == [first, 0]


def test_in_place_changes_of_all_sorts_are_committed(tmp_path: Path, medium: str) -> None:
    with Shelf(tmp_path / "a.shelf", _medium=medium) as shelf:
        shelf.a = np.zeros(4)
        shelf.b = np.zeros(4)
        with shelf.transaction():
            shelf.writable("a")[1:3] = 1
            shelf.a += 1
            np.copyto(shelf.a[:1], 9)
            np.multiply(shelf.a, 2, out=shelf.writable("b"))
            shelf.c = np.zeros(2)
            shelf.c[0] = 5
        assert shelf.a.tolist() == [9, 2, 2, 1]
        assert shelf.b.tolist() == [18, 4, 4, 2]
        assert shelf.c.tolist() == [5, 0]


def test_an_assignment_takes_the_value_of_that_moment(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        array = np.zeros(3)
        with shelf.transaction():
            shelf.a = array
            array[:] = 7
        assert shelf.a.tolist() == [0, 0, 0]


def test_an_exception_rolls_everything_back(tmp_path: Path, medium: str) -> None:
    with Shelf(tmp_path / "a.shelf", _medium=medium) as shelf:
        shelf.a = np.zeros(3)
        shelf.n = 1
        used = shelf.usage

        def change() -> None:
            with shelf.transaction():
                shelf.writable("a")[:] = 9
                shelf.n = 2
                del shelf["n"]
                shelf.new = np.ones(10_000)
                assert list(shelf) == ["a", "new"]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            change()
        assert (list(shelf), shelf.n, shelf.a.tolist()) == (["a", "n"], 1, [0, 0, 0])
        assert (shelf.usage.used, shelf.generation) == (used.used, used.generation)


def test_what_was_read_outside_of_a_transaction_is_read_only_and_stays(tmp_path: Path, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, _medium=medium) as shelf:
        shelf.a = np.arange(1000.0)
        kept = shelf.a[10:]
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1
        for i in range(20):
            shelf.a = np.full(1000, float(i))
    with Shelf(path, _medium=medium) as shelf:  # another writer knows nothing of that array
        for i in range(20):
            shelf.a = np.full(1000, float(i))
        assert kept.tolist() == list(np.arange(10.0, 1000.0))
        assert shelf.usage.waiting > 0
        del kept
        shelf.a = np.zeros(1000)
        shelf.a = np.zeros(1000)
        assert shelf.usage.file < 1 << 20


def test_a_reader_sees_one_commit_until_it_asks_for_the_next(tmp_path: Path, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, _medium=medium) as shelf:
        shelf.a = np.zeros(5000)
        with Shelf(path, mode="r") as reader:
            old = reader.a
            for i in range(1, 10):
                with shelf.transaction():
                    shelf.a = np.full(5000, float(i))
                    shelf.i = i
            assert "i" not in reader
            assert not reader.a.any()
            assert reader.refresh()
            assert not reader.refresh()
            assert reader.i == 9
            assert (reader.a == 9).all()
            for _ in range(10):
                shelf.a = np.full(5000, -1.0)
            assert not old.any()
            with pytest.raises(everystep.errors.TransactionError, match="for reading"):
                reader.a = 1


def test_nested_and_concurrent_transactions_are_errors(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        shelf.a = 1
        raised: list[BaseException] = []
        seen: list[int] = []

        def other() -> None:
            seen.append(shelf.a)  # a reader in another thread: the committed state
            for change in (
                lambda: shelf.transaction().__enter__(),
                lambda: shelf.__setitem__("a", 3),
                shelf.close,
            ):
                try:
                    change()
                except everystep.errors.TransactionError as error:
                    raised.append(error)

        with shelf.transaction():
            shelf.a = 2
            with pytest.raises(everystep.errors.TransactionError, match="this thread"), shelf.transaction():
                pass
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert shelf.a == 2
        assert seen == [1]
        assert len(raised) == 3
        assert "another thread" in str(raised[0])


def test_writable_outside_of_a_transaction_and_of_a_value_are_errors(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        shelf.a = np.zeros(2)
        shelf.n = [1]
        with pytest.raises(everystep.errors.TransactionError, match="inside of"):
            shelf.writable("a")
        with shelf.transaction():
            with pytest.raises(TypeError, match="no array"):
                shelf.writable("n")
            with pytest.raises(KeyError):
                shelf.writable("missing")


def test_deleting_and_missing_names(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        shelf.a = 1
        shelf["b c"] = 2
        del shelf.a
        del shelf["b c"]
        assert list(shelf) == []
        for missing in (lambda: shelf["a"], lambda: shelf.__delitem__("a")):
            with pytest.raises(KeyError):
                missing()
        for absent in (lambda: shelf.a, lambda: shelf.__delattr__("a")):
            with pytest.raises(AttributeError):
                absent()
        assert not hasattr(shelf, "a")
        assert shelf.get("a", 5) == 5
        with pytest.raises(AttributeError, match="use shelf"):
            shelf.usage = 3
        shelf["usage"] = 3
        assert shelf["usage"] == 3
        for bad in ("", "x" * 1025, "\ud800"):
            with pytest.raises(ValueError, match="name"):
                shelf[bad] = 1


def test_full_is_an_error_and_nothing_is_lost(tmp_path: Path, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, "256KiB", _medium=medium) as shelf:
        shelf.a = np.zeros(10_000)
        with pytest.raises(everystep.errors.ShelfFull, match="larger size"):
            shelf.b = np.zeros(100_000)

        def change() -> None:
            with shelf.transaction():
                shelf.a = np.ones(10_000)
                shelf.c = np.zeros(20_000)

        with pytest.raises(everystep.errors.ShelfFull):
            change()
        assert (list(shelf), shelf.a.any()) == (["a"], False)
        for _ in range(50):
            shelf.a = np.zeros(10_000)  # the space of what was replaced is used again
        assert shelf.usage.file <= 256 << 10
    with Shelf(path, "4MiB", _medium=medium) as shelf:
        shelf.b = np.zeros(100_000)
        assert shelf.b.nbytes == 800_000


def test_a_second_writer_is_refused_also_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path) as shelf:
        shelf.a = 1
        with pytest.raises(everystep.errors.Locked, match="one writer"):
            Shelf(path)
    with Shelf(path) as shelf:
        assert shelf.a == 1


def test_a_place_that_cannot_hold_a_shelf_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(everystep.errors.StorageMissing, match="does not exist"):
        Shelf(tmp_path / "none" / "a.shelf")
    for size in (10, "10", "x", "64QiB", True, 2**47 + 1, "129TiB", "9" * 400):
        with pytest.raises((ValueError, TypeError)):
            Shelf(tmp_path / "a.shelf", size)
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_of_the_largest_size_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, 2**47) as shelf:
        shelf.a = 1
    with Shelf(path, "128TiB") as shelf:
        assert (shelf.a, shelf.usage.limit) == (1, 2**47)


def test_thousands_of_names(tmp_path: Path) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path) as shelf:
        with shelf.transaction():
            for i in range(3000):
                shelf[f"name {i}"] = i
        for i in range(0, 3000, 100):
            shelf[f"name {i}"] = -i
        before = shelf.usage
        shelf["name 7"] = "seven"
        assert shelf.usage.used == before.used
    with Shelf(path, mode="r") as shelf:
        assert len(shelf) == 3000
        assert (shelf["name 7"], shelf["name 8"], shelf["name 200"]) == ("seven", 8, -200)


def test_a_closed_shelf_says_so_and_its_arrays_live_on(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "a.shelf")
    shelf.a = np.arange(3)
    array = shelf.a
    shelf.close()
    shelf.close()
    assert array.tolist() == [0, 1, 2]
    with pytest.raises(everystep.errors.ShelfClosed):
        _ = shelf["a"]
    with pytest.raises(everystep.errors.ShelfNotFound):
        Shelf(tmp_path / "none.shelf", mode="r")
    assert "closed" in repr(shelf)
