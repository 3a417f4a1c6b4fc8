"""Files that are damaged, cut, foreign or hostile; devices that fail; processes that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Shelf
from everystep.engine import faults
from support.processes.child_processes import NotPermitted, Pipe, mount_small, run_forked

PAGE = 4096


@pytest.fixture
def path(memory: Path) -> Path:
    """A shelf with a past: two commits, so that both roots are there."""
    path = memory / "a.shelf"
    with Shelf(path, "8MiB") as shelf:
        with shelf.transaction():
            shelf.a = np.arange(3000.0)
            shelf.big = np.arange(200_000)  # more than one block
            shelf.n = 1
        shelf.n = 2
    return path


def _change(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def _position(path: Path, data: bytes) -> int:
    found = path.read_bytes().find(data)
    assert found > 0
    return found


def test_a_damaged_array_is_an_error_that_names_it_and_others_are_read(path: Path) -> None:
    _change(path, _position(path, np.arange(150_000, 150_004).tobytes()), b"\xff")
    with Shelf(path, mode="r") as shelf:
        assert shelf.n == 2
        assert shelf.a[7] == 7
        with pytest.raises(everystep.errors.CorruptShelf, match=r"'big'.*bytes 1048576 to 1600000") as raised:
            _ = shelf.big
        assert raised.value.name == "big"
        assert [error.name for error in shelf.verify()] == ["big"]
    with Shelf(path, mode="r", verify=False) as shelf:
        assert shelf.big.size == 200_000


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize("at", [0, 17, 60, 64 + 32, PAGE - 1])
def test_a_damaged_newest_root_falls_back_to_the_older_one_with_a_warning(
    path: Path, at: int, mode: str
) -> None:
    _change(path, 2 * PAGE + at, b"\xaa")  # generation 3, an odd one
    if mode == "r":
        with pytest.warns(everystep.ShelfWarning, match="the one before it is used"):
            shelf = Shelf(path, mode="r")
        with shelf:
            assert shelf.n == 1
    else:
        with pytest.warns(everystep.ShelfWarning, match="the one before it is used"):
            shelf = Shelf(path)
        with shelf:
            assert shelf.n == 1
            shelf.n = 5
        with Shelf(path) as shelf:
            assert (shelf.n, shelf.a[5]) == (5, 5)


@pytest.mark.parametrize(
    ("mode", "step", "kind"),
    [("r", "read", everystep.errors.ReadFailed), ("w", "sync", everystep.SaveFailed)],
)
def test_a_device_that_fails_while_a_shelf_is_opened_is_a_typed_error(
    path: Path, mode: str, step: str, kind: type[OSError]
) -> None:
    with pytest.raises(kind, match="cannot open the shelf") as raised, faults.injected(f"{step}:1:EIO"):
        Shelf(path, mode=mode, _medium="page cache")  # type: ignore[arg-type]
    assert raised.value.errno == errno.EIO
    with Shelf(path) as shelf:
        assert shelf.n == 2


@pytest.mark.parametrize("medium", ["page cache", "memory"])
def test_a_shelf_that_cannot_be_mapped_is_a_typed_error(path: Path, medium: str) -> None:
    def use() -> None:
        with Shelf(path, _medium=medium) as shelf:
            assert shelf.a[7] == 7
            shelf.a = np.ones(3)

    errors: list[Exception] = []
    for nth in range(1, 9):
        with faults.injected(f"map:{nth}:ENOMEM+"):
            try:
                use()
            except (everystep.errors.ReadFailed, everystep.SaveFailed) as error:
                errors.append(error)
            else:
                break
        with Shelf(path) as shelf:
            assert shelf.a[7] == 7
    assert errors
    assert {getattr(error, "errno", None) for error in errors} == {errno.ENOMEM}
    assert all("a.shelf" in str(error) for error in errors)


def test_an_array_that_cannot_be_mapped_for_its_own_changes_is_a_typed_error(path: Path) -> None:
    torch = pytest.importorskip("torch")
    with Shelf(path) as shelf:
        shelf.t = torch.arange(3000)
        assert shelf.t[7] == 7
        with faults.injected("map:1:ENOMEM"), pytest.raises(everystep.errors.ReadFailed, match="'t' of the"):
            _ = shelf.t
        assert shelf.t[7] == 7


@pytest.mark.parametrize("medium", ["page cache", "memory", "persistent memory"])
def test_a_commit_whose_growth_cannot_be_mapped_loses_nothing(memory: Path, medium: str) -> None:
    path = memory / "a.shelf"
    with Shelf(path, "32MiB", _medium=medium) as shelf:
        shelf.a = np.zeros(100)
        with faults.injected("map:1:ENOMEM+"), pytest.raises(everystep.SaveFailed) as raised:
            shelf.b = np.ones(2_000_000)
        assert raised.value.errno == errno.ENOMEM
        assert "b" not in shelf
        assert shelf.a[0] == 0
        shelf.b = np.ones(2_000_000)
    with Shelf(path) as shelf:
        assert (shelf.a[0], shelf.b[-1]) == (0, 1)


def test_a_warning_that_is_an_error_leaves_no_lock(path: Path) -> None:
    _change(path, 2 * PAGE, b"\xaa")
    with warnings.catch_warnings():
        warnings.simplefilter("error", everystep.ShelfWarning)
        with pytest.raises(everystep.ShelfWarning) as raised:
            Shelf(path)
    assert raised.tb is not None  # and all that its frames refer to
    with Shelf(path) as shelf:
        assert shelf.n == 1


def test_a_damaged_directory_falls_back_to_the_older_root_with_a_warning(path: Path) -> None:
    root = path.read_bytes()[2 * PAGE : 3 * PAGE]
    node = int.from_bytes(root[64:72], "little")
    _change(path, node + 3, b"\xaa")
    for mode in ("r", "w"):
        with pytest.warns(everystep.ShelfWarning, match="directory node"):
            shelf = Shelf(path, mode=mode)  # type: ignore[arg-type]
        with shelf:
            assert shelf.n == 1


def test_both_roots_damaged_is_an_error(path: Path) -> None:
    _change(path, PAGE + 100, b"\xaa")
    _change(path, 2 * PAGE + 100, b"\xaa")
    for mode in ("r", "w"):
        with pytest.raises(everystep.errors.CorruptShelf, match="root"):
            Shelf(path, mode=mode)  # type: ignore[arg-type]


def test_truncated_files_are_errors(path: Path) -> None:
    data = path.read_bytes()
    for length in (8, 60, 64, PAGE, 3 * PAGE - 1, 3 * PAGE, 5 * PAGE):
        path.write_bytes(data[:length])
        with pytest.raises(everystep.errors.CorruptShelf):
            Shelf(path)
        with pytest.raises(everystep.errors.CorruptShelf):
            Shelf(path, mode="r")
    path.write_bytes(data + bytes(100_000))  # half-grown: space that nothing uses yet
    with Shelf(path) as shelf:
        assert shelf.n == 2


def test_foreign_and_newer_files_are_errors(path: Path, memory: Path) -> None:
    for content in (b"", b"PK\x03\x04" + bytes(10_000), b"hf"):
        other = memory / "other"
        other.write_bytes(content)
        for mode in ("r", "w"):
            with pytest.raises(everystep.errors.UnsupportedShelf, match="not a shelf"):
                Shelf(other, mode=mode)  # type: ignore[arg-type]
        assert other.read_bytes() == content
    from everystep.engine import xxh3_64

    header = bytearray(path.read_bytes()[:56])
    header[8] = 9
    _change(path, 0, bytes(header) + xxh3_64(bytes(header)).to_bytes(8, "little"))
    with pytest.raises(everystep.errors.UnsupportedShelf, match="version 9"):
        Shelf(path)
    (memory / "directory").mkdir()
    with pytest.raises(OSError, match="irectory"):
        Shelf(memory / "directory")


@pytest.mark.filterwarnings("ignore::everystep.ShelfWarning")
def test_flipped_bits_are_never_silent(path: Path) -> None:
    data = path.read_bytes()
    with Shelf(path, mode="r") as shelf:
        whole = {name: np.asarray(shelf[name]).tobytes() for name in shelf}
    rng = random.Random(1)
    for _ in range(150):
        at = rng.randrange(len(data)) if rng.random() < 0.4 else rng.randrange(8 * PAGE)
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            with Shelf(path, mode="r") as shelf:
                found = {name: np.asarray(shelf[name]).tobytes() for name in shelf}
                assert found == whole or (shelf.generation == 2 and shelf.n == 1)
        except (everystep.errors.CorruptShelf, everystep.errors.UnsupportedShelf):
            pass


@pytest.mark.filterwarnings("ignore::everystep.ShelfWarning")
def test_hostile_files_with_right_checksums_are_bounded_and_run_nothing(path: Path) -> None:
    """An attacker who writes the file can also write the checksums."""
    from everystep.engine import xxh3_64

    path.unlink()
    with Shelf(path, "1MiB") as shelf, shelf.transaction():
        shelf.a = np.arange(300.0)
        shelf.n = {"x": [1, 2], "y": np.arange(30)}
        shelf.text = "text" * 300
    with Shelf(path) as shelf:
        shelf.n = shelf.n
    data = bytearray(path.read_bytes())
    data[PAGE : 2 * PAGE] = bytes(PAGE)  # no way back
    root = 2 * PAGE
    node = int.from_bytes(data[root + 64 : root + 72], "little")
    nbytes = int.from_bytes(data[root + 72 : root + 80], "little")
    rng = random.Random(2)
    errors = (everystep.EverystepError, MemoryError)
    seen = 0
    for _ in range(400):
        hostile = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = root + 8 + rng.randrange(90) if rng.random() < 0.3 else node + rng.randrange(nbytes)
            hostile[at] = rng.choice((0, 1, 255, 127, 128, rng.randrange(256)))
        digest = xxh3_64(bytes(hostile[node : node + nbytes]))
        hostile[root + 80 : root + 88] = digest.to_bytes(8, "little")
        digest = xxh3_64(bytes(hostile[root : root + PAGE - 8]))
        hostile[root + PAGE - 8 : root + PAGE] = digest.to_bytes(8, "little")
        path.write_bytes(hostile)
        try:
            with Shelf(path, mode="r") as shelf:
                for name in shelf:
                    try:
                        repr(shelf[name])
                    except errors:
                        seen += 1
        except errors:
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("step", ["write", "fallocate", "sync"])
@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_device_loses_nothing_that_was_committed(
    memory: Path, step: str, code: str, nth: int
) -> None:
    path = memory / "a.shelf"
    with Shelf(path, "8MiB", _medium="page cache") as shelf:
        shelf.a = np.zeros(100)
        error = None
        try:
            lasting = "+" if step == "fallocate" else ""  # else a smaller growth is tried, and succeeds
            with faults.injected(f"{step}:{nth}:{code}{lasting}"), shelf.transaction():
                shelf.a = np.ones(100)
                shelf.b = np.ones(200_000)
        except everystep.SaveFailed as raised:
            error = raised
        failed = error is not None
        if failed:
            full = isinstance(error, everystep.errors.StorageFull)
            assert full == (code == "ENOSPC" and step != "sync")
        assert failed == (nth == 1 or (nth == 2 and step != "fallocate") or step == "write")
        assert shelf.a.any() == (not failed)
        if step == "sync" and failed:
            with pytest.raises(everystep.SaveFailed, match="open it again"):
                shelf.a = np.ones(100)
        else:
            shelf.a = np.full(100, 2.0)
            assert shelf.a[0] == 2
    with Shelf(path) as shelf:
        assert shelf.a[0] in (0, 1, 2)
        assert ("b" in shelf) == (shelf.a[0] == 1 or not failed)


STORM = """
import sys, numpy as np
from everystep import Shelf
with Shelf(sys.argv[1], "2MiB") as shelf:
    i = shelf.get("i", 0)
    print("ready", flush=True)
    while True:
        i += 1
        with shelf.transaction():
            shelf.i = i
            shelf.a = np.full(1000 + i % 3, float(i))
            if "b" in shelf:
                shelf.writable("b")[:] = i
            else:
                shelf.b = np.full(5000, float(i))
        print(i, flush=True)
