"""Calls that a save can do without pass the fault seam, too: it works around what fails, or says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import engine
from everystep.engine import Backend, Tuning, WritePiece, capabilities, faults, fs
from everystep.engine import probe as probing
from support.crashes.forbidden_calls import run
from support.states.random_pieces import memory_of

WINDOW = 64 << 10
DATA = np.random.default_rng(1).integers(0, 256, 64 * WINDOW, np.uint8)


@pytest.fixture
def uring(tmp_path: Path) -> Tuning:
    if capabilities(tmp_path).best != "uring":
        pytest.skip("no rings here")
    return Tuning("uring", WINDOW, 8, 0)


def written(path: Path, tuning: Tuning) -> bytes:
    job = engine.write(path, DATA.nbytes, [WritePiece(0, memory_of(DATA))], tuning=tuning)
    job.wait(100)
    fs.sync([job])
    return path.read_bytes()


def test_every_call_has_a_name_of_its_own() -> None:
    assert "" not in faults.CALLS
    assert len(set(faults.CALLS)) == len(faults.CALLS)


@pytest.mark.parametrize("fault", ["ring:1:EPERM", "ring:1:EINVAL", "ring:1:ENOMEM+"])
def test_threads_write_where_no_ring_can_be_made(uring: Tuning, tmp_path: Path, fault: str) -> None:
    with faults.injected(fault):
        assert written(tmp_path / "f", uring) == DATA.tobytes()


@pytest.mark.parametrize("code", ["EAGAIN", "EINTR"])
@pytest.mark.parametrize("nth", [2, 5, 20, 100])
def test_a_call_on_a_ring_that_cannot_be_made_now_is_made_again(
    uring: Tuning, tmp_path: Path, nth: int, code: str
) -> None:
    with faults.injected(f"ring:{nth}:{code}"):
        assert written(tmp_path / "f", uring) == DATA.tobytes()


@pytest.mark.parametrize("nth", [2, 11, 12, 60])
def test_a_ring_that_is_interrupted_all_the_time_moves_every_byte(
    uring: Tuning, tmp_path: Path, nth: int
) -> None:
    """The wait for a completion is bounded: after it, the job looks at the memory that the kernel shares."""
    with faults.injected(f"ring:{nth}:EINTR+"):
        assert written(tmp_path / "f", uring) == DATA.tobytes()


@pytest.mark.parametrize("backend", ["uring", "threads", "buffered"])
def test_memory_for_staging_that_cannot_be_mapped_fails_the_job(
    backend: Backend, uring: Tuning, tmp_path: Path
) -> None:
    script = """
        import numpy as np
        from everystep import engine
        from everystep.engine import Tuning, WritePiece, faults, fs

        data = np.ones(64 << 16, np.uint8)
        piece = WritePiece(0, engine.Memory(data.ctypes.data, data.nbytes, data))
        tuning = Tuning(sys.argv[2], 64 << 10, 8, 0)

        def write(name):
            with engine.write(sys.argv[1] + "/" + name, data.nbytes, [piece], tuning=tuning) as job:
                job.wait(100)
                fs.sync([job])

        with faults.injected("map:1:ENOMEM"):  # the first job of a process has no memory yet
            try:
                write("a")
            except OSError as error:
                assert error.errno == errno.ENOMEM and "memory for staging" in str(error), error
            else:
                raise AssertionError("it did not fail")
        write("b")
        assert open(sys.argv[1] + "/b", "rb").read() == data.tobytes()
        print("written")
    """
    assert run(script, tmp_path, backend) == "written"


def test_memory_to_load_into_that_cannot_be_mapped_is_a_memory_error() -> None:
    with faults.injected("map:1:ENOMEM"), pytest.raises(MemoryError):
        engine.fresh_bytes(1 << 20)


@pytest.mark.parametrize("nth", [2, 10, 11, 12, 60, 120])
def test_threads_go_on_where_a_ring_fails_for_good(uring: Tuning, tmp_path: Path, nth: int) -> None:
    script = """
        import numpy as np
        from everystep import engine
        from everystep.engine import Tuning, WritePiece, faults, fs

        data = np.random.default_rng(1).integers(0, 256, 64 << 16, np.uint8)
        memory = engine.Memory(data.ctypes.data, data.nbytes, data)
        with faults.injected(f"ring:{sys.argv[2]}:ENOSYS+"):
            for name in "abc":
                tuning = Tuning("uring", 64 << 10, 8, 0)
                job = engine.write(sys.argv[1] + name, data.nbytes, [WritePiece(0, memory)], tuning=tuning)
                job.wait(100)
                fs.sync([job])
                assert open(sys.argv[1] + name, "rb").read() == data.tobytes()
        print("written")
    """
    assert run(script, tmp_path, nth) == "written"


@pytest.mark.parametrize("nbytes", [1000, 3 << 20])
def test_bytes_that_are_lost_before_the_sync_fail_the_save(tmp_path: Path, nbytes: int) -> None:
    options = everystep.Options(backend="buffered")
    with faults.injected("start_writeback:1:EIO"), pytest.raises(everystep.SaveFailed) as caught:
        everystep.save(tmp_path / "a", {"w": np.ones(nbytes, np.uint8)}, options=options)
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "a").exists()
    with faults.injected("start_writeback:1:ENOSYS+"):
        everystep.save(tmp_path / "a", {"w": np.ones(nbytes, np.uint8)}, options=options)
    assert (everystep.load(tmp_path / "a")["w"] == 1).all()


def probed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> probing.Capabilities:
    monkeypatch.setattr(probing, "_known", {})
    return capabilities(directory)


def test_a_directory_whose_trial_fails_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault, reason in (
        ("probe:1:EINVAL", f"open with O_DIRECT: {os.strerror(errno.EINVAL)}"),
        ("probe:2:EINVAL", f"trial direct write: {os.strerror(errno.EINVAL)}"),
        ("probe:2:short", "trial direct write: fell short"),
    ):
        if not probed(tmp_path, monkeypatch).direct:
            pytest.skip("no direct I/O here")
        with faults.injected(fault):
            able = probed(tmp_path, monkeypatch)
        assert (able.best, able.direct_reason) == ("buffered", reason)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ["probe:1:EACCES+", "probe:2:EIO"])
def test_a_directory_that_cannot_be_written_is_the_systems_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if not probed(tmp_path, monkeypatch).direct:
        pytest.skip("no direct I/O here")
    with faults.injected(fault), pytest.raises(OSError, match="probe") as caught:
        probed(tmp_path, monkeypatch)
    assert caught.value.filename == os.fspath(tmp_path)
