"""Storage that refuses: full, read-only, another's, not there. The error says what to do; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import everystep
from everystep.checkpointer.events import RemovedEarly, ShortOfSpace, read_events
from everystep.engine import faults
from everystep.store import list_steps, step_name
from support.crashes.recovery import leftovers
from support.processes.child_processes import (
    NotPermitted,
    Pipe,
    become_nobody,
    forked,
    make_read_only,
    mount_small,
    run_forked,
)
from support.states.identified_states import blank_state, identify, load_identity, make_state

WIDE = 50_000
STATE_NBYTES = 4 * WIDE
DISK_NBYTES = 1 << 20
KEEP_ALL = everystep.Keep(last=1000, every=1)
"""For good: what only `last` keeps makes room for the next one."""
WAYS = {"small": everystep.Options(), "windows": everystep.Options(small_nbytes=0)}


def on_small_disk(where: Path, work: Callable[[Pipe], None]) -> list[object]:
    """Runs `work` in a child for which `where` is a file system of `DISK_NBYTES`."""

    def mounted(pipe: Pipe) -> None:
        try:
            mount_small(where, DISK_NBYTES)
        except NotPermitted as error:
            pipe.send(f"not permitted: {error}")
            return
        work(pipe)

    said = run_forked(mounted)
    if said and str(said[0]).startswith("not permitted"):
        pytest.skip(f"{said[0]}; the injected twin of this test runs instead")
    return said


def fill_run(
    run: Path, options: everystep.Options
) -> tuple[everystep.Checkpointer, everystep.errors.StorageFull, int]:
    """Saves until there is no room. Also returns the error, and the bytes that were free before that save."""
    checkpointer = everystep.Checkpointer(run, None, keep=KEEP_ALL, options=options, mode="sync")
    for step in range(1, 100):
        checkpointer.state = make_state(step, 0, WIDE)
        free = free_nbytes(run)
        try:
            checkpointer.save(step)
        except everystep.errors.StorageFull as error:
            return checkpointer, error, free
    raise AssertionError("a disk without end")


def fill_up(path: Path) -> None:
    """Takes all the room there is."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def free_nbytes(where: Path) -> int:
    info = os.statvfs(where)
    return info.f_bavail * info.f_frsize