"""


@pytest.mark.parametrize("where", ["disk", pytest.param("memory", marks=pytest.mark.crash_large)])
def test_a_storm_of_kills_leaves_whole_transactions(tmp_path: Path, memory: Path, where: str) -> None:
    path = (tmp_path if where == "disk" else memory) / "a.shelf"
    rng = random.Random(3)
    for _ in range(30 if where == "memory" else 2):
        child = subprocess.Popen([sys.executable, "-c", STORM, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.2)
        child.send_signal(signal.SIGKILL)
        printed = child.stdout.read().split("\n")
        child.stdout.close()
        child.wait()
        with Shelf(path, mode="r") as shelf:
            if "i" not in shelf:
                continue
            i = shelf.i
            told = int(printed[-2]) if len(printed) > 1 else 0
            assert i in (told, told + 1) or not told
            assert (shelf.a == i).all()
            assert shelf.a.shape == (1000 + i % 3,)
            assert (shelf.b == i).all()


READER = """
import sys, time, numpy as np
from everystep import Shelf
with Shelf(sys.argv[1], mode="r") as shelf:
    print("ready", flush=True)
    end = time.monotonic() + 1.0
    seen = set()
    while time.monotonic() < end:
        i, a, b = shelf.i, shelf.a, shelf.b
        seen.add(i)
        assert (a == i).all() and (b == i).all(), (i, a, b)
        shelf.refresh()
        assert (a == i).all() and (b == i).all()
    print(len(seen))
