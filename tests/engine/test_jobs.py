"""Jobs under way: waiting, cancelling, failing, being interrupted, being forgotten."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from everystep import engine
from everystep.engine import (
    CHUNK_NBYTES,
    Backend,
    Consumed,
    Produced,
    ReadPiece,
    Tuning,
    WritePiece,
    faults,
    fs,
)
from everystep.errors import EngineTimeout
from support.states.random_pieces import (
    PAGE,
    Windows,
    checksums,
    memory_of,
    place,
    random_bytes,
    small_windows,
)
from support.states.waiting_jobs import PATIENCE, Gate


def test_submitting_returns_at_once_and_waiting_has_a_limit(backend: Backend, tmp_path: Path) -> None:
    gate = Gate(10 * PAGE)
    job = gate.start(tmp_path / "f", backend)
    assert not job.done
    assert job.progress == 0
    for timeout in (0, 0.01, 0.15):
        with pytest.raises(EngineTimeout, match="goes on in the background"):
            job.wait(timeout)
    with pytest.raises(RuntimeError, match="still running"):
        job.checksums()
    with pytest.raises(RuntimeError, match="still running"):
        fs.sync([job])
    gate.opened.set()
    job.wait(PATIENCE)
    fs.sync([job])
    assert job.done
    assert (tmp_path / "f").read_bytes() == bytes([7]) * 10 * PAGE


def test_a_time_out_is_a_builtin_one() -> None:
    assert issubclass(EngineTimeout, TimeoutError)


def test_a_cancelled_job_stops_early_and_says_so(backend: Backend, tmp_path: Path) -> None:
    gate = Gate(1000 * PAGE)
    job = gate.start(tmp_path / "f", backend)
    job.cancel()
    gate.opened.set()
    with pytest.raises(InterruptedError, match="cancelled"):
        job.wait(PATIENCE)
    assert gate.windows == 1
    with pytest.raises(InterruptedError):
        fs.sync([job])


def test_a_job_forgotten_while_it_runs_ends_quietly(backend: Backend, tmp_path: Path) -> None:
    for attempt in range(10):
        gate = Gate(2000 * PAGE)
        job = gate.start(tmp_path / f"{attempt}", backend)
        gate.opened.set()
        del job  # cancels and waits, without holding the interpreter that the producer needs
        if gate.windows < 125:
            break
        # All windows before the cancel: this thread had to wait for a processor. Rarely twice.
    assert gate.windows < 125


def test_an_interrupt_while_waiting_leaves_the_job_running(backend: Backend, tmp_path: Path) -> None:
    waiting, opened = threading.Event(), threading.Event()

    def fill(window: memoryview, offset: int) -> None:
        if offset == 0:
            assert waiting.wait(PATIENCE)
            os.kill(os.getpid(), signal.SIGINT)
            assert opened.wait(PATIENCE)
        window[:] = bytes([9]) * len(window)

    job = engine.write(
        tmp_path / "f", 40 * PAGE, [WritePiece(0, Produced(40 * PAGE, fill))], tuning=small_windows(backend)
    )
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come as soon as the event is set
        waiting.set()
        job.wait(PATIENCE)
    assert not job.done
    opened.set()
    job.wait(PATIENCE)
    assert (tmp_path / "f").read_bytes() == bytes([9]) * 40 * PAGE


def test_an_interrupt_while_reading_ends_the_read(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(200 * PAGE, 0)
    data.tofile(tmp_path / "f")
    windows = Windows(np.zeros_like(data))

    def drain(window: memoryview, offset: int) -> None:
        if not windows.seen:
            os.kill(os.getpid(), signal.SIGINT)
        windows.drain(window, offset)

    def read(drain: Callable[[memoryview, int], None], progress: Callable[[int], None] | None) -> None:
        piece = ReadPiece(0, Consumed(data.nbytes, drain))
        engine.read(tmp_path / "f", [piece], tuning=small_windows(backend), verify=False, progress=progress)

    for progress in (None, lambda done: None):
        windows.seen.clear()
        with pytest.raises(KeyboardInterrupt):
            read(drain, progress)
    windows.seen.clear()
    read(windows.drain, None)
    assert windows.covered_once()
    assert np.array_equal(windows.data, data)


def test_an_interrupt_is_heard_in_the_middle_of_a_long_read(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(9 << 20, 0)
    data.tofile(tmp_path / "f")

    def interrupt() -> None:
        while not faults.count_calls() > 1:  # the read of the first window is under way
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    out = np.zeros_like(data)
    with faults.injected("read:1:slow20+"):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.read(
                tmp_path / "f", [ReadPiece(0, memory_of(out))], tuning=small_windows(backend), verify=False
            )
        assert faults.count_calls() < 100  # of 144 windows
    thread.join(PATIENCE)


class Unusual(Exception):
    pass


@pytest.mark.parametrize("background", [True, False])
def test_what_a_producer_raises_comes_out_unchanged(
    backend: Backend, tmp_path: Path, background: bool
) -> None:
    error = Unusual("no such device")

    def fill(window: memoryview, offset: int) -> None:
        if offset:
            raise error

    job = engine.write(
        tmp_path / "f",
        100 * PAGE,
        [WritePiece(0, Produced(100 * PAGE, fill))],
        tuning=small_windows(backend),
        background=background,
    )
    with pytest.raises(Unusual) as caught:
        job.wait(PATIENCE)
    assert caught.value is error
    assert caught.traceback[-1].name == "fill"
    # It failed for good, and asking again is safe.
    for again in (job.wait, job.checksums, job.stats, lambda: fs.sync([job])):
        with pytest.raises(RuntimeError, match="raised already"):
            again()


def test_a_write_tells_how_far_it_is_while_it_is_waited_for(backend: Backend, tmp_path: Path) -> None:
    goes_on, told = threading.Event(), list[int]()

    def fill(window: memoryview, offset: int) -> None:
        if offset >= (8 << 20) // 2:
            goes_on.wait(60)

    def progress(done: int) -> None:
        told.append(done)
        if done:
            goes_on.set()  # so the job ends only after the callback saw it

    pieces = [WritePiece(0, Produced(8 << 20, fill))]
    with engine.write(tmp_path / "f", 8 << 20, pieces, tuning=small_windows(backend)) as job:
        job.wait(progress=progress)
    assert told == sorted(told)
    assert 0 < told[-1] < 8 << 20


def test_a_write_whose_progress_fails_stops_and_lets_go_of_its_sources(
    backend: Backend, tmp_path: Path
) -> None:
    goes_on = threading.Event()

    def fill(window: memoryview, offset: int) -> None:
        goes_on.wait(60)

    def progress(done: int) -> None:
        goes_on.set()
        raise KeyError("this one")

    pieces = [WritePiece(0, Produced(8 << 20, fill))]
    job = engine.write(tmp_path / "f", 8 << 20, pieces, tuning=small_windows(backend))
    with pytest.raises(KeyError, match="this one"), job:
        job.wait(progress=progress)
    assert job.done


def test_a_read_whose_progress_fails_has_let_go_of_its_destinations(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(2000 * PAGE, 0)
    data.tofile(tmp_path / "f")
    windows, opened = Windows(np.zeros_like(data)), threading.Event()

    def drain(window: memoryview, offset: int) -> None:
        assert opened.wait(PATIENCE)
        windows.drain(window, offset)

    def progress(done: int) -> None:
        opened.set()
        raise Unusual

    pieces = [ReadPiece(0, Consumed(data.nbytes, drain))]
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(Unusual) as caught:
        engine.read(tmp_path / "f", pieces, tuning=small_windows(backend), verify=False, progress=progress)
    while len(os.listdir("/proc/self/task")) > before:  # one that was joined may be listed a little longer
        time.sleep(0.001)
    assert len(windows.seen) < 125
    assert caught.tb is not None  # it keeps the frame that had the job


def test_what_a_consumer_raises_comes_out_unchanged(backend: Backend, tmp_path: Path) -> None:
    random_bytes(100 * PAGE, 0).tofile(tmp_path / "f")
    error = Unusual("device gone")

    def drain(window: memoryview, offset: int) -> None:
        if offset:
            raise error

    for progress in (None, lambda done: None):
        with pytest.raises(Unusual) as caught:
            engine.read(
                tmp_path / "f",
                [ReadPiece(0, Consumed(100 * PAGE, drain))],
                tuning=small_windows(backend),
                verify=False,
                progress=progress,
            )
        assert caught.value is error


def test_a_failed_job_keeps_nothing_alive(backend: Backend, tmp_path: Path) -> None:
    class Device:
        def fill(self, window: memoryview, offset: int) -> None:
            raise Unusual

    def attempt() -> weakref.ref[Device]:
        device = Device()
        pieces = [WritePiece(0, Produced(PAGE, device.fill))]
        with pytest.raises(Unusual):
            engine.write(tmp_path / "f", PAGE, pieces, tuning=small_windows(backend)).wait()
        return weakref.ref(device)

    device = attempt()
    gc.collect()
    assert device() is None


def test_a_finished_job_lets_go_of_producers_that_hold_it(backend: Backend, tmp_path: Path) -> None:
    """No garbage collector sees through the native side, so a circle through it must not last."""

    class Device:
        job: object = None

        def fill(self, window: memoryview, offset: int) -> None:
            window[:] = bytes(len(window))

    def attempt() -> weakref.ref[Device]:
        device = Device()
        pieces = [WritePiece(0, Produced(PAGE, device.fill))]
        job = engine.write(tmp_path / "f", PAGE, pieces, tuning=small_windows(backend))
        device.job = job.native
        job.wait(PATIENCE)
        return weakref.ref(device)

    device = attempt()
    gc.collect()
    assert device() is None


def test_a_window_cannot_be_used_after_its_callback(backend: Backend, tmp_path: Path) -> None:
    kept: list[memoryview] = []
    pieces = [WritePiece(0, Produced(PAGE, lambda window, offset: kept.append(window)))]
    engine.write(tmp_path / "f", PAGE, pieces, tuning=small_windows(backend)).wait()
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def _missing(folder: Path) -> Path:
    return folder / "nowhere" / "f"


def _in_a_file(folder: Path) -> Path:
    (folder / "file").write_bytes(b"")
    return folder / "file" / "f"


def _a_directory(folder: Path) -> Path:
    (folder / "directory").mkdir()
    return folder / "directory"


@pytest.mark.parametrize(
    ("where", "code"), [(_missing, errno.ENOENT), (_in_a_file, errno.ENOTDIR), (_a_directory, errno.EISDIR)]
)
def test_errors_of_the_system_say_what_and_where(
    backend: Backend, tmp_path: Path, where: Callable[[Path], Path], code: int
) -> None:
    path = where(tmp_path)
    for _ in range(2):  # as often as it is asked for
        with pytest.raises(OSError, match=r"\(open\)") as caught:
            engine.write(path, PAGE, [], tuning=small_windows(backend), recycle=True).wait()
        assert (caught.value.errno, caught.value.filename) == (code, os.fspath(path))
    if code != errno.EISDIR:
        with pytest.raises(OSError, match=r"\(open\)") as caught:
            engine.read(path, [], tuning=small_windows(backend))
        assert (caught.value.errno, caught.value.filename) == (code, os.fspath(path))


@pytest.mark.parametrize(("nth", "small_nbytes"), [(1, 0), (3, 0), (1, 1 << 30)])
def test_a_device_that_fails_in_the_middle_fails_the_job(
    backend: Backend, tmp_path: Path, nth: int, small_nbytes: int
) -> None:
    data = random_bytes(100 * PAGE, 0)
    pieces = [WritePiece(0, memory_of(data))]
    tuning = small_windows(backend, small_nbytes=small_nbytes)
    with faults.injected(f"write:{nth}:EIO"):
        job = engine.write(tmp_path / "f", data.nbytes, pieces, tuning=tuning)
        with pytest.raises(OSError, match=r"\(write\)") as caught:
            job.wait(PATIENCE)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, os.fspath(tmp_path / "f"))


def test_transfers_that_fall_short_are_continued(backend: Backend, tmp_path: Path) -> None:
    data = place(random_bytes(100 * PAGE, 0), 0)
    with faults.injected("write:1:short,write:3:short,write:4:short"):
        engine.write(
            tmp_path / "f", data.nbytes, [WritePiece(0, memory_of(data))], tuning=small_windows(backend)
        ).wait()
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), data)
    out = np.zeros_like(data)
    with faults.injected("read:1:short,read:3:short,read:4:short"):
        found = engine.read(
            tmp_path / "f", [ReadPiece(0, memory_of(out), checksums(data))], tuning=small_windows(backend)
        )
    assert found == []
    assert np.array_equal(out, data)


def test_syncing_twice_is_refused(backend: Backend, tmp_path: Path) -> None:
    job = engine.write(tmp_path / "f", PAGE, [], tuning=small_windows(backend))
    job.wait()
    fs.sync([job], os.fspath(tmp_path))
    with pytest.raises(RuntimeError, match="synced already"):
        fs.sync([job])


def test_many_jobs_at_once(backend: Backend, tmp_path: Path) -> None:
    arrays = [place(random_bytes(3 * CHUNK_NBYTES + n * PAGE, n), 0) for n in range(12)]
    jobs = [
        engine.write(
            tmp_path / f"{n}",
            array.nbytes,
            [WritePiece(0, memory_of(array))],
            tuning=Tuning(backend, small_nbytes=0),
        )
        for n, array in enumerate(arrays)
    ]
    for job in jobs:
        job.wait(PATIENCE)
    fs.sync(jobs, os.fspath(tmp_path))
    for n, (job, array) in enumerate(zip(jobs, arrays, strict=True)):
        assert job.checksums() == [checksums(array)]
        assert np.array_equal(np.fromfile(tmp_path / f"{n}", np.uint8), array)


def test_jobs_from_many_threads(backend: Backend, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            data = place(random_bytes(CHUNK_NBYTES, number), 0)
            for turn in range(4):
                job = engine.write(
                    tmp_path / f"{number}",
                    data.nbytes,
                    [WritePiece(0, memory_of(data))],
                    tuning=small_windows(backend),
                    recycle=turn > 0,
                )
                job.wait(PATIENCE)
                fs.sync([job])
                out = np.zeros_like(data)
                piece = ReadPiece(0, memory_of(out), checksums(data))
                assert engine.read(tmp_path / f"{number}", [piece], tuning=small_windows(backend)) == []
                assert np.array_equal(out, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == []
