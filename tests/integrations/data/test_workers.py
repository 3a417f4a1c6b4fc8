"""Promise: workers change neither data nor position, however they are started, and nothing hangs."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

import everystep
from everystep.integrations.data import Loader
from support.states.datasets import Augmented, Dying, Failing, Noted, jitter, joined, lists, take

PATIENCE = 240
"""Seconds after which torch itself gives up on a worker: a hang becomes an error."""


def augmented(**how: Any) -> Loader:
    return Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter, **how)


def workers(count: int = 2, **how: Any) -> dict[str, Any]:
    return {"num_workers": count, "timeout": PATIENCE, **how}


@pytest.mark.parametrize(
    "how", [workers(1), workers(2), workers(2, prefetch_factor=1)], ids=["one", "two", "close"]
)
def test_batches_are_the_same_with_any_number_of_workers(how: dict[str, Any]) -> None:
    whole = lists(augmented())
    before = random.getstate(), torch.get_rng_state().tolist()
    assert lists(augmented(**how)) == whole
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_the_position_is_that_of_the_delivered_batches_and_nothing_is_replayed(tmp_path: Path) -> None:
    first = Noted(40, tmp_path / "before")
    loader = Loader(first, batch_size=2, shuffle=True, **workers(prefetch_factor=4))
    iterator = iter(loader)
    delivered = joined(take(iterator, 3))
    assert loader.state_dict()["position"] == 3
    deadline = time.monotonic() + PATIENCE
    while len(first.accesses()) == len(delivered):
        assert time.monotonic() < deadline, "nothing was prefetched: this would prove nothing"
        time.sleep(0.01)
    everystep.save(tmp_path / "c", {"data": loader})
    del iterator

    second = Noted(40, tmp_path / "after")
    again = Loader(second, batch_size=2, shuffle=True, **workers())
    everystep.load(tmp_path / "c", into={"data": again})
    rest = joined(lists(again))
    assert sorted(second.accesses()) == sorted(rest)
    assert sorted(delivered + rest) == list(range(40))


@pytest.mark.parametrize("change", [(0, 2), (2, 0), (2, 1)], ids=str)
def test_the_number_of_workers_may_change_on_resume(change: tuple[int, int]) -> None:
    before, after = (augmented(**(workers(count) if count else {})) for count in change)
    whole = lists(augmented())
    found = take(iter(before), 2)
    after.load_state_dict(before.state_dict())
    assert found + lists(after) == whole


def test_persistent_workers_serve_several_epochs_a_broken_loop_and_a_restore() -> None:
    plain, kept = augmented(), augmented(**workers(persistent_workers=True))
    wanted = [lists(plain) for _ in range(3)]
    assert lists(kept) == wanted[0]
    assert take(iter(kept), 2) == wanted[1][:2]
    state = kept.state_dict()
    assert lists(kept) == wanted[1][2:]
    assert lists(kept) == wanted[2]
    kept.load_state_dict(state)
    assert lists(kept) == wanted[1][2:]
    other = augmented(**workers(persistent_workers=True))
    other.load_state_dict({**state, "seed": 5})
    assert lists(other) == wanted[1][2:]


def test_a_saved_seed_reaches_workers_that_were_started_with_another() -> None:
    kept = Loader(Augmented(), batch_size=4, seed=6, **workers(1, persistent_workers=True))
    take(iter(kept), 2)
    right = Loader(Augmented(), batch_size=4, seed=7)
    take(iter(right), 2)
    kept.load_state_dict(right.state_dict())
    assert lists(kept) == lists(right)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_a_worker(method: str) -> None:
    loader = augmented(**workers(1, multiprocessing_context=method))
    reference = augmented()
    assert take(iter(loader), 2) == take(iter(reference), 2)


def show_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.marked = f"{type(info.dataset).__name__} {worker} {random.random()}"  # type: ignore[attr-defined]


class Marked(Augmented):
    marked = ""

    def __getitem__(self, index: int) -> Any:
        return self.marked


def test_worker_init_fn_sees_the_user_s_dataset_and_repeatable_numbers() -> None:
    def run() -> list[Any]:
        return lists(
            Loader(Marked(), batch_size=23, collate_fn=list, worker_init_fn=show_dataset, **workers(1))
        )

    first = run()
    assert first[0][0].startswith("Marked 0 0.")
    assert run() == first


@pytest.fixture
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Garbage collection off: what ends now has ended because its last owner let go.

    And time for that: torch terminates a worker that a busy machine keeps from ending for five seconds.
    """
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 60.0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_ended(processes: list[Any]) -> None:
    assert processes
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0, "it had to be told twice"