def check_still_good(run: Path, checkpointer: everystep.Checkpointer, failed: int) -> None:
    assert list_steps(str(run)) == list(range(1, failed))
    for step in range(1, failed):
        assert load_identity(str(run / step_name(step))) == (step, 0)
    assert leftovers(run) == []
    checkpointer.state = target = blank_state(WIDE)
    assert checkpointer.restore() == failed - 1
    assert identify(target) == (failed - 1, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_keeps_what_is_there_and_gets_its_space_back(ram: Path, way: str) -> None:
    def work(pipe: Pipe) -> None:
        run = ram / "run"
        checkpointer, error, free = fill_run(run, WAYS[way])
        failed = list_steps(str(run))[-1] + 1
        assert failed > 3
        assert step_name(failed) in str(error)
        assert "earlier checkpoints are untouched" in str(error)
        assert "Free space or keep fewer checkpoints" in str(error)
        check_still_good(run, checkpointer, failed)
        # All that the failed save took is back, but for the page of events.jsonl that tells of it.
        assert free - 4096 <= free_nbytes(run) <= free
        shutil.rmtree(run / step_name(1))
        checkpointer.state = make_state(failed, 1, WIDE)
        checkpointer.save(failed)
        assert load_identity(str(run)) == (failed, 1)
        pipe.send("good")

    assert on_small_disk(ram, work) == ["good"]


def test_a_full_disk_can_be_restored_from(ram: Path) -> None:
    """Not a single byte free, as after a crash that the logs have caused: recovery needs none."""

    def work(pipe: Pipe) -> None:
        run = ram / "run"
        checkpointer, _, _ = fill_run(run, WAYS["small"])
        failed = list_steps(str(run))[-1]
        checkpointer.close()
        (run / step_name(failed)).rename(run / f"{step_name(failed)}.partial")  # as if its save had crashed
        (run / ".lock").unlink()
        fill_up(ram / "filler")
        assert free_nbytes(run) == 0
        target = blank_state(WIDE)
        with everystep.Checkpointer(run, target, keep=KEEP_ALL, mode="sync") as checkpointer:
            check_still_good(run, checkpointer, failed)
        (ram / "filler").unlink()
        with everystep.Checkpointer(run, target, keep=everystep.Keep(last=2), mode="sync") as checkpointer:
            assert checkpointer.restore() == failed - 1
            checkpointer.state = make_state(failed, 1, WIDE)
            checkpointer.save(failed)
        assert list_steps(str(run)) == [failed - 1, failed]
        assert load_identity(str(run)) == (failed, 1)
        pipe.send("good")

    assert on_small_disk(ram, work) == ["good"]


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_with_room_for_what_is_kept_and_not_one_more_takes_every_save(ram: Path, way: str) -> None:
    """The oldest goes before the next one is begun. The newest durable one is always there."""

    def work(pipe: Pipe) -> None:
        run = ram / "run"
        wide = DISK_NBYTES // 4 * 10 // 35  # three of them fit, and a half
        with (
            warnings.catch_warnings(record=True) as caught,
            everystep.Checkpointer(run, None, options=WAYS[way], mode="sync") as checkpointer,
        ):
            warnings.simplefilter("always")
            for step in range(1, 8):
                checkpointer.state = make_state(step, 0, wide)
                checkpointer.save(step)
                assert load_identity(str(run)) == (step, 0)
                assert len(list_steps(str(run))) == min(step, 3)
            checkpointer.state = target = blank_state(wide)
            assert checkpointer.restore() == 7
            assert identify(target) == (7, 0)
        said = [str(item.message) for item in caught]
        assert len(said) == 2, said
        assert "needs space for 4 checkpoints of about" in said[0]
        assert "There is space for 3" in said[0]
        assert "no space for step 4" in said[1]
        assert "step 1 was removed" in said[1]
        told, _ = read_events(run)
        gone = [event.steps for event in told if isinstance(event, RemovedEarly)]
        assert gone == [(1,), (2,), (3,), (4,)]
        assert [event.wanted for event in told if isinstance(event, ShortOfSpace)] == [4]
        pipe.send("good")

    assert on_small_disk(ram, work) == ["good"]


def test_the_newest_durable_checkpoint_is_never_given_up_for_room(ram: Path) -> None:
    def work(pipe: Pipe) -> None:
        run = ram / "run"
        wide = DISK_NBYTES // 4 * 10 // 15  # one of them fits, and a half
        with everystep.Checkpointer(run, make_state(1, 0, wide), mode="sync") as checkpointer:
            with pytest.warns(RuntimeWarning, match="There is space for 1"):
                checkpointer.save(1)
            for step in (2, 3):
                checkpointer.state = make_state(step, 0, wide)
                with pytest.raises(everystep.errors.StorageFull):
                    checkpointer.save(step)
                assert load_identity(str(run)) == (1, 0)
        # Not even in favour of a training that starts over: until its first checkpoint is durable.
        over = everystep.Checkpointer(run, make_state(9, 0, wide), mode="sync", start_over=True)
        shortage = pytest.warns(RuntimeWarning, match="There is space for 1")
        with over, shortage, pytest.raises(everystep.errors.StorageFull):
            over.save(9)
        assert load_identity(str(run)) == (1, 0)
        pipe.send("good")

    assert on_small_disk(ram, work) == ["good"]


def test_after_a_quota_was_met_the_next_save_makes_room(ram: Path) -> None:
    """Quotas are not in what the file system says is free."""
    with everystep.Checkpointer(ram / "run", None, mode="sync") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.state = make_state(step, 0, WIDE)
            checkpointer.save(step)
        with faults.injected("write:1:EDQUOT"), pytest.raises(everystep.errors.StorageFull):
            checkpointer.save(4)
        assert checkpointer.steps == [1, 2, 3]
        with pytest.warns(RuntimeWarning, match="step 1 was removed"):
            checkpointer.save(4)
        assert checkpointer.steps == [2, 3, 4]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("call", ["fallocate", "write"])
def test_a_device_that_says_it_is_full(ram: Path, way: str, code: str, call: str) -> None:
    """The twin of the real full disk, for where nothing can be mounted; also for quotas."""
    if (way, call) == ("small", "fallocate"):
        call = "open"  # small files are not preallocated; a new one needs room for its inode all the same
    run = ram / "run"
    with everystep.Checkpointer(run, None, keep=KEEP_ALL, options=WAYS[way], mode="sync") as checkpointer:
        for step in (1, 2):
            checkpointer.state = make_state(step, 0, WIDE)
            checkpointer.save(step)
        checkpointer.state = make_state(3, 0, WIDE)
        with (
            faults.injected(f"{call}:1:{code}+"),
            pytest.raises(everystep.errors.StorageFull, match="Free space"),
        ):
            checkpointer.save(3)
        check_still_good(run, checkpointer, 3)
        checkpointer.state = make_state(3, 1, WIDE)
        checkpointer.save(3)
    assert load_identity(str(run)) == (3, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_limit_on_file_sizes_fails_the_save_and_nothing_else(ram: Path, way: str) -> None:
    """``ulimit -f``, as batch systems set it. A real failure of the kernel's, which anybody can have."""

    def work(pipe: Pipe) -> None:
        run = ram / "run"
        checkpointer = everystep.Checkpointer(
            run, make_state(1, 0, 100), keep=KEEP_ALL, options=WAYS[way], mode="sync"
        )
        checkpointer.save(1)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (STATE_NBYTES // 2, hard))
        checkpointer.state = make_state(2, 0, WIDE)
        with pytest.raises(everystep.SaveFailed, match="File too large") as caught:
            checkpointer.save(2)
        assert "earlier checkpoints are untouched" in str(caught.value)
        assert leftovers(run) == []
        assert list_steps(str(run)) == [1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpointer.save(2)
        assert load_identity(str(run)) == (2, 0)
        pipe.send("good")

    assert run_forked(work) == ["good"]


# --- permissions ----------------------------------------------------------------------------------


def as_nobody(work: Callable[[Pipe], None], warm: Path) -> list[object]:
    """Runs `work` as a user who owns nothing. Modules are imported before: maybe only root can read them."""

    def child(pipe: Pipe) -> None:
        warm_up(warm)
        become_nobody()
        work(pipe)

    return run_forked(child)


def warm_up(warm: Path) -> None:
    """Every module that saving, loading and failing need."""
    with everystep.Checkpointer(warm / "run", make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)
        checkpointer.restore()
    with faults.injected("mkdir:1:EACCES"), pytest.raises(everystep.errors.StorageDenied):
        everystep.save(warm / "denied", make_state(1))


@pytest.mark.parametrize("way", WAYS)
def test_an_unwritable_directory_says_whom_to_give_it_to(place: Path, tmp_path: Path, way: str) -> None:
    everystep.save(place / "old", make_state(1))
    place.chmod(0o555)

    def work(pipe: Pipe) -> None:
        with pytest.raises(everystep.errors.StorageDenied) as caught:
            everystep.save(place / "new", make_state(2), options=WAYS[way])
        assert isinstance(caught.value, PermissionError)
        with pytest.raises(everystep.errors.StorageDenied) as for_run:
            everystep.Checkpointer(place / "run", make_state(2), options=WAYS[way], mode="sync")
        assert identify(everystep.load(place / "old")) == (1, 0)
        assert sorted(os.listdir(place)) == ["old"]
        pipe.send(str(caught.value))
        pipe.send(str(for_run.value))

    user = 65534 if os.getuid() == 0 else os.getuid()
    messages = as_nobody(work, tmp_path)
    assert len(messages) == 2
    for message in messages:
        assert str(place) in str(message)
        assert f"make it writable for user {user} (chown or chmod), or choose another directory" in str(
            message
        )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_run_of_another_owner_says_whom_to_give_it_to(place: Path, tmp_path: Path) -> None:
    """Made by root in a container, continued by a user outside."""
    run = place / "run"
    with everystep.Checkpointer(run, make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)

    def work(pipe: Pipe) -> None:
        with pytest.raises(everystep.errors.StorageDenied) as caught:
            everystep.Checkpointer(run, make_state(2), mode="sync")
        pipe.send(str(caught.value))
        assert identify(everystep.load(run)) == (1, 0)

    (message,) = as_nobody(work, tmp_path)
    assert "make it writable for user 65534 (chown or chmod)" in str(message)
    assert list_steps(str(run)) == [1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_checkpoint_that_may_not_be_read_is_an_error_that_names_it(place: Path, tmp_path: Path) -> None:
    everystep.save(place / "old", make_state(1))
    (place / "old" / "r00000.v0.safetensors").chmod(0o600)

    def work(pipe: Pipe) -> None:
        with pytest.raises(everystep.errors.ReadFailed, match="Permission denied") as caught:
            everystep.load(place / "old")
        pipe.send(str(caught.value))

    (message,) = as_nobody(work, tmp_path)
    assert str(place / "old" / "r00000.v0.safetensors") in str(message)


def test_a_read_only_file_system_is_named_as_such_and_can_be_read(ram: Path) -> None:
    def work(pipe: Pipe) -> None:
        everystep.save(ram / "old", make_state(1))
        with everystep.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
            checkpointer.save(1)
        make_read_only(ram)
        for options in WAYS.values():
            with pytest.raises(
                everystep.errors.StorageDenied, match="is read-only: choose another directory"
            ):
                everystep.save(ram / "new", make_state(2), options=options)
        with pytest.raises(everystep.errors.StorageDenied, match="is read-only"):
            everystep.Checkpointer(ram / "run", make_state(2), mode="sync")
        assert identify(everystep.load(ram / "old")) == (1, 0)
        assert identify(everystep.load(ram / "run")) == (1, 0)
        assert everystep.verify(ram / "old").intact
        pipe.send("good")

    assert on_small_disk(ram, work) == ["good"]


def test_a_device_that_turns_read_only_is_named_as_such(ram: Path) -> None:
    """The twin of the above, injected; ext4 does this after an error."""
    everystep.save(ram / "old", make_state(1))
    with (
        faults.injected("mkdir:1:EROFS"),
        pytest.raises(everystep.errors.StorageDenied, match="is read-only"),
    ):
        everystep.save(ram / "new", make_state(2))
    assert identify(everystep.load(ram / "old")) == (1, 0)


# --- nothing there --------------------------------------------------------------------------------


def test_a_directory_above_that_cannot_be_made_is_named(ram: Path) -> None:
    with faults.injected("mkdir:2:ENOSPC"), pytest.raises(everystep.errors.StorageFull) as caught:
        everystep.save(ram / "not" / "there" / "new", make_state(1))
    assert str(ram / "not" / "there" / "new") in str(caught.value)
    assert not (ram / "not" / "there").exists()


def test_a_run_makes_its_own_directories(ram: Path) -> None:
    with everystep.Checkpointer(ram / "not" / "there" / "run", make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)
    assert load_identity(str(ram / "not" / "there" / "run")) == (1, 0)


def test_a_file_in_the_way_is_an_error_and_stays(ram: Path) -> None:
    (ram / "file").write_text("mine")
    for save in (
        lambda: everystep.save(ram / "file" / "new", make_state(1)),
        lambda: everystep.Checkpointer(ram / "file", make_state(1), mode="sync"),
        lambda: everystep.Checkpointer(ram / "file" / "run", make_state(1), mode="sync"),
        lambda: everystep.save(ram / "file", make_state(1)),
    ):
        with pytest.raises(everystep.EverystepError) as caught:
            save()
        assert str(ram / "file") in str(caught.value)
    assert (ram / "file").read_text() == "mine"


def test_a_run_that_vanishes_under_its_writer_fails_the_save(ram: Path) -> None:
    """A volume that was unmounted, a directory that was removed."""
    with everystep.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)
        shutil.rmtree(ram / "run")
        with pytest.raises(everystep.errors.StorageMissing, match="check that its volume is mounted"):
            checkpointer.save(2)


def test_a_child_that_hangs_is_noticed() -> None:
    """Of these tests themselves: no wait is without an end."""
    with forked(lambda pipe: signal.pause()) as child, pytest.raises(TimeoutError):
        child.wait(0.1)
