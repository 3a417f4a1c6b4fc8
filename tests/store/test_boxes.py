"""Arrays that a process has in boxes (`BoxedArray`), in one process and on ranks that torch does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.format.geometry import Box
from everystep.state.boxed import BoxedArray
from everystep.store.ranks.transport import Ranks

WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)
QUARTERS = tuple(Box(start, (3, 4)) for start in ((0, 0), (0, 4), (3, 0), (3, 4)))
THIRDS = tuple(Box((at, 0), (2, 8)) for at in (0, 2, 4))


def part(box: Box, of: np.ndarray[Any, Any] = WHOLE) -> np.ndarray[Any, Any]:
    return of[tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))]


def held(*boxes: Box) -> BoxedArray:
    """Some boxes of the array: copies, and every second one a view with strides."""
    parts = [part(box) if number % 2 else part(box).copy() for number, box in enumerate(boxes)]
    return BoxedArray(WHOLE.shape, WHOLE.dtype, tuple(zip(boxes, parts, strict=True)))


def wanted(*boxes: Box) -> BoxedArray:
    return BoxedArray(
        WHOLE.shape, WHOLE.dtype, tuple((box, np.zeros(box.shape, WHOLE.dtype)) for box in boxes)
    )


def assert_filled(array: BoxedArray) -> None:
    for box, found in array.boxes:
        assert found.tolist() == part(box).tolist()


def test_boxes_become_one_leaf_and_go_back_into_other_boxes(tmp_path: Path) -> None:
    info = everystep.save(tmp_path / "one", {"w": held(*QUARTERS), "n": 3})
    assert (info.leaves, info.nbytes) == (1, WHOLE.nbytes)
    assert everystep.verify(tmp_path / "one").problems == ()
    assert everystep.load(tmp_path / "one")["w"].tolist() == WHOLE.tolist()
    with everystep.open(tmp_path / "one") as opened:
        assert opened["w"][2:4, 3:5].tolist() == WHOLE[2:4, 3:5].tolist()
    target = {"w": wanted(*THIRDS[1:]), "n": 0}
    everystep.load(tmp_path / "one", target)
    assert target["n"] == 3
    assert_filled(target["w"])


def test_boxes_too_large_for_one_file(tmp_path: Path) -> None:
    large = np.random.default_rng(1).random((512, 1024))
    boxes = [Box((start, 0), (128, 1024)) for start in range(0, 512, 128)]
    parts = tuple((box, part(box, large)) for box in boxes)
    everystep.save(tmp_path / "large", {"w": BoxedArray(large.shape, large.dtype, parts)})
    assert np.array_equal(everystep.load(tmp_path / "large")["w"], large)
    column = np.zeros((512, 3))
    target = {"w": BoxedArray(large.shape, large.dtype, ((Box((0, 5), (512, 3)), column),))}
    everystep.load(tmp_path / "large", target)
    assert np.array_equal(column, large[:, 5:8])


def test_an_array_of_which_boxes_are_missing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        everystep.UnsupportedState, match=r"w: this process holds only 36 elements .* \[6, 8\]"
    ):
        everystep.save(tmp_path / "one", {"w": held(*QUARTERS[1:])})
    with pytest.raises(everystep.UnsupportedState, match="'w': an array of dtype object"):
        everystep.save(tmp_path / "one", {"w": BoxedArray((1,), np.dtype(object), ())})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_array_does_not_fit(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"w": np.zeros((6, 9), np.float32)})
    with pytest.raises(everystep.StateMismatch, match=r"w: checkpoint F32\[6,9\], target F32\[6,8\]"):
        everystep.load(tmp_path / "one", {"w": wanted(*THIRDS)})
    with pytest.raises(everystep.StateMismatch, match="v"):
        everystep.load(tmp_path / "one", {"v": wanted(*THIRDS)})


def test_a_save_reads_boxes_in_place_and_nothing_waits_for_it(tmp_path: Path) -> None:
    state = {"w": held(*QUARTERS), "mine": np.zeros(3)}
    with everystep.Checkpointer(tmp_path / "run", state) as ckpt:
        with ckpt.update():
            pass
        assert ckpt.mode == "overlap"
        pending = ckpt.save(1)
        assert pending is not None
        state["mine"][:] = 1  # it was copied
        pending.result()
        (saved,) = [event for event in ckpt.events if type(event).__name__ == "Saved"]
        assert (saved.in_place_nbytes, saved.copied_nbytes) == (WHOLE.nbytes, 24)
    assert everystep.load(tmp_path / "run")["mine"].tolist() == [0, 0, 0]


class Store:
    """Messages of threads that pretend to be ranks. It has no ``clone``, and cannot compare."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> Any:
        return self._entries.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("too late")

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._entries[key] = int(self._entries.get(key, 0)) + amount
            self._changed.notify_all()
            return int(self._entries[key])

    def delete_key(self, key: str) -> None:
        with self._changed:
            self._entries.pop(key, None)

    def has_extended_api(self) -> bool:
        return False


def on_ranks(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    store = Store()
    with ThreadPoolExecutor(world) as pool:
        jobs = [pool.submit(work, Ranks(rank, world, store)) for rank in range(world)]
        return [job.result(60) for job in jobs]


def test_ranks_without_torch_save_their_boxes_and_others_load_them(tmp_path: Path) -> None:
    shares = (QUARTERS[:1], QUARTERS[1:], ())

    def save(ranks: Ranks) -> None:
        state = {"w": held(*shares[ranks.rank]), "same": np.ones(5), "n": 7}
        everystep.save(tmp_path / "one", state, process_group=ranks, timeout=30)

    def load(ranks: Ranks) -> None:
        target = {"w": wanted(THIRDS[ranks.rank], Box((0, ranks.rank), (6, 1))), "same": np.zeros(5), "n": 0}
        everystep.load(tmp_path / "one", target, process_group=ranks, timeout=30)
        assert_filled(target["w"])
        assert (target["same"].tolist(), target["n"]) == ([1.0] * 5, 7)

    on_ranks(3, save)
    with everystep.open(tmp_path / "one") as opened:
        assert opened.world == 3
    assert everystep.verify(tmp_path / "one").problems == ()
    assert everystep.load(tmp_path / "one")["w"].tolist() == WHOLE.tolist()
    on_ranks(2, load)


def test_an_element_that_no_rank_has_is_named(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> str:
        with pytest.raises(everystep.EverystepError) as caught:
            everystep.save(
                tmp_path / "one", {"w": held(QUARTERS[ranks.rank])}, process_group=ranks, timeout=30
            )
        return str(caught.value)

    assert all("no rank has all of it; missing" in said for said in on_ranks(2, save))
    assert not list(tmp_path.iterdir())


def test_a_run_of_ranks_without_torch(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> int:
        state = {"w": held(*QUARTERS[2 * ranks.rank : 2 * ranks.rank + 2])}
        with everystep.Checkpointer(
            tmp_path / "run", state, process_group=ranks, timeout=30, preemption=False, mode="sync"
        ) as ckpt:
            assert ckpt.restore() == 0
            ckpt.save(1)
            ckpt.save(2)
            state["w"] = wanted(*QUARTERS[2 * ranks.rank : 2 * ranks.rank + 2])
            found = ckpt.restore()
            assert_filled(state["w"])
        return found

    assert on_ranks(2, train) == [2, 2]
