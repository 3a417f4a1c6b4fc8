"""Which backend is used where: by probing, by force, and where a system forbids the best one."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everystep import engine
from everystep.engine import (
    BACKENDS,
    Capabilities,
    Consumed,
    ReadPiece,
    Tuning,
    WritePiece,
    capabilities,
    choose_backend,
    faults,
    fs,
)
from everystep.engine import probe as probing
from everystep.errors import EngineUnavailable
from support.crashes.forbidden_calls import run
from support.states.random_pieces import PAGE, Windows, checksums, memory_of, random_bytes, small_windows

ABLE = Capabilities(True, "", True, "", 512, 512)
CASES = [
    (ABLE, "uring"),
    (replace(ABLE, uring=False, uring_reason="forbidden here"), "threads"),
    (replace(ABLE, direct=False, direct_reason="no such thing"), "buffered"),
    (
        replace(ABLE, uring=False, uring_reason="forbidden here", direct=False, direct_reason="none"),
        "buffered",
    ),
]


def pretend(monkeypatch: pytest.MonkeyPatch, able: Capabilities) -> None:
    monkeypatch.setattr(probing, "capabilities", lambda directory: able)


@pytest.mark.parametrize(("able", "best"), CASES)
def test_the_best_backend_that_works_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, able: Capabilities, best: str
) -> None:
    pretend(monkeypatch, able)
    assert choose_backend(tmp_path) == best
    assert choose_backend(tmp_path, "buffered") == "buffered"


@pytest.mark.parametrize(("able", "best"), CASES[1:])
def test_forcing_what_cannot_work_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, able: Capabilities, best: str
) -> None:
    pretend(monkeypatch, able)
    reason = able.direct_reason or able.uring_reason
    with pytest.raises(EngineUnavailable, match=reason):
        choose_backend(tmp_path, "uring")
    if not able.direct:
        with pytest.raises(EngineUnavailable, match=reason):
            choose_backend(tmp_path, "threads")


def test_the_environment_forces_and_an_argument_overrules_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, ABLE)
    monkeypatch.setenv("EVERYSTEP_BACKEND", "threads")
    assert choose_backend(tmp_path) == "threads"
    assert choose_backend(tmp_path, "buffered") == "buffered"
    assert engine.choose_read_backend(tmp_path / "f") == "threads"
    monkeypatch.setenv("EVERYSTEP_BACKEND", "")
    assert choose_backend(tmp_path) == "uring"


def test_an_unknown_backend_is_refused_and_the_known_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(EngineUnavailable, match=r"'tape'.*uring, threads, buffered"):
        choose_backend(tmp_path, "tape")
    monkeypatch.setenv("EVERYSTEP_BACKEND", "drum")
    with pytest.raises(EngineUnavailable, match="'drum'"):
        choose_backend(tmp_path)
    with pytest.raises(EngineUnavailable, match="'drum'"):
        engine.choose_read_backend(tmp_path / "f")


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    probing._known.pop(os.stat(tmp_path).st_dev, None)
    found = capabilities(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert choose_backend(tmp_path) == found.best
    assert bool(found.uring_reason) == (not found.uring)
    assert bool(found.direct_reason) == (not found.direct)


def test_a_directory_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        capabilities(tmp_path / "nowhere")


def round_trip(path: Path, backend: engine.Backend) -> None:
    data = random_bytes(300 * PAGE, 1)
    tuning = Tuning(backend, small_nbytes=0)
    job = engine.write(path, data.nbytes, [WritePiece(0, memory_of(data))], tuning=tuning)
    job.wait()
    fs.sync([job], os.fspath(path.parent))
    out = np.zeros_like(data)
    assert engine.read(path, [ReadPiece(0, memory_of(out), checksums(data))], tuning=tuning) == []
    assert np.array_equal(out, data)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_filesystem_in_memory_works_with_what_the_probe_chose(in_memory: Path) -> None:
    """Older kernels have no direct I/O on tmpfs, newer ones do; either way the choice must work."""
    round_trip(in_memory / "f", choose_backend(in_memory))


def test_a_job_without_a_backend_goes_through_the_page_cache(tmp_path: Path) -> None:
    """Which can write 100 bytes more than a block, unlike direct I/O."""
    engine.write(tmp_path / "f", PAGE + 100, [], tuning=Tuning(small_nbytes=0)).wait()
    assert (tmp_path / "f").stat().st_size == PAGE + 100


# --- where the system forbids something: each in a process of its own ---------------------------------------


def test_where_io_uring_is_forbidden_threads_take_its_place(tmp_path: Path) -> None:
    """What the seccomp profile of a container does: io_uring_setup fails with EPERM."""
    if choose_backend(tmp_path) == "buffered":
        pytest.skip("there is no direct I/O here, so neither is in question")
    script = """
        forbid(IO_URING_SETUP, errno.EPERM)
        import numpy as np, everystep
        from everystep.engine import capabilities, choose_backend
        able = capabilities(sys.argv[1])
        assert not able.uring and "not permitted" in able.uring_reason, able
        state = {"w": np.arange(1 << 20)}
        everystep.save(sys.argv[1] + "/a", state)
        assert (everystep.load(sys.argv[1] + "/a")["w"] == state["w"]).all()
        try:
            everystep.save(sys.argv[1] + "/b", state, options=everystep.Options(backend="uring"))
        except everystep.errors.EngineUnavailable as error:
            assert "threads" in str(error), error
        print(choose_backend(sys.argv[1]))
    """
    assert run(script, tmp_path) == "threads"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_rings_that_are_forbidden_later_are_done_without(tmp_path: Path) -> None:
    """An administrator sets kernel.io_uring_disabled while a training runs: it goes on saving."""
    if choose_backend(tmp_path) != "uring":
        pytest.skip("there are no rings here")
    script = """
        import numpy as np, everystep
        from everystep.engine import choose_backend
        state = {"w": np.arange(1 << 20)}
        everystep.save(sys.argv[1] + "/a", state)
        forbid(IO_URING_SETUP, errno.EPERM)
        everystep.save(sys.argv[1] + "/b", state)
        for name in "ab":
            assert (everystep.load(sys.argv[1] + "/" + name)["w"] == state["w"]).all()
        print(choose_backend(sys.argv[1]))
    """
    assert run(script, tmp_path) == "uring"


def test_where_no_thread_can_be_started_the_error_says_so(tmp_path: Path) -> None:
    """The limit of processes of a user counts threads. That is no fault of the storage."""
    script = """
        import resource
        from everystep import engine
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            engine.write(sys.argv[1] + "/f", 4096, [], tuning=engine.Tuning()).wait()
        except BlockingIOError as error:
            print(error.strerror)
    """
    assert run(script, tmp_path).startswith("no thread can be started: ")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of a call is needed")
@pytest.mark.parametrize("nbytes", [1000, 3 << 20])
@pytest.mark.parametrize(("code", "outcome"), [("EIO", "lost"), ("EUCLEAN", "lost"), ("ENOSYS", "saved")])
def test_bytes_lost_on_the_way_to_the_device_fail_the_save(
    tmp_path: Path, nbytes: int, code: str, outcome: str
) -> None:
    """Where writing back is started early, a file system may tell then, and not again at the sync."""
    script = """
        import numpy as np, everystep
        forbid(SYNC_FILE_RANGE, getattr(errno, sys.argv[3]))
        state = {"w": np.ones(int(sys.argv[2]), np.uint8)}
        try:
            everystep.save(sys.argv[1] + "/a", state, options=everystep.Options(backend="buffered"))
            print("saved")
        except everystep.SaveFailed as error:
            assert error.errno == getattr(errno, sys.argv[3])
            assert not os.path.exists(sys.argv[1] + "/a")
            print("lost")
    """
    assert run(script, tmp_path, nbytes, code) == outcome


def test_a_file_that_refuses_direct_reads_is_read_through_the_page_cache(
    backend: engine.Backend, tmp_path: Path
) -> None:
    """In an overlay it may lie on another file system than the one that was probed in its directory."""
    data = random_bytes(300 * PAGE, 5)
    data.tofile(tmp_path / "f")
    out = np.zeros_like(data)
    piece = ReadPiece(0, memory_of(out), checksums(data))
    with faults.injected("open:1:EINVAL"):
        if backend == "buffered":  # which asks for nothing special
            with pytest.raises(OSError, match=r"\(open\)"):
                engine.read(tmp_path / "f", [piece], tuning=Tuning(backend, small_nbytes=0))
        else:
            assert engine.read(tmp_path / "f", [piece], tuning=Tuning(backend, small_nbytes=0)) == []
            assert np.array_equal(out, data)


@pytest.mark.parametrize("nbytes", [300 * PAGE, 5 << 20])
def test_a_file_that_refuses_its_first_direct_read_is_read_through_the_page_cache(
    backend: engine.Backend, tmp_path: Path, nbytes: int
) -> None:
    """Some file systems take O_DIRECT when a file is opened, and refuse only then."""
    data = random_bytes(nbytes, 5)
    data.tofile(tmp_path / "f")
    windows = Windows(np.zeros_like(data))
    piece = ReadPiece(0, Consumed(data.nbytes, windows.drain), checksums(data))
    tuning = small_windows(backend)
    with faults.injected("read:1:EINVAL"):
        if backend == "buffered":  # which asks for nothing special
            with pytest.raises(OSError, match=r"\(read\)"):
                engine.read(tmp_path / "f", [piece], tuning=tuning)
        else:
            assert engine.read(tmp_path / "f", [piece], tuning=tuning) == []
            assert windows.covered_once()
            assert np.array_equal(windows.data, data)


def test_a_later_read_that_is_refused_is_an_error(backend: engine.Backend, tmp_path: Path) -> None:
    """By then bytes have been handed out."""
    data = random_bytes(300 * PAGE, 5)
    data.tofile(tmp_path / "f")
    piece = ReadPiece(0, memory_of(np.zeros_like(data)), checksums(data))
    with faults.injected("read:15:EINVAL"), pytest.raises(OSError, match=r"\(read\)"):
        engine.read(tmp_path / "f", [piece], tuning=small_windows(backend))


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A directory anybody may read and only its owner may write, with a file of 300 pages in it."""
    with tempfile.TemporaryDirectory() as folder:
        random_bytes(300 * PAGE, 5).tofile(Path(folder, "f"))
        os.chmod(folder, 0o555)
        yield Path(folder)
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("forced", ["", *BACKENDS])
def test_a_directory_that_cannot_be_written_can_still_be_read_directly(read_only: Path, forced: str) -> None:
    expected = choose_backend(read_only)
    if forced in ("uring", "threads") and expected not in (forced, "uring"):
        pytest.skip(f"the probe says {forced} cannot work here")
    script = """
        import os, sys
        import numpy as np
        from everystep.engine import Memory, ReadPiece, Tuning, capabilities, choose_read_backend, read
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            capabilities(os.path.dirname(sys.argv[1]))
        except PermissionError:
            pass
        else:
            raise AssertionError("the directory can be written")
        backend = choose_read_backend(sys.argv[1])
        out = np.zeros(300 * 4096, np.uint8)
        piece = ReadPiece(0, Memory(out.ctypes.data, out.nbytes, out))
        read(sys.argv[1], [piece], tuning=Tuning(backend), verify=False)
        assert out.tobytes() == open(sys.argv[1], "rb").read()
        print(backend)
    """
    assert run(script, read_only / "f", EVERYSTEP_BACKEND=forced) == (forced or expected)