@pytest.mark.usefixtures("_no_collection")
def test_workers_end_with_the_loop_that_started_them() -> None:
    loader = augmented(**workers())
    iterator: Any = iter(loader)
    next(iterator)
    processes = list(iterator._inner._workers)
    assert all(process.is_alive() for process in processes)
    del iterator
    assert_ended(processes)


@pytest.mark.usefixtures("_no_collection")
def test_persistent_workers_end_with_their_loader() -> None:
    loader = augmented(**workers(persistent_workers=True))
    iterator: Any = iter(loader)
    next(iterator)
    processes = list(iterator._inner._workers)
    del iterator
    assert all(process.is_alive() for process in processes)
    del loader
    assert_ended(processes)


@pytest.mark.usefixtures("_no_collection")
def test_a_batch_that_failed_is_made_again_by_new_workers(tmp_path: Path) -> None:
    dataset = Failing(5, tmp_path / "back", OSError)
    loader = Loader(dataset, batch_size=2, **workers(1))
    iterator: Any = iter(loader)
    assert take(iterator, 2) == [[0, 1], [2, 3]]
    processes = list(iterator._inner._workers)
    with pytest.raises(OSError, match=r"(?s)worker process 0.*in __getitem__.*file server"):
        next(iterator)
    assert loader.position == 2
    dataset.marker.touch()
    assert take(iterator, 2) == [[4, 5], [6, 7]]
    assert_ended(processes)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_dies_is_an_error_and_not_a_hang(persistent: bool, tmp_path: Path) -> None:
    # In a process of its own: torch raises from its queue or from a signal handler, at any moment, or both.
    marker = tmp_path / "back"
    script = f"""
        import os
        from pathlib import Path
        from support.states.datasets import Dying
        from everystep.integrations.data import Loader

        def tell(error):
            os.write(1, f"{{loader.position}} {{type(error).__name__}}\\n".encode())
            os._exit(0)

        loader = Loader(Dying(5, Path({str(marker)!r})), batch_size=2, num_workers=1,
                        timeout={PATIENCE}, persistent_workers={persistent})
        try:
            try:
                for batch in loader: pass
            except Exception as error:
                tell(error)
        except Exception as error:
            tell(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    position, kind = done.stdout.splitlines()[0].split()
    assert kind in ("RuntimeError", "ConnectionResetError", "EOFError")
    assert int(position) <= 2  # the third batch holds the sample that kills
    marker.touch()
    again = Loader(Dying(5, marker), batch_size=2, **workers(1))
    state = {**again.state_dict(), "position": int(position)}
    again.load_state_dict(state)
    assert joined(lists(again)) == list(range(2 * int(position), 12))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_script_that_ends_in_the_middle_of_a_loop_ends(persistent: bool, tmp_path: Path) -> None:
    script = f"""
        import everystep
        from everystep.integrations.data import Loader
        loader = Loader(range(100), batch_size=2, num_workers=2, persistent_workers={persistent})
        iterator = iter(loader)
        with everystep.Checkpointer({str(tmp_path)!r}, {{"data": loader}}, mode="sync") as ckpt:
            for step in range(3):
                next(iterator)
                ckpt.save(step + 1)
        print("last", loader.position, flush=True)
        raise KeyboardInterrupt
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "last 3" in done.stdout
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode != 0