"""


def test_readers_in_other_processes_are_never_torn(memory: Path) -> None:
    path = memory / "a.shelf"
    with Shelf(path, "4MiB") as shelf:

        def commit(i: int) -> None:
            with shelf.transaction():
                shelf.i = i
                shelf.a = np.full(3000, float(i))
                shelf.b = np.full(100, float(i))

        commit(0)
        readers = [
            subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        i = 0
        while any(reader.poll() is None for reader in readers):
            i += 1
            commit(i)
        for reader in readers:
            assert reader.stdout is not None
            _, seen = reader.stdout.read().split()
            reader.stdout.close()
            assert reader.returncode == 0
            assert int(seen) >= 1  # how many is a matter of load
        assert shelf.usage.file <= 4 << 20
        commit(i + 1)
        assert shelf.usage.waiting < 1 << 20


def test_a_dead_reader_holds_no_space(memory: Path) -> None:
    path = memory / "a.shelf"
    with Shelf(path, "2MiB") as shelf:
        shelf.i, shelf.b = 0, np.zeros(100)
        shelf.a = np.zeros(10_000)
        shelf.i = 0
        child = subprocess.Popen(
            [sys.executable, "-c", READER.replace("1.0", "100"), str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
        child.stdout.close()
        child.wait()
        for _ in range(100):
            shelf.a = np.zeros(10_000)
        assert shelf.usage.file <= 2 << 20


def test_a_second_writer_in_another_process_is_refused_until_the_first_is_gone(memory: Path) -> None:
    path = memory / "a.shelf"
    child = subprocess.Popen([sys.executable, "-c", STORM, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(everystep.errors.Locked):
        Shelf(path)
    child.kill()
    child.stdout.close()
    child.wait()
    Shelf(path).close()


def test_a_forked_child_neither_keeps_the_lock_nor_uses_the_shelf(memory: Path) -> None:
    path = memory / "a.shelf"
    shelf = Shelf(path)
    shelf.a = np.arange(10)
    array = shelf.a
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        good = int(array.sum()) == 45
        try:
            shelf.a = 1
        except everystep.errors.ShelfClosed:
            good = good and True
        else:
            good = False
        os.write(write, b"+" if good else b"-")
        signal.pause()
    try:
        assert os.read(read, 1) == b"+"
        with pytest.raises(everystep.errors.Locked):
            Shelf(path)
        shelf.close()
        with Shelf(path) as again:
            assert again.a.tolist() == list(range(10))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_the_cost_of_opening_and_of_a_commit_does_not_grow_with_the_shelf(memory: Path) -> None:
    """By what is written, not by the clock."""
    written = []
    for size in (1 << 17, 1 << 20, 1 << 23):
        path = memory / f"{size}.shelf"
        with Shelf(path, "128MiB", _medium="page cache") as shelf:
            shelf.large = np.zeros(size // 8)
            shelf.small = np.zeros(1000)
            shelf.small = np.zeros(1000)
            with faults.traced() as events:
                shelf.small = np.ones(1000)
        assert {event.call for event in events} == {"write", "sync"}
        written.append(sum(event.nbytes for event in events))
    assert max(written) - min(written) < 100
    assert written[0] < 8000 + 3 * PAGE


def test_the_write_back_of_caches_leaves_memory_as_it_is() -> None:
    from everystep import _native  # noqa: TID251 -- the routine has no other use on ordinary memory

    assert _native.write_back_instruction() in ("clwb", "clflushopt", "clflush", "dc cvap", "dc cvac", "none")
    data = bytearray(os.urandom(100_001))
    same = bytes(data)
    _native.write_back(memoryview(data)[3:])
    _native.write_back(b"")
    assert bytes(data) == same


def test_a_copy_with_holes_on_a_full_disk_is_an_error_and_no_crash(memory: Path) -> None:
    path = memory / "small" / "copy.shelf"

    def work(pipe: Pipe) -> None:
        with Shelf(memory / "whole.shelf", "8MiB") as shelf:
            shelf.a = np.arange(10.0)
            shelf.zeros = np.zeros(50_000)
            del shelf.zeros
        data = (memory / "whole.shelf").read_bytes()
        try:
            mount_small(path.parent, 1 << 20)
        except NotPermitted as error:
            return pipe.send(f"not permitted: {error}")
        with open(path, "wb") as file:
            file.truncate(len(data))
            for at in range(0, len(data), PAGE):
                if any(data[at : at + PAGE]):
                    os.pwrite(file.fileno(), data[at : at + PAGE], at)
        with open(path.parent / "rest", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        for _ in range(2):
            try:
                Shelf(path)
            except everystep.errors.StorageFull as error:
                pipe.send(str(error))
            with Shelf(path, mode="r") as shelf:
                pipe.send(shelf.a.tolist())
        os.unlink(path.parent / "rest")
        with Shelf(path) as shelf:
            shelf.b = np.ones(50_000)
            pipe.send([float(shelf.b.sum()), *shelf])

    path.parent.mkdir()
    said = run_forked(work)
    if str(said[0]).startswith("not permitted"):
        pytest.skip(said[0])
    assert said == [said[0], list(range(10)), said[0], list(range(10)), [50_000.0, "a", "b"]]
